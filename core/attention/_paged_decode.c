/* Attention of sequences with one query each, straight from the pages of a KV pool. Loaded by core/attention/compiled_decode.py.
 *
 * Keys and values are float32 or bfloat16; products, sums and softmax are float32. Every key and value is read once, whatever the
 * number of query heads that share it. The work on one sequence does not depend on the others, so neither do its results. Knows
 * no Python: plain C with vector extensions, called by ctypes with the interpreter lock released.
 */

#ifndef VARIANT /* the part that is read once; the kernels follow in #else */

#include "../_vectors.h"

#define MAX_GROUP 4 /* query heads that are computed together: their sums fit the registers */
#define MAX_HEAD_DIM 256

typedef float quad __attribute__((vector_size(16)));
typedef float any_quad __attribute__((vector_size(16), aligned(1), may_alias));

/* Sizes in elements. Strides lead from one block, KV head or token to the next; a value is ``value_offset`` after its key.
 * block_ids, block_starts: the blocks of sequence s are block_ids[block_starts[s]] to block_ids[block_starts[s + 1] - 1].
 * first_slots, end_slots: the visible slots of a sequence, counted from its first block. */
struct problem {
    const char *query; /* [num_seqs, num_kv_heads * group, head_dim], rows of a sequence query_stride apart */
    char *output;      /* the same, contiguous */
    const char *pool;  /* the first key of the layer in block 0 */
    const int64_t *block_ids, *block_starts, *first_slots, *end_slots;
    int64_t query_stride, block_stride, head_stride, token_stride, value_offset;
    int64_t block_size, num_kv_heads, group, head_dim, is_bfloat16;
    double scale;
};

#define KERNELS "attention/_paged_decode.c"
#include "../_kinds_of_cpu.h"

/* Compute items [first, end), where item s * num_kv_heads + h is KV head h of sequence s.
 * scores: scratch, MAX_GROUP times the longest visible length rounded up to WIDEST, plus WIDEST. */
void kvferry_paged_decode(const struct problem *p, int64_t first, int64_t end, float *scores)
{
    CALL_VARIANT(compute_items, p, first, end, scores);
}

#else

#include "../_vectors.h"

