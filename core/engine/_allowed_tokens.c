/* Set the logits of tokens that a mask forbids to minus infinity. core/engine/allowed_tokens.py loads this.
 *
 * Knows no Python: plain C, called by ctypes. Where there is no compiler numpy does the same, in several times the time.
 * Little-endian machines only; the compiler vectorises the inner loop, for several kinds of CPU where the linker can choose
 * between them at load time.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

#define WORD_TOKENS 32

/* mask: a bit for each logit, from the lowest bit of the first byte on; 1 = allowed. */
FOR_EACH_CPU void kvferry_keep_allowed(float *restrict logits, const uint8_t *restrict mask, size_t num_logits)
{
    size_t first = 0;
    for (; first + WORD_TOKENS <= num_logits; first += WORD_TOKENS) {
        uint32_t word;
        memcpy(&word, mask + first / 8, sizeof word);
        if (word == UINT32_MAX) continue;
        for (uint32_t bit = 0; bit < WORD_TOKENS; bit++)
            logits[first + bit] = word >> bit & 1 ? logits[first + bit] : -INFINITY;
    }
    for (; first < num_logits; first++)
        if (!(mask[first / 8] >> first % 8 & 1)) logits[first] = -INFINITY;
}
