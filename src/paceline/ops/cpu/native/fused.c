/* Norms, rotary embedding, gated activation and cache writes: one call each, row by row.
 *
 * Rows are given by strides (in elements), so that slices of a fused projection need no copies. What
 * a row yields is computed in one fixed order, whoever computes it.
 */
#include "kernels.h"
#include "pool.h"
#include "vec.h"

#define ENOUGH 8192 /* elements below which one thread is quicker than two */

typedef struct {
    const void *x, *residual, *weight;
    void *y, *stream;
    int64_t rows, inner, width, outer_stride, inner_stride, chunk;
    float eps;
    int dtype, w_dtype;
} Norm;

/* Whole vectors first, in a loop without calls, then what is left: EACH(width, F) runs F(i, n) for
 * every vector, n elements from i on. */
#define EACH(width, F)                                       \
    {                                                        \
        int64_t i = 0;                                       \
        for (; i + VL <= (width); i += VL) F(i, VL)          \
        if (i < (width)) F(i, (width) - i)                   \
    }

INLINE void norm_row(const Norm *n, int64_t row, const int dtype, const int w_dtype) {
    const int64_t width = n->width, to = row * width;
    const int64_t from = row / n->inner * n->outer_stride + row % n->inner * n->inner_stride;
    const void *x = n->x, *residual = n->residual, *weight = n->weight;
    void *stream = n->stream, *y = n->y;
    int64_t at = from;
    vf squares = {0};
    if (residual) {
#define SUM(i, some)                                                                             \
    {                                                                                            \
        vf sum = load_part(x, from + i, some, dtype) + load_part(residual, to + i, some, dtype); \
        store_part(stream, to + i, some, sum, dtype);                                            \
    }
        EACH(width, SUM)
        x = stream;
        at = to;
    }
#define SQUARE(i, some)                               \
    {                                                 \
        vf v = load_part(x, at + i, some, dtype);     \
        squares = madd(v, v, squares);                \
    }
    EACH(width, SQUARE)
    vf factor = splat(1.0f / sqrtf(lane_sum(squares) / (float)width + n->eps));
#define NORM(i, some)                                                                          \
    {                                                                                          \
        vf v = load_part(x, at + i, some, dtype) * factor;                                     \
        store_part(y, to + i, some, v * load_part(weight, i, some, w_dtype), dtype);           \
    }
    EACH(width, NORM)
}

static void norm_work(void *job, int64_t chunk) {
    const Norm *n = job;
    const int64_t last = min64(n->rows, (chunk + 1) * n->chunk);
    for (int64_t row = chunk * n->chunk; row < last; row++) {
        if (n->dtype == BF16 && n->w_dtype == BF16) norm_row(n, row, BF16, BF16);
        else norm_row(n, row, n->dtype, n->w_dtype);
    }
}

/* y = rms_norm(x [+ residual]) * weight; with a residual, stream = x + residual, rounded, is normed.
 * Row r of x is at r / inner * outer_stride + r % inner * inner_stride; all else is contiguous. */
API void rms_norm(const void *x, const void *residual, const void *weight, void *y, void *stream,
                  int64_t rows, int64_t inner, int64_t width, int64_t outer_stride,
                  int64_t inner_stride, float eps, int dtype, int w_dtype, int threads) {
    if (rows * width < ENOUGH) threads = 1;
    Norm n = {x, residual, weight, y, stream, rows, inner, width, outer_stride, inner_stride,
              share(rows, threads), eps, dtype, w_dtype};
    pool_run(norm_work, &n, (rows + n.chunk - 1) / n.chunk, threads);
}

typedef struct {
    const void *from;
    void *to;
    const int64_t *positions;
    const float *cos_sin;
    int64_t heads, width, token_stride, head_stride;
    int dtype;
} Half;

