/* The chain of block hashes: keyed BLAKE2b of each block and of the hash before it. The definition is that of core/kv/hashing.py.
 *
 * Knows no Python: plain C, called by ctypes. Where there is no compiler hashlib computes the same hashes, several times slower.
 * Little-endian machines only. BLAKE2b is that of RFC 7693, with 16 bytes of output.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
static void compress(uint64_t state[8], const uint8_t chunk[CHUNK_BYTES], uint64_t num_bytes, int is_last)
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

/* The state of a hasher that has read its key, 1 to 64 bytes; person: 16 bytes. */
static void start(uint64_t state[8], const uint8_t *key, size_t key_bytes, const uint8_t *person)
{
    uint8_t chunk[CHUNK_BYTES] = {0};
    uint64_t words[2];
    memcpy(state, INITIAL, sizeof INITIAL);
    memcpy(words, person, sizeof words);
    state[0] ^= HASH_BYTES | (uint64_t)key_bytes << 8 | 1u << 16 | 1u << 24;
    state[6] ^= words[0];
    state[7] ^= words[1];
    memcpy(chunk, key, key_bytes);
    compress(state, chunk, CHUNK_BYTES, 0);
}

/* parent: 16 bytes; tokens: num_blocks times block_bytes; hashes: 16 bytes for each block, which this writes. */
void kvferry_hash_chain(
    const uint8_t *key, size_t key_bytes, const uint8_t *person, const uint8_t *parent, const uint8_t *tokens, size_t block_bytes,
    size_t num_blocks, uint8_t *hashes)
{
    uint64_t keyed[8];
    start(keyed, key, key_bytes, person);
    for (size_t block = 0; block < num_blocks; block++) {
        uint64_t state[8], num_bytes = CHUNK_BYTES;
        uint8_t chunk[CHUNK_BYTES] = {0};
        size_t filled = HASH_BYTES + NO_EXTRA_BYTES, left = block_bytes;
        memcpy(state, keyed, sizeof keyed);
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
