/* The product of a few rows with a weight in oneDNN's blocked layout, in oneDNN's own order of sums. Loaded by
 * core/model/few_rows.py, which compares the two bit by bit before it uses this.
 *
 * The weight is read once, as fast as memory gives it, which oneDNN does not reach for few rows. Sums are float32: a product is
 * added to the sum by one rounding, products of ``block`` columns begin at zero, and the sums of the blocks are added in their
 * order. Knows no Python: plain C with vector extensions, called by ctypes with the interpreter lock released.
 */

#ifndef VARIANT /* the part that is read once; the kernels follow in #else */

#include "../_vectors.h"

enum {
    TILE = 64,     /* outputs that lie side by side in the weight */
    STEP = 256,    /* bytes of a tile for one number of an input in float32, or for two in bfloat16 */
    GROUP = 6,     /* rows whose sums fit the registers */
    LINE = 64,     /* bytes of a line of the cache, and of a vector */
    CHUNK = 64,    /* steps that all groups take before the next ones are read: two chunks, 32 KiB, are within the L1 cache */
    AHEAD = 8192,  /* bytes from what the only group reads to what it fetches meanwhile */
    MOST_ROWS = 32 /* MAX_ROWS in Python */
};

/* input: [num_rows, num_steps] of 4 bytes. weight: [ceil(out_features / TILE), num_steps, STEP] bytes.
 * bias: [out_features] or null. output: [num_rows, out_features]. block: in steps. */
struct product {
    const float *input;
    const char *weight, *bias;
    char *output;
    int64_t num_rows, num_steps, block, out_features, is_bfloat16;
};

#define KERNELS "model/_few_rows.c"
#include "../_kinds_of_cpu.h"

/* Return 1 if kvferry_multiply_few_rows computes here what oneDNN may: its layout is that of AVX-512. */
int kvferry_has_few_rows(int is_bfloat16)
{
    return is_at_least(is_bfloat16 ? X86_64_V4_BF16 : X86_64_V4);
}

/* Compute the tiles [first, end). out_features is a multiple of WIDEST. */
void kvferry_multiply_few_rows(
    const float *input, const char *weight, const char *bias, char *output, int64_t num_rows, int64_t num_steps, int64_t block,
    int64_t out_features, int64_t is_bfloat16, int64_t first, int64_t end)
{
    struct product p = {input, weight, bias, output, num_rows, num_steps, block, out_features, is_bfloat16};
    CALL_VARIANT(multiply_tiles, &p, first, end);
}

#else

#include "../_vectors.h"

#if LANES < WIDEST /* kvferry_has_few_rows says no */
static void VARIANT(multiply_tiles)(const struct product *p, int64_t first, int64_t end)
{
    (void)p, (void)first, (void)end;
}
#else

#define PARTS (STEP / LINE)

INLINE floats VARIANT(multiply_add)(floats sum, float left, floats right, int is_bfloat16)
{
#if defined(__AVX512BF16__) && defined(HAS_VARIANTS)
    if (is_bfloat16)
        return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(left), (__m512bh)right);
#endif
    return sum + right * left;
}

/* sums[rows, TILE] (+)= input[row..., first..end] tile[first..end]. ahead: bytes from each step to the two places that are fetched
 * at it, or null. is_only: there is no other group, so the tile is read once and need not stay in a cache. For one row the CPU
 * fetches as well by itself. */
INLINE void VARIANT(add_steps)(
    const struct product *p, const char *tile, int64_t row, int rows, int64_t first, int64_t end, float *sums, int adds,
    const int64_t *ahead, int is_only, int is_bfloat16)
{
    floats sum[GROUP][PARTS];
    UNROLL_ALL for (int r = 0; r < rows; r++)
        UNROLL_ALL for (int part = 0; part < PARTS; part++)
            sum[r][part] = adds ? (floats)*(any_floats *)(sums + (row + r) * TILE + part * LANES) : (floats){0};
    for (int64_t step = first; step < end; step++) {
        floats right[PARTS];
        UNROLL_ALL for (int part = 0; part < PARTS; part++)
            right[part] = *(const any_floats *)(tile + step * STEP + part * LINE);
        if (is_only && rows > 1)
            UNROLL_ALL for (int part = 0; part < PARTS; part++)
                __builtin_prefetch(tile + step * STEP + AHEAD + part * LINE, 0, 0);
        else if (ahead) {
            __builtin_prefetch(tile + step * STEP + ahead[0]);
            __builtin_prefetch(tile + step * STEP + ahead[1]);
        }
        UNROLL_ALL for (int r = 0; r < rows; r++)
            UNROLL_ALL for (int part = 0; part < PARTS; part++)
                sum[r][part] = VARIANT(multiply_add)(sum[r][part], p->input[(row + r) * p->num_steps + step], right[part],
                                                     is_bfloat16);
    }
    UNROLL_ALL for (int r = 0; r < rows; r++)
        UNROLL_ALL for (int part = 0; part < PARTS; part++)
            *(any_floats *)(sums + (row + r) * TILE + part * LANES) = sum[r][part];
}

