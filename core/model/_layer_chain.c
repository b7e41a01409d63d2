/* What lies between the attention of a layer and that of the next one, for a few rows, in one call. Loaded by
 * core/model/layer_chain.py.
 *
 * Its parts are functions of _few_rows.c and _layer_ops.c, which are given by their addresses and called in the order of
 * Decoder.forward: the results are the same bits. Knows no Python: plain C, called by ctypes with the interpreter lock released.
 */

#include <stddef.h>
#include <stdint.h>

typedef void multiply_few_rows(
    const float *input, const char *weight, const char *bias, char *output, int64_t num_rows, int64_t num_steps, int64_t block,
    int64_t out_features, int64_t is_bfloat16, int64_t first, int64_t end);
typedef void add_and_normalize(
    float *hidden, const char *update, const float *weight, char *output, int64_t size, int64_t is_update_bfloat16,
    int64_t is_output_bfloat16, double floor, int64_t first, int64_t end);
typedef void gate_and_multiply(
    const char *gate_up, char *output, int64_t size, int64_t gate, int64_t is_bfloat16, int64_t first, int64_t end);
typedef void rotate(
    char *heads, const char *cos, const char *sin, int64_t num_heads, int64_t head_dim, int64_t token_stride, int64_t is_bfloat16,
    int64_t first, int64_t end);

/* The fields are the arguments of these functions. */
struct linear {
    const char *weight, *bias;
    int64_t num_steps, block, out_features, num_tiles;
};

struct norm {
    const float *weight;
    double floor;
};

/* update, normed: [T, hidden_size]. wide: [T, 2 * inner_size]. gated: [T, inner_size]. heads: [T, all heads, head_dim], of which the
 * first num_rotated are rotated. */
struct chain {
    multiply_few_rows *multiply;
    add_and_normalize *normalize;
    gate_and_multiply *gate;
    rotate *rotate;
    struct linear output, gate_up, down, next_qkv;
    struct norm mlp_norm, next_norm;
    char *update, *normed, *wide, *gated, *heads;
    int64_t hidden_size, inner_size, gate_kind, num_rotated, head_dim, is_bfloat16; /* gate_kind: enum gate of _layer_ops.c */
};

static void multiply(const struct chain *c, const struct linear *l, const char *input, char *output, int64_t num_rows)
{
    c->multiply((const float *)input, l->weight, l->bias, output, num_rows, l->num_steps, l->block, l->out_features, c->is_bfloat16,
                0, l->num_tiles);
}

static void normalize(const struct chain *c, const struct norm *n, float *hidden, int64_t num_rows)
{
    c->normalize(hidden, c->update, n->weight, c->normed, c->hidden_size, c->is_bfloat16, c->is_bfloat16, n->floor, 0, num_rows);
}

/* hidden: [T, hidden_size], updated. attended: [T, query heads, head_dim]. cos, sin: [T, head_dim]. */
void kvferry_advance_layer(
    const struct chain *c, float *hidden, const char *attended, const char *cos, const char *sin, int64_t num_rows)
{
    multiply(c, &c->output, attended, c->update, num_rows);
    normalize(c, &c->mlp_norm, hidden, num_rows);
    multiply(c, &c->gate_up, c->normed, c->wide, num_rows);
    c->gate(c->wide, c->gated, c->inner_size, c->gate_kind, c->is_bfloat16, 0, num_rows);
    multiply(c, &c->down, c->gated, c->update, num_rows);
    normalize(c, &c->next_norm, hidden, num_rows);
    multiply(c, &c->next_qkv, c->normed, c->heads, num_rows);
    if (c->num_rotated)
        c->rotate(c->heads, cos, sin, c->num_rotated, c->head_dim, c->next_qkv.out_features, c->is_bfloat16, 0, num_rows);
}
