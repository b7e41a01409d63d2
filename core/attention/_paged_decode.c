/* Attention of sequences with one query each, straight from the pages of a KV pool. Loaded by core/attention/compiled_decode.py.
 *
 * Keys and values are float32 or bfloat16; products, sums and softmax are float32. Every key and value is read once, whatever the
 * number of query heads that share it: the keys of all heads page by page, in the order of memory, then the values. The work on one
 * sequence does not depend on the others, so neither do its results. Knows no Python: plain C with vector extensions, called by
 * ctypes with the interpreter lock released.
 */

#ifndef VARIANT /* the part that is read once; the kernels follow in #else */

#include "../_vectors.h"

#define MAX_GROUP 4 /* query heads that are computed together: their sums fit the registers */

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

/* Compute items [first, end), where item s * num_kv_heads + h is KV head h of sequence s. memory: scratch, for each query head
 * 2 * head_dim + WIDEST, and the longest visible length rounded up to WIDEST. */
void kvferry_paged_decode(const struct problem *p, int64_t first, int64_t end, float *memory)
{
    CALL_VARIANT(compute_items, p, first, end, memory);
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

/* Fill scores[head * stride + slot], times log2(e), for the slots [first, end) of one page, and up to 3 beyond. next: the rows that
 * are fetched meanwhile, or negative. */
INLINE void VARIANT(score_page)(
    const struct problem *p, int64_t keys, int64_t next, int64_t first, int64_t end, const float *query, float *scores,
    int64_t stride, int group, int is_bfloat16)
{
    for (int64_t slot = first; slot < end; slot += 4) {
        if (next >= 0)
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
                    sums[head][row] += key * *(const any_floats *)(query + head * p->head_dim + column);
            }
        UNROLL for (int head = 0; head < group; head++)
            *(any_quad *)(scores + head * stride + slot)
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

/* Add the values of the slots [first, end) of one page, weighted, to ``width`` vectors of the sums of each head. */
INLINE void VARIANT(add_values)(
    const struct problem *p, int64_t values, int64_t next, int64_t first, int64_t end, const float *weights, int64_t stride,
    float *totals, int group, int width, int is_bfloat16)
{
    floats sums[MAX_GROUP][4];
    UNROLL for (int head = 0; head < group; head++)
        UNROLL for (int part = 0; part < width; part++)
            sums[head][part] = *(any_floats *)(totals + head * p->head_dim + part * LANES);
    for (int64_t slot = first; slot < end; slot++) {
        if (next >= 0)
            VARIANT(prefetch)(p, next + slot * p->token_stride, is_bfloat16);
        UNROLL for (int part = 0; part < width; part++) {
            floats value = VARIANT(load)(p->pool, values + slot * p->token_stride + part * LANES, is_bfloat16);
            UNROLL for (int head = 0; head < group; head++)
                sums[head][part] += value * weights[head * stride + slot];
        }
    }
    UNROLL for (int head = 0; head < group; head++)
        UNROLL for (int part = 0; part < width; part++)
            *(any_floats *)(totals + head * p->head_dim + part * LANES) = sums[head][part];
}

/* Take one page of one KV head into the scores, or with ``takes_values`` into the sums, of ``group`` of its query heads. */
INLINE void VARIANT(take_page)(
    const struct problem *p, int64_t page, int64_t next, int64_t first, int64_t end, float *query_or_sums, float *scores,
    int64_t stride, int group, int takes_values, int is_bfloat16)
{
    if (!takes_values) {
        VARIANT(score_page)(p, page, next, first, end, query_or_sums, scores, stride, group, is_bfloat16);
        return;
    }
    int64_t column = 0;
    for (; column + 4 * LANES <= p->head_dim; column += 4 * LANES, next = -1)
        VARIANT(add_values)(p, page + column, next, first, end, scores, stride, query_or_sums + column, group, 4, is_bfloat16);
    for (; column < p->head_dim; column += LANES, next = -1)
        VARIANT(add_values)(p, page + column, next, first, end, scores, stride, query_or_sums + column, group, 1, is_bfloat16);
}

/* Take the keys or the values of the KV heads [head, end_head) of a sequence, page by page: the heads of a page lie side by side.
 * after: what is read next. */
INLINE void VARIANT(take_pages)(
    const struct problem *p, int64_t seq, int64_t head, int64_t end_head, float *query_or_sums, float *scores, int64_t stride,
    int64_t after, int takes_values, int is_bfloat16)
{
    const int64_t *blocks = p->block_ids + p->block_starts[seq];
    int64_t first = p->first_slots[seq], end = p->end_slots[seq], size = p->block_size;
    int64_t plane = takes_values ? p->value_offset : 0, num_pages = (end + size - 1) / size;
    for (int64_t page = first / size; page < num_pages; page++) {
        int64_t start = page * size, low = first > start ? first - start : 0, high = end - start < size ? end - start : size;
        for (int64_t at = head; at < end_head; at++) {
            int64_t rows = blocks[page] * p->block_stride + plane + at * p->head_stride, next = after;
            if (at + 1 < end_head)
                next = rows + p->head_stride;
            else if (page + 1 < num_pages)
                next = blocks[page + 1] * p->block_stride + plane + head * p->head_stride;
            for (int64_t done = 0; done < p->group; done += MAX_GROUP, next = -1) {
                int64_t row = (at - head) * p->group + done;
                float *vectors = query_or_sums + row * p->head_dim, *weights = scores + row * stride + start - first;
                switch (p->group - done) {
                case 1:
                    VARIANT(take_page)(p, rows, next, low, high, vectors, weights, stride, 1, takes_values, is_bfloat16);
                    break;
                case 2:
                    VARIANT(take_page)(p, rows, next, low, high, vectors, weights, stride, 2, takes_values, is_bfloat16);
                    break;
                case 3:
                    VARIANT(take_page)(p, rows, next, low, high, vectors, weights, stride, 3, takes_values, is_bfloat16);
                    break;
                default:
                    VARIANT(take_page)(p, rows, next, low, high, vectors, weights, stride, MAX_GROUP, takes_values, is_bfloat16);
                }
            }
        }
    }
}

/* The KV heads [head, end_head) of one sequence. */
INLINE void VARIANT(attend)(const struct problem *p, int64_t seq, int64_t head, int64_t end_head, float *memory, int is_bfloat16)
{
    int64_t count = p->end_slots[seq] - p->first_slots[seq], num_rows = (end_head - head) * p->group;
    int64_t stride = (count + 2 * LANES - 1) / LANES * LANES, size = num_rows * p->head_dim;
    float *scores = memory, *query = scores + num_rows * stride, *sums = query + size, *inverse = query;
    int64_t block = p->block_ids[p->block_starts[seq] + p->first_slots[seq] / p->block_size];
    int64_t first_value = block * p->block_stride + p->value_offset + head * p->head_stride;
    float scale = (float)(p->scale * 1.4426950408889634); /* log2(e) */
    for (int64_t element = 0; element < size; element += LANES) {
        *(any_floats *)(query + element)
            = scale * VARIANT(load)(p->query, seq * p->query_stride + head * p->group * p->head_dim + element, is_bfloat16);
        *(any_floats *)(sums + element) = (floats){0};
    }
    VARIANT(take_pages)(p, seq, head, end_head, query, scores, stride, first_value, 0, is_bfloat16);
    for (int64_t row = 0; row < num_rows; row++)
        inverse[row] = 1.0f / VARIANT(exponentiate)(scores + row * stride, count);
    VARIANT(take_pages)(p, seq, head, end_head, sums, scores, stride, -1, 1, is_bfloat16);
    for (int64_t element = 0; element < size; element += LANES)
        VARIANT(store)(
            p->output, (seq * p->num_kv_heads + head) * p->group * p->head_dim + element,
            *(any_floats *)(sums + element) * inverse[element / p->head_dim], is_bfloat16);
}

static void VARIANT(compute_items)(const struct problem *p, int64_t first, int64_t end, float *memory)
{
    for (int64_t item = first; item < end;) {
        int64_t seq = item / p->num_kv_heads, head = item % p->num_kv_heads, left = end - seq * p->num_kv_heads;
        int64_t end_head = left < p->num_kv_heads ? left : p->num_kv_heads;
        if (p->is_bfloat16)
            VARIANT(attend)(p, seq, head, end_head, memory, 1);
        else
            VARIANT(attend)(p, seq, head, end_head, memory, 0);
        item += end_head - head;
    }
}

#endif
