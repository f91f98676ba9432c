/* The library's functions, for each other. What they do is said where they are defined. */
#ifndef PACELINE_KERNELS_H
#define PACELINE_KERNELS_H

#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef struct {
    const int64_t *prefix_lens, *cu_q, *tail_lens, *mask, *positions;
    const int32_t *pages;
    int64_t rows, tokens, words, pages_stride, page_size;
    int64_t q_heads, kv_heads, width, pool_head; /* pool_head: elements between heads of the pool */
    int q_dtype, pool_dtype;
} Plan;

API void dense(const void *x, const void *w, const void *bias, void *y, int64_t rows, int64_t k,
               int64_t n, int64_t ldx, int x_dtype, int w_dtype, int b_dtype, int y_dtype,
               int pairs, int threads);
API void packed(const void *x, const void *codes, const void *scales, const void *mins,
                const void *bias, void *y, int64_t rows, int64_t k, int64_t n, int64_t ldx, int bits,
                int zero, int x_dtype, int s_dtype, int b_dtype, int y_dtype, int threads);
API void rms_norm(const void *x, const void *residual, const void *weight, void *y, void *stream,
                  int64_t rows, int64_t inner, int64_t width, int64_t outer_stride,
                  int64_t inner_stride, float eps, int dtype, int w_dtype, int threads);
API void rope(const void *q, const void *k, void *q_to, void *k_to, const int64_t *positions,
              const float *cos_sin, int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t width,
              int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, int dtype,
              int threads);
API void silu_mul(const void *x, void *y, int64_t rows, int64_t width, int64_t stride, int dtype,
                  int threads);
API void kv_write(const char *k, const char *v, char *k_pool, char *v_pool, const int64_t *slots,
                  int64_t tokens, int64_t heads, int64_t bytes, int64_t pool_head, int64_t k_token,
                  int64_t k_head, int64_t v_token, int64_t v_head);
API void peaks(const float *x, float *maxima, float *sums, int64_t rows, int64_t width, int threads);
API void attention(const Plan *p, const void *q, const void *k, const void *v, void *out,
                   float scale, int64_t window, int causal, int threads);

#endif