/* The sums of the lanes of a, b, c and d, in this order. */
INLINE quad VARIANT(sums_of)(floats a, floats b, floats c, floats d)
{
#if LANES == 4
    floats ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
    floats cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
#elif LANES == 8
    floats ab = SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    floats cd = SHUFFLE(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    floats abcd = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(abcd, abcd, 0, 1, 2, 3) + SHUFFLE(abcd, abcd, 4, 5, 6, 7);
#else
    floats ab = SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
        + SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    floats cd = SHUFFLE(c, d, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
        + SHUFFLE(c, d, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    floats abcd = SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
        + SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return (SHUFFLE(abcd, abcd, 0, 1, 2, 3) + SHUFFLE(abcd, abcd, 4, 5, 6, 7))
        + (SHUFFLE(abcd, abcd, 8, 9, 10, 11) + SHUFFLE(abcd, abcd, 12, 13, 14, 15));
#endif
}

/* Ask for one token's row. Each page of the pool is elsewhere in memory, where no prefetcher of the CPU looks. */
INLINE void VARIANT(prefetch)(const struct problem *p, int64_t row, int is_bfloat16)
{
    const char *address = p->pool + row * (is_bfloat16 ? 2 : 4);
    for (int64_t byte = 0; byte < p->head_dim * (is_bfloat16 ? 2 : 4); byte += 64)
        __builtin_prefetch(address + byte);
}

/* Fill scores[head * stride + slot - first], times log2(e), for the slots [first, end) of one page, and up to 3 beyond. */
INLINE void VARIANT(score_page)(
    const struct problem *p, int64_t keys, int64_t next, int64_t first, int64_t end, const float *query, float *scores,
    int64_t stride, int group, int is_bfloat16)
{
    for (int64_t slot = first; slot < end; slot += 4) {
        UNROLL for (int row = 0; row < 4; row++)
            VARIANT(prefetch)(p, next + (slot + row) * p->token_stride, is_bfloat16);
        floats sums[MAX_GROUP][4];
        int64_t rows[4];
        UNROLL for (int row = 0; row < 4; row++) /* a row beyond the last is computed twice: nothing else may be read */
            rows[row] = keys + (slot + row < end ? slot + row : end - 1) * p->token_stride;
        UNROLL for (int head = 0; head < group; head++)
            UNROLL for (int row = 0; row < 4; row++)
                sums[head][row] = (floats){0};
        for (int64_t column = 0; column < p->head_dim; column += LANES)
            UNROLL for (int row = 0; row < 4; row++) {
                floats key = VARIANT(load)(p->pool, rows[row] + column, is_bfloat16);
                UNROLL for (int head = 0; head < group; head++)
                    sums[head][row] += key * *(const any_floats *)(query + head * MAX_HEAD_DIM + column);
            }
        UNROLL for (int head = 0; head < group; head++)
            *(any_quad *)(scores + head * stride + slot - first)
                = VARIANT(sums_of)(sums[head][0], sums[head][1], sums[head][2], sums[head][3]);
    }
}

/* Replace count scores by exponentials relative to the largest; return their sum. The array has room for whole vectors. */
INLINE float VARIANT(exponentiate)(float *scores, int64_t count)
{
    const float minus_infinity = -__builtin_inff();
    for (int64_t slot = count; slot % LANES; slot++)
        scores[slot] = minus_infinity;
    floats highest = (floats){0} + minus_infinity, total = {0};
    for (int64_t slot = 0; slot < count; slot += LANES)
        highest = VARIANT(largest)(*(any_floats *)(scores + slot), highest);
    float top = highest[0];
    for (int lane = 1; lane < LANES; lane++)
        top = highest[lane] > top ? highest[lane] : top;
    for (int64_t slot = 0; slot < count; slot += LANES) {
        floats weights = VARIANT(exp2_of)(*(any_floats *)(scores + slot) - top);
        *(any_floats *)(scores + slot) = weights;
        total += weights;
    }
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++)
        sum += total[lane];
    return sum;
}

/* Fill ``width`` vectors of the output from ``column`` on: the weighted sums of the values. */
INLINE void VARIANT(add_values)(
    const struct problem *p, int64_t seq, const int64_t *blocks, int64_t base, int64_t query_head, int64_t column,
    const float *scores, int64_t stride, const float *inverse, int group, int width, int is_bfloat16)
{
    int64_t first = p->first_slots[seq], end = p->end_slots[seq], size = p->block_size;
    floats sums[MAX_GROUP][4];
    UNROLL for (int head = 0; head < group; head++)
        UNROLL for (int part = 0; part < width; part++)
            sums[head][part] = (floats){0};
    for (int64_t slot = first; slot < end;) {
        int64_t page = slot / size, page_end = (page + 1) * size < end ? (page + 1) * size : end;
        int64_t values = blocks[page] * p->block_stride + base + p->value_offset + column - page * size * p->token_stride;
        int64_t next = (page + 1) * size < end ? values + (blocks[page + 1] - blocks[page]) * p->block_stride : values;
        for (; slot < page_end; slot++) {
            VARIANT(prefetch)(p, next + slot * p->token_stride, is_bfloat16);
            UNROLL for (int part = 0; part < width; part++) {
                floats value = VARIANT(load)(p->pool, values + slot * p->token_stride + part * LANES, is_bfloat16);
                UNROLL for (int head = 0; head < group; head++)
                    sums[head][part] += value * scores[head * stride + slot - first];
            }
        }
    }
    UNROLL for (int head = 0; head < group; head++)
        UNROLL for (int part = 0; part < width; part++) {
            int64_t row = seq * p->num_kv_heads * p->group + query_head + head;
            VARIANT(store)(p->output, row * p->head_dim + column + part * LANES, sums[head][part] * inverse[head], is_bfloat16);
        }
}

/* One KV head of one sequence, for ``group`` of the query heads that share it, the first of which is ``query_head``. */
INLINE void VARIANT(attend)(
    const struct problem *p, int64_t seq, int64_t kv_head, int64_t query_head, float *scores, int group, int is_bfloat16)
{
    float query[MAX_GROUP * MAX_HEAD_DIM], inverse[MAX_GROUP];
    const int64_t *blocks = p->block_ids + p->block_starts[seq];
    int64_t first = p->first_slots[seq], end = p->end_slots[seq], count = end - first, size = p->block_size;
    int64_t stride = (count + 2 * LANES - 1) / LANES * LANES, base = kv_head * p->head_stride;
    float scale = (float)(p->scale * 1.4426950408889634); /* log2(e) */
    for (int head = 0; head < group; head++)
        for (int64_t column = 0; column < p->head_dim; column += LANES)
            *(any_floats *)(query + head * MAX_HEAD_DIM + column)
                = scale * VARIANT(load)(p->query, seq * p->query_stride + (query_head + head) * p->head_dim + column, is_bfloat16);
    for (int64_t slot = first; slot < end; slot = (slot / size + 1) * size) {
        int64_t page = slot / size, high = end - page * size < size ? end - page * size : size;
        int64_t keys = blocks[page] * p->block_stride + base;
        /* The last page of keys is followed by the first page of values. */
        int64_t next = (page + 1) * size < end ? blocks[page + 1] * p->block_stride + base
                                               : blocks[first / size] * p->block_stride + base + p->value_offset;
        VARIANT(score_page)(p, keys, next, slot - page * size, high, query, scores + slot - first, stride, group, is_bfloat16);
    }
    for (int head = 0; head < group; head++)
        inverse[head] = 1.0f / VARIANT(exponentiate)(scores + head * stride, count);
    int64_t column = 0;
    for (; column + 4 * LANES <= p->head_dim; column += 4 * LANES)
        VARIANT(add_values)(p, seq, blocks, base, query_head, column, scores, stride, inverse, group, 4, is_bfloat16);
    for (; column < p->head_dim; column += LANES)
        VARIANT(add_values)(p, seq, blocks, base, query_head, column, scores, stride, inverse, group, 1, is_bfloat16);
}

INLINE void VARIANT(attend_group)(const struct problem *p, int64_t seq, int64_t kv_head, float *scores, int is_bfloat16)
{
    for (int64_t done = 0; done < p->group; done += MAX_GROUP) {
        int64_t query_head = kv_head * p->group + done;
        switch (p->group - done) {
        case 1:
            VARIANT(attend)(p, seq, kv_head, query_head, scores, 1, is_bfloat16);
            break;
        case 2:
            VARIANT(attend)(p, seq, kv_head, query_head, scores, 2, is_bfloat16);
            break;
        case 3:
            VARIANT(attend)(p, seq, kv_head, query_head, scores, 3, is_bfloat16);
            break;
        default:
            VARIANT(attend)(p, seq, kv_head, query_head, scores, MAX_GROUP, is_bfloat16);
        }
    }
}

static void VARIANT(compute_items)(const struct problem *p, int64_t first, int64_t end, float *scores)
{
    for (int64_t item = first; item < end; item++) {
        if (p->is_bfloat16)
            VARIANT(attend_group)(p, item / p->num_kv_heads, item % p->num_kv_heads, scores, 1);
        else
            VARIANT(attend_group)(p, item / p->num_kv_heads, item % p->num_kv_heads, scores, 0);
    }
}

#endif
