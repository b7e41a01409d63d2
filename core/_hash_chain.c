/* The chain of block hashes: keyed BLAKE2b of each block and of the hash before it. The definition is that of core/kv/hashing.py.
 *
 * Knows no Python: plain C, called by ctypes. Where there is no compiler hashlib computes the same hashes, several times slower.
 * Little-endian machines only. BLAKE2b is that of RFC 7693, with 16 bytes of output.
 */

#define _POSIX_C_SOURCE 199309L /* for clock_gettime */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define CHUNK_BYTES 128
#define HASH_BYTES 16
#define NO_EXTRA_BYTES 4 /* the length of the extra keys, which is 0 here */

static const uint64_t INITIAL[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static inline uint64_t rotated(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

#define MIX(a, b, c, d, x, y) \
    do { \
        v[a] += v[b] + (x); v[d] = rotated(v[d] ^ v[a], 32); v[c] += v[d]; v[b] = rotated(v[b] ^ v[c], 24); \
        v[a] += v[b] + (y); v[d] = rotated(v[d] ^ v[a], 16); v[c] += v[d]; v[b] = rotated(v[b] ^ v[c], 63); \
    } while (0)

/* num_bytes: how many bytes the state has read, these included. */
static void compress_by_words(uint64_t state[8], const uint8_t chunk[CHUNK_BYTES], uint64_t num_bytes, int is_last)
{
    uint64_t v[16], m[16];
    memcpy(m, chunk, CHUNK_BYTES);
    memcpy(v, state, 64);
    memcpy(v + 8, INITIAL, 64);
    v[12] ^= num_bytes;
    if (is_last) v[14] = ~v[14];
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 12
#endif
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(WITHOUT_VECTORS)
#define HAS_VECTORS
typedef uint64_t row_t __attribute__((vector_size(32))); /* four words of the state, a column in each lane */
typedef uint64_t words_t __attribute__((vector_size(64)));

#define ROTATED(row, bits) ((row) >> (bits) | (row) << (64 - (bits)))
#define TURNED(row, lanes) __builtin_shuffle(row, (row_t){(lanes) & 3, ((lanes) + 1) & 3, ((lanes) + 2) & 3, ((lanes) + 3) & 3})
#define MIX_ROWS(x, y) \
    do { \
        a = a + (x) + b; d = ROTATED(d ^ a, 32); c += d; b = ROTATED(b ^ c, 24); \
        a = a + (y) + b; d = ROTATED(d ^ a, 16); c += d; b = ROTATED(b ^ c, 63); \
    } while (0)

/* The same with four mixes at once. Between columns and diagonals b, which is known last, stays where it is, and the others turn:
 * the turns then take no time of their own, and diagonal i is in lane i + 1. */
__attribute__((target("arch=x86-64-v4"))) static void compress_by_rows(
    uint64_t state[8], const uint8_t chunk[CHUNK_BYTES], uint64_t num_bytes, int is_last)
{
    row_t a, b, c, d, first, second;
    words_t low, high;
    memcpy(&low, chunk, 64);
    memcpy(&high, chunk + 64, 64);
    memcpy(&first, state, 32);
    memcpy(&second, state + 4, 32);
    memcpy(&c, INITIAL, 32);
    memcpy(&d, INITIAL + 4, 32);
    a = first;
    b = second;
    d ^= (row_t){num_bytes, 0, is_last ? ~(uint64_t)0 : 0, 0};
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round];
        words_t columns = __builtin_shuffle(low, high, (words_t){s[0], s[2], s[4], s[6], s[1], s[3], s[5], s[7]});
        words_t diagonals = __builtin_shuffle(low, high, (words_t){s[14], s[8], s[10], s[12], s[15], s[9], s[11], s[13]});
        MIX_ROWS(__builtin_shufflevector(columns, columns, 0, 1, 2, 3), __builtin_shufflevector(columns, columns, 4, 5, 6, 7));
        a = TURNED(a, 3);
        c = TURNED(c, 1);
        d = TURNED(d, 2);
        MIX_ROWS(
            __builtin_shufflevector(diagonals, diagonals, 0, 1, 2, 3), __builtin_shufflevector(diagonals, diagonals, 4, 5, 6, 7));
        a = TURNED(a, 1);
        c = TURNED(c, 3);
        d = TURNED(d, 2);
    }
    first ^= a ^ c;
    second ^= b ^ d;
    memcpy(state, &first, 32);
    memcpy(state + 4, &second, 32);
}
#endif

typedef void compress_t(uint64_t state[8], const uint8_t chunk[CHUNK_BYTES], uint64_t num_bytes, int is_last);

#if defined(HAS_VECTORS) && !defined(ONLY_VECTORS)
/* Return the nanoseconds of the fastest of several short chains. */
static int64_t time_of(compress_t *compress)
{
    const uint8_t chunk[CHUNK_BYTES] = {0};
    uint64_t state[8] = {0};
    int64_t fastest = INT64_MAX;
    for (int turn = 0; turn < 32; turn++) { /* wide units of some CPUs take microseconds to wake up */
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int i = 0; i < 16; i++) compress(state, chunk, CHUNK_BYTES, 0);
        clock_gettime(CLOCK_MONOTONIC, &end);
        int64_t time = (end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec;
        fastest = time < fastest ? time : fastest;
    }
    return fastest;
}
#endif

/* Return the faster on this CPU. A chain has one compression after another, so that only the latency of instructions counts. That
 * of vectors is one cycle on some CPUs and two on others (Zen 5), so it is measured, once. The caller holds the interpreter's lock. */
static compress_t *fastest(void)
{
#ifdef HAS_VECTORS
    static compress_t *chosen;
    if (!chosen) {
        int has_rows = __builtin_cpu_supports("x86-64-v4") != 0;
#ifndef ONLY_VECTORS
        has_rows = has_rows && time_of(compress_by_rows) < time_of(compress_by_words);
#endif
        chosen = has_rows ? compress_by_rows : compress_by_words;
    }
    return chosen;
#else
    return compress_by_words;
#endif
}

/* Write to keyed the state of a hasher that has read its key, 1 to 64 bytes; person: 16 bytes. */
void kvferry_hash_chain_start(const uint8_t *key, size_t key_bytes, const uint8_t *person, uint8_t keyed[64])
{
    uint8_t chunk[CHUNK_BYTES] = {0};
    uint64_t state[8], words[2];
    memcpy(state, INITIAL, sizeof INITIAL);
    memcpy(words, person, sizeof words);
    state[0] ^= HASH_BYTES | (uint64_t)key_bytes << 8 | 1u << 16 | 1u << 24;
    state[6] ^= words[0];
    state[7] ^= words[1];
    memcpy(chunk, key, key_bytes);
    compress_by_words(state, chunk, CHUNK_BYTES, 0);
    memcpy(keyed, state, sizeof state);
}

/* parent: 16 bytes; tokens: num_blocks times block_bytes; hashes: 16 bytes for each block, which this writes. */
void kvferry_hash_chain(
    const uint8_t keyed[64], const uint8_t *parent, const uint8_t *tokens, size_t block_bytes, size_t num_blocks, uint8_t *hashes)
{
    compress_t *compress = fastest();
    for (size_t block = 0; block < num_blocks; block++) {
        uint64_t state[8], num_bytes = CHUNK_BYTES;
        uint8_t chunk[CHUNK_BYTES] = {0};
        size_t filled = HASH_BYTES + NO_EXTRA_BYTES, left = block_bytes;
        memcpy(state, keyed, sizeof state);
        memcpy(chunk, parent, HASH_BYTES);
        for (;;) {
            size_t part = left < CHUNK_BYTES - filled ? left : CHUNK_BYTES - filled;
            memcpy(chunk + filled, tokens, part);
            memset(chunk + filled + part, 0, CHUNK_BYTES - filled - part);
            num_bytes += filled + part;
            tokens += part;
            left -= part;
            compress(state, chunk, num_bytes, left == 0);
            if (left == 0) break;
            filled = 0;
        }
        memcpy(hashes, state, HASH_BYTES);
        parent = hashes;
        hashes += HASH_BYTES;
    }
}
