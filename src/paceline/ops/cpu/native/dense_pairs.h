/* Tiles of dense.c for bfloat16 in pairs: AVX512-BF16, some rows times one block of columns. */
#ifndef PACELINE_DENSE_PAIRS_H
#define PACELINE_DENSE_PAIRS_H

#include "dense_put.h"

#ifdef __AVX512BF16__
#define DECLARE(m) vf a##m = {0}, b##m = {0};
#define PUT(m)                            \
    put(d, row + m, block * COLS, a##m);  \
    put(d, row + m, block * COLS + VL, b##m);
#define STEP_BF16(m)                                              \
    {                                                             \
        int32_t two;                                              \
        memcpy(&two, x + m * ldx + 2 * p, 4);                     \
        __m512bh v = (__m512bh)_mm512_set1_epi32(two);            \
        a##m = (vf)_mm512_dpbf16_ps((__m512)a##m, w0, v);         \
        b##m = (vf)_mm512_dpbf16_ps((__m512)b##m, w1, v);         \
    }
#define TILE_BF16(R)                                                          \
    static void tile_bf16_##R(const Dense *d, int64_t row, int64_t block) {   \
        const int64_t pairs = d->k / 2, ldx = d->ldx;                         \
        const uint16_t *x = (const uint16_t *)d->x + row * ldx;               \
        const uint16_t *w = (const uint16_t *)d->w + block * COLS * d->k;     \
        ROWS_##R(DECLARE)                                                     \
        for (int64_t p = 0; p < pairs; p++) {                                 \
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(w + p * 64);           \
            __m512bh w1 = (__m512bh)_mm512_loadu_si512(w + p * 64 + 32);      \
            ask_ahead(w + p * 64, 128);                                       \
            ROWS_##R(STEP_BF16)                                               \
        }                                                                     \
        ROWS_##R(PUT)                                                         \
    }
TILE_BF16(1) TILE_BF16(2) TILE_BF16(3) TILE_BF16(4) TILE_BF16(5) TILE_BF16(6)
TILE_BF16(7) TILE_BF16(8) TILE_BF16(9) TILE_BF16(10) TILE_BF16(11) TILE_BF16(12)

typedef void (*Pairs)(const Dense *, int64_t, int64_t);
#define T(R) tile_bf16_##R
static const Pairs tile_bf16[MAX_ROWS] = {T(1), T(2), T(3), T(4), T(5), T(6),
                                          T(7), T(8), T(9), T(10), T(11), T(12)};
#undef T
#endif

#endif
