/* A product's operands, and how a vector of sums becomes output: bias, rounding, the last columns. */
#ifndef PACELINE_DENSE_PUT_H
#define PACELINE_DENSE_PUT_H

#include "dense_tiles.h"

typedef struct {
    const void *x; /* the caller's rows, or float32 copies of them */
    const void *w;
    const void *bias;
    void *y;
    int64_t k, n, ldx, ldy;
    int w_dtype, b_dtype, y_dtype;
} Dense;

static __attribute__((noinline)) void put_any(const Dense *d, int64_t row, int64_t col, vf v) {
    int64_t n = min64(VL, d->n - col), at = row * d->ldy + col;
    if (n <= 0) return;
    if (d->bias) v += load_part(d->bias, col, n, d->b_dtype);
    store_part(d->y, at, n, v, d->y_dtype);
}

INLINE void put(const Dense *d, int64_t row, int64_t col, vf v) {
    const int usual = !d->bias && col + VL <= d->n;
    if (usual && d->y_dtype == BF16) store(d->y, row * d->ldy + col, v, BF16);
    else if (usual && d->y_dtype == F32) store(d->y, row * d->ldy + col, v, F32);
    else put_any(d, row, col, v);
}

#endif
