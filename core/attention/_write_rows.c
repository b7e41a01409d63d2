/* Copies a step's keys and values to their rows in a KV pool. Loaded by core/attention/compiled_write.py.
 *
 * Knows no Python: plain C, called by ctypes with the interpreter lock released.
 */

#include <stdint.h>
#include <string.h>

/* Token t has rows_per_token rows of row_bytes one after another from source + t * token_bytes on; row r of it goes to
 * target + rows[t * rows_per_token + r] * row_bytes. */
void kvferry_write_rows(
    const char *source, const int64_t *rows, char *target, int64_t num_tokens, int64_t token_bytes, int64_t rows_per_token,
    int64_t row_bytes)
{
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t row = 0; row < rows_per_token; row++)
            memcpy(target + *rows++ * row_bytes, source + token * token_bytes + row * row_bytes, row_bytes);
}
