/* All layers of a decoder in one call: the same kernels in the same order as one by one.
 *
 * Between calls from Python lie some hundred microseconds a layer, which at one token is as long as
 * the layer itself. Nothing is computed differently here: every bit is that of the separate calls.
 */
#include "kernels.h"
#include "vec.h"

typedef struct {
    const void *data; /* blocks, or codes */
    const void *scales, *mins, *bias;
    int64_t k, n;
    int is_groups, w_dtype, pairs, bits, zero, s_dtype, b_dtype, pad;
} Matrix;

typedef struct {
    const void *attention_norm, *q_norm, *k_norm, *mlp_norm; /* q_norm: NULL if there is none */
    Matrix qkv, out, gate_up, down;
    float scale;
    int pad;
    int64_t window;
} Layer;

typedef struct {
    const Layer *layers;
    const void *norm;
    const float *cos_sin;
    char *k_pool, *v_pool;
    int64_t count, hidden, q_heads, kv_heads, width, inner;
    int64_t pool_layer, pool_head; /* elements between layers and heads of the pool */
    float eps;
    int dtype, n_dtype;
} Stack;

typedef struct {
    const void *x;         /* [tokens, hidden] embeddings */
    const int64_t *slots;  /* [tokens] */
    void *hidden;          /* [tokens, hidden] out, after the last norm */
    void *taps;            /* [tokens, num_taps * hidden] out: streams after layers */
    const int64_t *tapped; /* [num_taps] layers; each layer at most once */
    int64_t num_taps;
} Pass;

static void multiply(const Matrix *m, const void *x, void *y, int64_t rows, int dtype, int threads) {
    if (m->is_groups)
        packed(x, m->data, m->scales, m->mins, m->bias, y, rows, m->k, m->n, m->k, m->bits, m->zero,
               dtype, m->s_dtype, m->b_dtype, dtype, threads);
    else
        dense(x, m->data, m->bias, y, rows, m->k, m->n, m->k, dtype, m->w_dtype, m->b_dtype, dtype,
              m->pairs, threads);
}

/* Copy a stream to its place in the taps, if the layer that it comes after is tapped. */
static void tap(const Pass *pass, int64_t layer, const char *stream, int64_t tokens, int64_t bytes) {
    for (int64_t i = 0; i < pass->num_taps; i++)
        if (pass->tapped[i] == layer)
            for (int64_t t = 0; t < tokens; t++)
                memcpy((char *)pass->taps + (t * pass->num_taps + i) * bytes, stream + t * bytes,
                       (size_t)bytes);
}

API void stack(const Stack *s, const Plan *plan, const Pass *pass, int threads) {
    const int64_t tokens = plan->tokens, hidden = s->hidden, size = size_of(s->dtype);
    const int64_t q_size = s->q_heads * s->width, k_size = s->kv_heads * s->width;
    const int64_t all = q_size + 2 * k_size, width = s->width, pool_size = size_of(plan->pool_dtype);
    if (tokens <= 0) return;
    /* x, two streams that take turns, q, k, attended, and qkv or gates (never both). */
    const int64_t widest = max64(all, 2 * s->inner);
    const int64_t row = 3 * hidden + 2 * q_size + k_size + widest + max64(s->inner, all);
    char *memory = malloc((size_t)(row * tokens * size));
    char *x = memory, *stream = x + hidden * tokens * size, *other = stream + hidden * tokens * size;
    char *q = other + hidden * tokens * size, *k = q + q_size * tokens * size;
    char *attended = k + k_size * tokens * size, *wide = attended + q_size * tokens * size;
    char *normed = wide + widest * tokens * size; /* per-head norms, and what the gates let through */

    for (int64_t i = 0; i < s->count; i++) {
        const Layer *l = s->layers + i;
        if (i == 0) {
            memcpy(stream, pass->x, (size_t)(hidden * tokens * size));
            rms_norm(stream, NULL, l->attention_norm, x, NULL, tokens, 1, hidden, hidden, 0, s->eps,
                     s->dtype, s->n_dtype, threads);
        } else {
            rms_norm(x, stream, l->attention_norm, x, other, tokens, 1, hidden, hidden, 0, s->eps,
                     s->dtype, s->n_dtype, threads);
            char *swap = stream;
            stream = other;
            other = swap;
            tap(pass, i - 1, stream, tokens, hidden * size);
        }
        multiply(&l->qkv, x, wide, tokens, s->dtype, threads);
        char *q_in = wide, *k_in = wide + q_size * size, *v_in = k_in + k_size * size;
        int64_t q_step = all, k_step = all;
        if (l->q_norm) {
            rms_norm(q_in, NULL, l->q_norm, normed, NULL, tokens * s->q_heads, s->q_heads, width, all,
                     width, s->eps, s->dtype, s->n_dtype, threads);
            q_in = normed;
            rms_norm(k_in, NULL, l->k_norm, normed + q_size * tokens * size, NULL,
                     tokens * s->kv_heads, s->kv_heads, width, all, width, s->eps, s->dtype,
                     s->n_dtype, threads);
            k_in = normed + q_size * tokens * size;
            q_step = q_size;
            k_step = k_size;
        }
        rope(q_in, k_in, q, k, plan->positions, s->cos_sin, tokens, s->q_heads, s->kv_heads, width,
             q_step, width, k_step, width, s->dtype, threads);
        char *k_pool = s->k_pool + i * s->pool_layer * pool_size;
        char *v_pool = s->v_pool + i * s->pool_layer * pool_size;
        kv_write(k, v_in, k_pool, v_pool, pass->slots, tokens, s->kv_heads, width * size,
                 s->pool_head * size, k_size * size, width * size, all * size, width * size);
        attention(plan, q, k_pool, v_pool, attended, l->scale, l->window, 0, threads);
        multiply(&l->out, attended, x, tokens, s->dtype, threads);
        rms_norm(x, stream, l->mlp_norm, x, other, tokens, 1, hidden, hidden, 0, s->eps, s->dtype,
                 s->n_dtype, threads);
        char *swap = stream;
        stream = other;
        other = swap;
        multiply(&l->gate_up, x, wide, tokens, s->dtype, threads);
        silu_mul(wide, normed, tokens, s->inner, 2 * s->inner, s->dtype, threads);
        multiply(&l->down, normed, x, tokens, s->dtype, threads);
    }
    rms_norm(x, stream, s->norm, pass->hidden, other, tokens, 1, hidden, hidden, 0, s->eps, s->dtype,
             s->n_dtype, threads);
    tap(pass, s->count - 1, other, tokens, hidden * size);
    free(memory);
}
