/* What a decoder layer does between its matrix products. Loaded by core/model/compiled_layers.py.
 *
 * Values are float32 or bfloat16, the hidden states float32; all arithmetic is float32, and a result is rounded once. Each row is
 * computed without regard to the others, so a request's results do not depend on the batch that it is in. Sizes are multiples of
 * WIDEST. Knows no Python: plain C with vector extensions, called by ctypes with the interpreter lock released.
 */

#ifndef VARIANT /* the part that is read once; the kernels follow in #else */

#include "../_vectors.h"

enum gate { SILU, GELU };

/* hidden: [T, size], updated by the sum. update, output: [T, size]. weight: [size], times sqrt(size). floor: size * epsilon. */
struct norm {
    float *hidden;
    const char *update;
    const float *weight;
    char *output;
    int64_t size, is_update_bfloat16, is_output_bfloat16;
    double floor;
};

/* gate_up: [T, 2 * size], output: [T, size]. */
struct gating {
    const char *gate_up;
    char *output;
    int64_t size, gate, is_bfloat16;
};

/* heads: [T, num_heads, head_dim], tokens token_stride elements apart. cos, sin: [T, head_dim]. */
struct rotation {
    char *heads;
    const char *cos, *sin;
    int64_t num_heads, head_dim, token_stride, is_bfloat16;
};

#define KERNELS "model/_layer_ops.c"
#include "../_kinds_of_cpu.h"

/* Each computes the rows [first, end); the other arguments are the fields of its struct. */

void kvferry_add_and_normalize(
    float *hidden, const char *update, const float *weight, char *output, int64_t size, int64_t is_update_bfloat16,
    int64_t is_output_bfloat16, double floor, int64_t first, int64_t end)
{
    struct norm p = {hidden, update, weight, output, size, is_update_bfloat16, is_output_bfloat16, floor};
    CALL_VARIANT(add_and_normalize, &p, first, end);
}

void kvferry_gate_and_multiply(
    const char *gate_up, char *output, int64_t size, int64_t gate, int64_t is_bfloat16, int64_t first, int64_t end)
{
    struct gating p = {gate_up, output, size, gate, is_bfloat16};
    CALL_VARIANT(gate_and_multiply, &p, first, end);
}

void kvferry_rotate(
    char *heads, const char *cos, const char *sin, int64_t num_heads, int64_t head_dim, int64_t token_stride, int64_t is_bfloat16,
    int64_t first, int64_t end)
{
    struct rotation p = {heads, cos, sin, num_heads, head_dim, token_stride, is_bfloat16};
    CALL_VARIANT(rotate, &p, first, end);
}

#else

#include "../_vectors.h"

/* hidden += update; output = hidden * weight / sqrt(|hidden|^2 + floor) */
INLINE void VARIANT(add_and_normalize_row)(const struct norm *p, int64_t row, int is_update_bfloat16, int is_output_bfloat16)
{
    floats squares = {0};
    for (int64_t at = row * p->size; at < (row + 1) * p->size; at += LANES) {
        floats sum = *(any_floats *)(p->hidden + at) + VARIANT(load)(p->update, at, is_update_bfloat16);
        *(any_floats *)(p->hidden + at) = sum;
        squares += sum * sum;
    }
    float total = (float)p->floor;
    for (int lane = 0; lane < LANES; lane++)
        total += squares[lane];
    float factor = 1.0f / __builtin_sqrtf(total);
    for (int64_t column = 0; column < p->size; column += LANES) {
        int64_t at = row * p->size + column;
        floats normed = *(any_floats *)(p->hidden + at) * factor * *(any_floats *)(p->weight + column);
        VARIANT(store)(p->output, at, normed, is_output_bfloat16);
    }
}

static void VARIANT(add_and_normalize)(const struct norm *p, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++)
        switch (2 * !!p->is_update_bfloat16 + !!p->is_output_bfloat16) {
        case 0:
            VARIANT(add_and_normalize_row)(p, row, 0, 0);
            break;
        case 1:
            VARIANT(add_and_normalize_row)(p, row, 0, 1);
            break;
        case 2:
            VARIANT(add_and_normalize_row)(p, row, 1, 0);
            break;
        default:
            VARIANT(add_and_normalize_row)(p, row, 1, 1);
        }
}

/* 1 / (1 + e ** -x); 0 for NaN */
INLINE floats VARIANT(sigmoid)(floats x)
{
    words is_positive = (words)(x > 0.0f), one = (words)((floats){0} + 1.0f);
    floats exponent = (floats)((words)x | 0x80000000u) * 1.442695041f; /* 2 ** exponent = e ** -|x| */
    words is_normal = (words)(exponent >= -126.0f);
    floats power = (floats)((words)VARIANT(exp2_of)(exponent) & is_normal);
    return (floats)((one & is_positive) | ((words)power & ~is_positive)) / (1.0f + power);
}

/* silu(x) = x sigmoid(x); gelu(x), by tanh, = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x ** 3)) */
INLINE void VARIANT(gate_row)(const struct gating *p, int64_t row, int gate, int is_bfloat16)
{
    for (int64_t column = 0; column < p->size; column += LANES) {
        floats x = VARIANT(load)(p->gate_up, 2 * row * p->size + column, is_bfloat16);
        floats up = VARIANT(load)(p->gate_up, (2 * row + 1) * p->size + column, is_bfloat16);
        floats inner = gate == GELU ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
        VARIANT(store)(p->output, row * p->size + column, x * VARIANT(sigmoid)(inner) * up, is_bfloat16);
    }
}

static void VARIANT(gate_and_multiply)(const struct gating *p, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++)
        switch (2 * (p->gate == GELU) + !!p->is_bfloat16) {
        case 0:
            VARIANT(gate_row)(p, row, SILU, 0);
            break;
        case 1:
            VARIANT(gate_row)(p, row, SILU, 1);
            break;
        case 2:
            VARIANT(gate_row)(p, row, GELU, 0);
            break;
        default:
            VARIANT(gate_row)(p, row, GELU, 1);
        }
}

/* Pairs (x, y) of elements half a head apart: x cos + y sin, y cos + x sin; the sign of the first sin is in it. */
INLINE void VARIANT(rotate_row)(const struct rotation *p, int64_t row, int is_bfloat16)
{
    int64_t half = p->head_dim / 2;
    for (int64_t head = 0; head < p->num_heads; head++)
        for (int64_t column = 0; column < half; column += LANES) {
            int64_t at = row * p->token_stride + head * p->head_dim + column, angle = row * p->head_dim + column;
            floats x = VARIANT(load)(p->heads, at, is_bfloat16), y = VARIANT(load)(p->heads, at + half, is_bfloat16);
            floats low = x * VARIANT(load)(p->cos, angle, is_bfloat16) + y * VARIANT(load)(p->sin, angle, is_bfloat16);
            floats high = y * VARIANT(load)(p->cos, angle + half, is_bfloat16) + x * VARIANT(load)(p->sin, angle + half, is_bfloat16);
            VARIANT(store)(p->heads, at, low, is_bfloat16);
            VARIANT(store)(p->heads, at + half, high, is_bfloat16);
        }
}

static void VARIANT(rotate)(const struct rotation *p, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++)
        if (p->is_bfloat16)
            VARIANT(rotate_row)(p, row, 1);
        else
            VARIANT(rotate_row)(p, row, 0);
}

#endif