INLINE void rotate(const Half *h, int64_t token, const int dtype) {
    const int64_t half = h->width / 2;
    const float *cos = h->cos_sin + h->positions[token] * h->width, *sin = cos + half;
    const void *x = h->from;
    void *y = h->to;
    for (int64_t head = 0; head < h->heads; head++) {
        const int64_t from = token * h->token_stride + head * h->head_stride;
        const int64_t to = (token * h->heads + head) * h->width;
#define ROTATE(i, some)                                                            \
    {                                                                              \
        vf a = load_part(x, from + i, some, dtype);                                \
        vf b = load_part(x, from + half + i, some, dtype);                         \
        vf c = load_part(cos, i, some, F32), s = load_part(sin, i, some, F32);     \
        store_part(y, to + i, some, madd(a, c, -(b * s)), dtype);                  \
        store_part(y, to + half + i, some, madd(b, c, a * s), dtype);              \
    }
        EACH(half, ROTATE)
    }
}

typedef struct {
    Half q, k;
    int64_t tokens, chunk;
} Rope;

static void rope_work(void *job, int64_t chunk) {
    const Rope *r = job;
    const int64_t last = min64(r->tokens, (chunk + 1) * r->chunk);
    for (int64_t t = chunk * r->chunk; t < last; t++) {
        if (r->q.dtype == BF16) {
            rotate(&r->q, t, BF16);
            rotate(&r->k, t, BF16);
        } else {
            rotate(&r->q, t, r->q.dtype);
            rotate(&r->k, t, r->k.dtype);
        }
    }
}

/* Rotate queries and keys, halves paired, into contiguous [tokens, heads, width]. */
API void rope(const void *q, const void *k, void *q_to, void *k_to, const int64_t *positions,
              const float *cos_sin, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t width,
              int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, int dtype,
              int threads) {
    if (tokens * (q_heads + k_heads) * width < ENOUGH) threads = 1;
    Rope r = {{q, q_to, positions, cos_sin, q_heads, width, q_token, q_head, dtype},
              {k, k_to, positions, cos_sin, k_heads, width, k_token, k_head, dtype},
              tokens, share(tokens, threads)};
    pool_run(rope_work, &r, (tokens + r.chunk - 1) / r.chunk, threads);
}

typedef struct {
    const void *x;
    void *y;
    int64_t rows, width, stride, chunk;
    int dtype;
} Gate;

INLINE void gate_row(const Gate *g, int64_t row, const int dtype) {
    const int64_t width = g->width, from = row * g->stride, to = row * width;
    const void *x = g->x;
    void *y = g->y;
#define GATE(i, some)                                               \
    {                                                               \
        vf gate = load_part(x, from + i, some, dtype);              \
        vf up = load_part(x, from + width + i, some, dtype);        \
        vf silu = gate / (splat(1.0f) + vexp(-gate));               \
        store_part(y, to + i, some, silu * up, dtype);              \
    }
    EACH(width, GATE)
}

static void gate_work(void *job, int64_t chunk) {
    const Gate *g = job;
    const int64_t last = min64(g->rows, (chunk + 1) * g->chunk);
    for (int64_t row = chunk * g->chunk; row < last; row++) {
        if (g->dtype == BF16) gate_row(g, row, BF16);
        else gate_row(g, row, g->dtype);
    }
}

/* y[rows, width] = silu(x[:, :width]) * x[:, width:]. */
API void silu_mul(const void *x, void *y, int64_t rows, int64_t width, int64_t stride, int dtype,
                  int threads) {
    if (rows * width < ENOUGH) threads = 1;
    Gate g = {x, y, rows, width, stride, share(rows, threads), dtype};
    pool_run(gate_work, &g, (rows + g.chunk - 1) / g.chunk, threads);
}

/* Copy k and v of each token to its slot of one layer's pool [heads, slots, bytes]; slot -1: nothing.
 * Strides and `bytes` (one head of one token) are in bytes. */
API void kv_write(const char *k, const char *v, char *k_pool, char *v_pool, const int64_t *slots,
                  int64_t tokens, int64_t heads, int64_t bytes, int64_t pool_head, int64_t k_token,
                  int64_t k_head, int64_t v_token, int64_t v_head) {
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        for (int64_t h = 0; h < heads; h++) {
            const int64_t to = h * pool_head + slots[t] * bytes;
            memcpy(k_pool + to, k + t * k_token + h * k_head, (size_t)bytes);
            memcpy(v_pool + to, v + t * v_token + h * v_head, (size_t)bytes);
        }
    }
}