INLINE void VARIANT(add_group)(
    const struct product *p, const char *tile, int64_t row, int64_t rows, int64_t first, int64_t end, float *sums, int adds,
    const int64_t *ahead, int is_only, int is_bfloat16)
{
    switch (rows) {
    case 1:
        VARIANT(add_steps)(p, tile, row, 1, first, end, sums, adds, ahead, is_only, is_bfloat16);
        break;
    case 2:
        VARIANT(add_steps)(p, tile, row, 2, first, end, sums, adds, ahead, is_only, is_bfloat16);
        break;
    case 3:
        VARIANT(add_steps)(p, tile, row, 3, first, end, sums, adds, ahead, is_only, is_bfloat16);
        break;
    case 4:
        VARIANT(add_steps)(p, tile, row, 4, first, end, sums, adds, ahead, is_only, is_bfloat16);
        break;
    case 5:
        VARIANT(add_steps)(p, tile, row, 5, first, end, sums, adds, ahead, is_only, is_bfloat16);
        break;
    default:
        VARIANT(add_steps)(p, tile, row, GROUP, first, end, sums, adds, ahead, is_only, is_bfloat16);
    }
}

INLINE void VARIANT(write_tile)(const struct product *p, int64_t column, const float *totals, int is_bfloat16)
{
    for (int64_t end = column + TILE; column < end && column < p->out_features; column += LANES, totals += LANES) {
        floats bias = p->bias ? VARIANT(load)(p->bias, column, is_bfloat16) : (floats){0};
        for (int64_t row = 0; row < p->num_rows; row++) {
            floats total = *(const any_floats *)(totals + row * TILE);
            VARIANT(store)(p->output, row * p->out_features + column, p->bias ? total + bias : total, is_bfloat16);
        }
    }
}

INLINE void VARIANT(multiply_tiles_of)(const struct product *p, int64_t first, int64_t end, int is_bfloat16)
{
    float sums[MOST_ROWS * TILE], totals[MOST_ROWS * TILE];
    int64_t num_groups = (p->num_rows + GROUP - 1) / GROUP;
    for (int64_t number = first; number < end; number++) {
        const char *tile = p->weight + number * p->num_steps * STEP;
        for (int64_t start = 0; start < p->num_steps; start += p->block) {
            int64_t stop = start + p->block < p->num_steps ? start + p->block : p->num_steps;
            int64_t size = num_groups == 1 ? stop - start : CHUNK;
            for (int64_t at = start; at < stop; at += size) {
                int64_t to = at + size < stop ? at + size : stop;
                for (int64_t group = 0, row = 0; group < num_groups; group++) {
                    int64_t rows = p->num_rows * (group + 1) / num_groups - row;
                    /* Each group fetches its share of the next chunk, so that memory is read all the time. */
                    int64_t line = PARTS * group / num_groups, last = PARTS * (group + 1) / num_groups - 1;
                    int64_t ahead[] = {CHUNK * STEP + line * LINE, CHUNK * STEP + last * LINE};
                    int fetches = num_groups > 1 && line <= last;
                    VARIANT(add_group)(
                        p, tile, row, rows, at, to, sums, at > start, fetches ? ahead : 0, num_groups == 1, is_bfloat16);
                    row += rows;
                }
            }
            for (int64_t i = 0; i < p->num_rows * TILE; i++)
                totals[i] = start ? totals[i] + sums[i] : sums[i];
        }
        VARIANT(write_tile)(p, number * TILE, totals, is_bfloat16);
    }
}

static void VARIANT(multiply_tiles)(const struct product *p, int64_t first, int64_t end)
{
    if (p->is_bfloat16)
        VARIANT(multiply_tiles_of)(p, first, end, 1);
    else
        VARIANT(multiply_tiles_of)(p, first, end, 0);
}

#undef PARTS
#endif

#endif
