/* The two sums of a block's digest, in one pass over its bytes, which may also copy them. The definition is that of core/digest.py,
 * which loads this.
 *
 * Knows no Python: plain C, called by ctypes with the interpreter lock released. Where there is no compiler the digest is computed
 * with numpy, several times slower. Little-endian machines only; compiled for several kinds of CPU where the linker can choose
 * between them at load time.
 */

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

typedef uint64_t __attribute__((aligned(1), may_alias)) word_t; /* a block may begin at any byte */

enum {
    LANES = 4,   /* words of a vector of 32 bytes: twice as wide ones take longer on a CPU with AVX-512, and far longer without */
    AHEAD = 1024 /* words from what is read to what is fetched: else the CPU waits for memory first and multiplies then */
};

typedef uint64_t lanes_t __attribute__((vector_size(8 * LANES)));
typedef uint64_t any_lanes_t __attribute__((vector_size(8 * LANES), aligned(1), may_alias));

/* row_keys: row_words keys of whole words, then as many of their upper halves; outer_keys: as many as rows, likewise. target: null, or
 * where the words are copied to. Then each word is read once, by volatile, so the sums are those of the copy, whatever another
 * process writes meanwhile. */
FOR_EACH_CPU uint64_t kvferry_digest_sums(
    const word_t *words, size_t num_words, const uint64_t *row_keys, size_t row_words, const uint64_t *outer_keys, size_t num_rows,
    word_t *target)
{
    uint64_t digest = 0;
    for (size_t row = 0; row < num_rows; row++) {
        const word_t *first = words + row * row_words;
        size_t left = num_words - row * row_words;
        size_t length = left < row_words ? left : row_words;
        uint64_t sum = 0;
        size_t column = 0;
        lanes_t sums = {0};
        for (; column + LANES <= length; column += LANES) {
            const any_lanes_t *source = (const any_lanes_t *)(first + column);
            lanes_t word = target ? *(const volatile any_lanes_t *)source : *source;
            __builtin_prefetch(first + column + AHEAD);
            if (target) *(any_lanes_t *)(target + row * row_words + column) = word;
            sums += *(const any_lanes_t *)(row_keys + column) * word;
            sums += *(const any_lanes_t *)(row_keys + row_words + column) * (word >> 32);
        }
        for (int lane = 0; lane < LANES; lane++)
            sum += sums[lane];
        for (; column < length; column++) {
            uint64_t word = *(const volatile word_t *)(first + column);
            if (target) target[row * row_words + column] = word;
            sum += row_keys[column] * word + row_keys[row_words + column] * (word >> 32);
        }
        digest += outer_keys[row] * sum + outer_keys[num_rows + row] * (sum >> 32);
    }
    return digest;
}
