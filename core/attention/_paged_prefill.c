/* Attention of the queries of one sequence over the pages of a KV pool. Loaded by core/attention/compiled_prefill.py.
 *
 * Keys and values are float32 or bfloat16; sums and softmax are float32, and so are products, but for bfloat16 where the CPU
 * multiplies it: then the weights of the values are rounded to bfloat16, too. Keys are taken KEYS at a time, at positions that
 * are multiples of KEYS, against all queries that see any of them, ROWS query rows at a time:
 *
 *     for each block of keys:  copy K transposed, and V
 *         for each ROWS rows:  S = Q K^T;  mask;  running maximum and sum of each row;  O = O * old weight + exp2(S) V
 *
 * Of finite values, a row's result is a sum over the same blocks in the same order whatever other rows there are, so it does not
 * depend on how a prompt is cut into chunks. (A value that is not finite also spoils up to ROWS - 1 rows before its own: their
 * weight for it is 0, and 0 * inf is NaN.) The online softmax is that of FlashAttention (Dao et al., 2022). Knows no Python:
 * called by ctypes with the interpreter lock released.
 */

#ifndef VARIANT /* the part that is read once; the kernels follow in #else */

#include "../_vectors.h"

#define KEYS 64
#define ROWS 6

/* Sizes in elements. Strides lead from one block, KV head, token or query to the next; a value is ``value_offset`` after its key.
 * block_ids: the blocks of the sequence, from its first token on. window, chunk: 0, or what limits the visible keys. */
struct prefill {
    const char *query; /* [num_queries, num_kv_heads * group, head_dim], rows query_stride apart */
    char *output;      /* the same, contiguous */
    const char *pool;  /* the first key of the layer in block 0 */
    const int64_t *block_ids;
    int64_t query_stride, block_stride, head_stride, token_stride, value_offset;
    int64_t block_size, num_kv_heads, group, head_dim, is_bfloat16;
    int64_t num_queries, first_position, window, chunk;
    double scale;
};

/* What is summed of a query row: its largest score, at least -__FLT_MAX__ so that a difference from it is a number, and the sums of
 * its weights, lane by lane. */
struct row_sums {
    float total[WIDEST] __attribute__((aligned(64)));
    float top;
};

/* The scratch memory of a thread. query, keys and values hold floats, or pairs of bfloat16: two columns of a query or key, or two
 * values of a column. */
struct scratch {
    float *query;           /* [rows, head_dim] */
    float *output;          /* [rows, head_dim], sums of weighted values */
    float *keys;            /* [head_dim, KEYS] */
    float *values;          /* [KEYS, head_dim] */
    struct row_sums *rows;
};

/* The lowest key position that the query at ``position`` sees. */
INLINE int64_t first_visible(const struct prefill *p, int64_t position)
{
    if (p->window)
        return position - p->window + 1 > 0 ? position - p->window + 1 : 0;
    return p->chunk ? position / p->chunk * p->chunk : 0;
}

#define KERNELS "attention/_paged_prefill.c"
#include "../_kinds_of_cpu.h"

/* Return 1 if kvferry_paged_prefill is worth its call here: with 16 registers of 4 floats it would take longer than torch does. */
int kvferry_has_paged_prefill(void)
{
    return is_at_least(X86_64_V3);
}

/* Compute the KV heads [first, end). memory: scratch, aligned to 64 bytes, of floats: the query rows of a KV head, rounded up to
 * ROWS, times 2 * (head_dim + WIDEST), and 2 * KEYS * head_dim. */
void kvferry_paged_prefill(const struct prefill *p, int64_t first, int64_t end, float *memory)
{
    CALL_VARIANT(attend_heads, p, first, end, memory);
}

#else

#include "../_vectors.h"

#define PARTS (LANES == WIDEST ? 4 : 2) /* vectors of ROWS rows whose sums fit the registers: 32 with AVX-512, else 16 */
#if defined(__AVX512BF16__) && defined(HAS_VARIANTS)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* c[ROWS, LANES * width] (+)= a[ROWS, depth] b[depth, LANES * width] */
INLINE void VARIANT(multiply)(
    const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth, int width,
    int adds, int by_pairs)
{
    floats sums[ROWS][PARTS];
    UNROLL_ALL for (int row = 0; row < ROWS; row++)
        UNROLL_ALL for (int part = 0; part < width; part++)
            if (adds)
                sums[row][part] = *(any_floats *)(c + row * c_stride + part * LANES);
            else
                sums[row][part] = (floats){0};
    for (int64_t k = 0; k < depth; k++) {
        floats right[PARTS];
        UNROLL_ALL for (int part = 0; part < width; part++)
            right[part] = *(const any_floats *)(b + k * b_stride + part * LANES);
        UNROLL_ALL for (int row = 0; row < ROWS; row++) {
#if HAS_PAIRS
            if (by_pairs) {
                __m512bh left = (__m512bh)_mm512_set1_ps(a[row * a_stride + k]);
                UNROLL_ALL for (int part = 0; part < width; part++)
                    sums[row][part] = (floats)_mm512_dpbf16_ps((__m512)sums[row][part], left, (__m512bh)right[part]);
                continue;
            }
#endif
            UNROLL_ALL for (int part = 0; part < width; part++)
                sums[row][part] += right[part] * a[row * a_stride + k];
        }
    }
    UNROLL_ALL for (int row = 0; row < ROWS; row++)
        UNROLL_ALL for (int part = 0; part < width; part++)
            *(any_floats *)(c + row * c_stride + part * LANES) = sums[row][part];
}

/* Copy the keys and values at [first, end) of the block of keys at ``start``, zeros elsewhere. */
INLINE void VARIANT(pack)(
    const struct prefill *p, int64_t head, int64_t start, int64_t first, int64_t end, const struct scratch *to, int is_bfloat16,
    int by_pairs)
{
    int64_t num_words = by_pairs ? p->head_dim / 2 : p->head_dim;
    const words high = (words){0} + 0xffff0000u;
    for (int64_t slot = 0; slot < KEYS; slot++) {
        int64_t position = start + slot;
        int is_there = position >= first && position < end;
        int64_t row = !is_there ? 0
            : p->block_ids[position / p->block_size] * p->block_stride + head * p->head_stride
                + position % p->block_size * p->token_stride;
        for (int64_t column = 0; column < num_words; column += by_pairs ? LANES / 2 : LANES) {
            /* With pairs LANES / 2 words at a time: head_dim is a multiple of LANES. */
            float key[LANES] = {0};
            if (is_there && by_pairs)
                __builtin_memcpy(key, p->pool + 2 * (row + 2 * column), 2 * LANES);
            else if (is_there)
                *(any_floats *)key = VARIANT(load)(p->pool, row + column, is_bfloat16);
            for (int lane = 0; lane < (by_pairs ? LANES / 2 : LANES); lane++)
                to->keys[(column + lane) * KEYS + slot] = key[lane];
        }
        for (int64_t column = 0; column < p->head_dim; column += LANES) {
            floats value = {0};
            if (is_there)
                value = VARIANT(load)(p->pool, row + p->value_offset + column, is_bfloat16);
            if (!by_pairs) {
                *(any_floats *)(to->values + slot * p->head_dim + column) = value;
                continue;
            }
            float *pair = to->values + slot / 2 * p->head_dim + column;
            if (slot % 2 == 0)
                *(any_floats *)pair = (floats)((words)value >> 16);
            else
                *(any_floats *)pair = (floats)((words)*(any_floats *)pair | ((words)value & high));
        }
    }
}

INLINE float VARIANT(largest_lane)(floats a)
{
#if LANES == 4
    a = VARIANT(largest)(a, SHUFFLE(a, a, 2, 3, 0, 1));
    a = VARIANT(largest)(a, SHUFFLE(a, a, 1, 0, 3, 2));
#elif LANES == 8
    a = VARIANT(largest)(a, SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3));
    a = VARIANT(largest)(a, SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5));
    a = VARIANT(largest)(a, SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6));
#else
    a = VARIANT(largest)(a, SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    a = VARIANT(largest)(a, SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    a = VARIANT(largest)(a, SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    a = VARIANT(largest)(a, SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#endif
    return a[0];
}

/* Replace a row's scores of a block by weights relative to its largest score so far; those outside [low, high) become 0: none if
 * is_whole. Returns the factor by which what was summed before is to be multiplied. */
INLINE float VARIANT(weigh)(
    float *scores, int64_t low, int64_t high, float scale, struct row_sums *sums, int is_whole, int by_pairs)
{
    words lanes;
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = lane;
    floats parts[KEYS / LANES], highest = (floats){0} + sums->top, total = {0};
    words is_visible[KEYS / LANES];
    UNROLL for (int part = 0; part < KEYS / LANES; part++) {
        words slot = lanes + part * LANES;
        is_visible[part] = (words)(slot >= (uint32_t)low) & (words)(slot < (uint32_t)high);
        parts[part] = *(any_floats *)(scores + part * LANES) * scale;
        words seen = (words)parts[part];
        if (!is_whole)
            seen = (seen & is_visible[part]) | ((words)highest & ~is_visible[part]);
        highest = VARIANT(largest)((floats)seen, highest);
    }
    float top = VARIANT(largest_lane)(highest);
    UNROLL for (int part = 0; part < KEYS / LANES; part++) {
        parts[part] = VARIANT(exp2_of)(parts[part] - top);
        if (!is_whole)
            parts[part] = (floats)((words)parts[part] & is_visible[part]);
    }
#if HAS_PAIRS
    if (by_pairs)
        UNROLL for (int part = 0; part < KEYS / LANES; part += 2) { /* two to a word, and the sum is that of the rounded ones */
            words both = (words)_mm512_cvtne2ps_pbh((__m512)parts[part + 1], (__m512)parts[part]);
            *(any_floats *)(scores + part * LANES / 2) = (floats)both;
            total += (floats)(both << 16) + (floats)(both & 0xffff0000u);
        }
    else
#endif
        UNROLL for (int part = 0; part < KEYS / LANES; part++) {
            *(any_floats *)(scores + part * LANES) = parts[part];
            total += parts[part];
        }
    float kept = sums->top == top ? 1.0f : VARIANT(exp2_of)((floats){0} + (sums->top - top))[0];
    *(any_floats *)sums->total = *(any_floats *)sums->total * kept + total;
    sums->top = top;
    return kept;
}

/* Take the block of keys at ``start`` into the sums of ROWS rows, the first of which is ``row``. */
INLINE void VARIANT(take_block)(const struct prefill *p, int64_t row, int64_t start, const struct scratch *at, int by_pairs)
{
    float scores[ROWS * KEYS] __attribute__((aligned(64)));
    float *output = at->output + row * p->head_dim, scale = (float)(p->scale * 1.4426950408889634); /* log2(e) */
    int64_t num_rows = p->num_queries * p->group, lowest = KEYS, highest = 0, num_words = by_pairs ? p->head_dim / 2 : p->head_dim;
    const float *query = at->query + row * num_words;
    for (int64_t slot = 0; slot < KEYS; slot += PARTS * LANES)
        VARIANT(multiply)(query, num_words, at->keys + slot, KEYS, scores + slot, KEYS, num_words, PARTS, 0, by_pairs);
    for (int64_t each = 0; each < ROWS; each++) {
        int64_t position = p->first_position + (row + each) / p->group;
        int64_t low = first_visible(p, position) - start, high = position + 1 - start;
        low = low < 0 ? 0 : low;
        high = high > KEYS ? KEYS : high;
        if (row + each >= num_rows || low >= high) {
            __builtin_memset(scores + each * KEYS, 0, KEYS * sizeof(float));
            continue;
        }
        struct row_sums *sums = at->rows + row + each;
        float kept = high - low == KEYS ? VARIANT(weigh)(scores + each * KEYS, 0, KEYS, scale, sums, 1, by_pairs)
                                        : VARIANT(weigh)(scores + each * KEYS, low, high, scale, sums, 0, by_pairs);
        if (kept != 1.0f)
            for (int64_t column = 0; column < p->head_dim; column += LANES)
                *(any_floats *)(output + each * p->head_dim + column) *= kept;
        lowest = low < lowest ? low : lowest;
        highest = high > highest ? high : highest;
    }
    if (lowest >= highest)
        return;
    if (by_pairs) {
        lowest /= 2;
        highest = (highest + 1) / 2;
    }
    const float *weights = scores + lowest, *values = at->values + lowest * p->head_dim;
    int64_t column = 0, depth = highest - lowest;
    for (; column + PARTS * LANES <= p->head_dim; column += PARTS * LANES)
        VARIANT(multiply)(weights, KEYS, values + column, p->head_dim, output + column, p->head_dim, depth, PARTS, 1, by_pairs);
    for (; column < p->head_dim; column += LANES)
        VARIANT(multiply)(weights, KEYS, values + column, p->head_dim, output + column, p->head_dim, depth, 1, 1, by_pairs);
}

INLINE void VARIANT(attend_head)(const struct prefill *p, int64_t head, float *memory, int is_bfloat16, int by_pairs)
{
    int64_t num_rows = p->num_queries * p->group, padded = (num_rows + ROWS - 1) / ROWS * ROWS, size = padded * p->head_dim;
    struct scratch at = {.rows = (struct row_sums *)memory, .query = memory + padded * 2 * WIDEST};
    at.output = at.query + size;
    at.keys = at.output + size;
    at.values = at.keys + KEYS * p->head_dim;
    __builtin_memset(at.query, 0, 2 * size * sizeof(float));
    for (int64_t row = 0; row < padded; row++) {
        at.rows[row] = (struct row_sums){.total = {0}, .top = -__FLT_MAX__};
        int64_t source = row / p->group * p->query_stride + (head * p->group + row % p->group) * p->head_dim;
        if (row < num_rows && by_pairs)
            __builtin_memcpy(at.query + row * p->head_dim / 2, p->query + 2 * source, 2 * p->head_dim);
        else if (row < num_rows)
            for (int64_t column = 0; column < p->head_dim; column += LANES)
                *(any_floats *)(at.query + row * p->head_dim + column) = VARIANT(load)(p->query, source + column, is_bfloat16);
    }
    int64_t first = first_visible(p, p->first_position), end = p->first_position + p->num_queries;
    for (int64_t start = first / KEYS * KEYS; start < end; start += KEYS) {
        VARIANT(pack)(p, head, start, first, end, &at, is_bfloat16, by_pairs);
        int64_t before = start > p->first_position ? (start - p->first_position) * p->group : 0; /* rows that see none of it */
        for (int64_t row = before / ROWS * ROWS; row < num_rows; row += ROWS) {
            if (first_visible(p, p->first_position + row / p->group) >= start + KEYS)
                break;
            VARIANT(take_block)(p, row, start, &at, by_pairs);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t target = (row / p->group * p->num_kv_heads + head) * p->group + row % p->group;
        float total = 0.0f;
        for (int lane = 0; lane < LANES; lane++)
            total += at.rows[row].total[lane];
        for (int64_t column = 0; column < p->head_dim; column += LANES)
            VARIANT(store)(
                p->output, target * p->head_dim + column, *(any_floats *)(at.output + row * p->head_dim + column) / total,
                is_bfloat16);
    }
}

static void VARIANT(attend_heads)(const struct prefill *p, int64_t first, int64_t end, float *memory)
{
    for (int64_t head = first; head < end; head++) {
        if (p->is_bfloat16)
            VARIANT(attend_head)(p, head, memory, 1, HAS_PAIRS);
        else
            VARIANT(attend_head)(p, head, memory, 0, 0);
    }
}

#undef PARTS
#undef HAS_PAIRS

#endif
