/* Tiles of dense.c in float32 arithmetic: some rows times one or two blocks of columns.
 *
 * Sums live in memory between tiles, so that the features can go in spans which the nearest cache
 * holds; a store and a load of a float change no bit. Every sum runs over the features in order.
 */
#ifndef PACELINE_DENSE_TILES_H
#define PACELINE_DENSE_TILES_H

#include "rows.h"
#include "vec.h"

#define COLS (2 * VL) /* of a block */
#ifdef __AVX512F__
#define MAX_ROWS 12
#else
#define MAX_ROWS 6 /* 12 sums, two weights, an activation and a mask in 16 registers */
#endif

typedef struct {
    const float *x;            /* [rows, ldx], from the span's first feature on */
    const char *w;             /* weights of the span's features */
    const char *ahead;         /* what is read after this: asked for while the tile computes ... */
    int64_t step;              /* ... so many bytes at a feature */
    float *sums;               /* [rows, COLS] */
    int64_t ldx, features;
    int64_t w_apart, sums_apart; /* from a block to the one after it: bytes, floats */
} Span;

typedef void (*Wide)(const Span *);
typedef vu vu_any __attribute__((aligned(4), may_alias));

/* The two vectors of a feature. bfloat16 lies such that one instruction each widens them. */
#define LOAD_F32(u, v, w) const vf u = load(w, 0, F32), v = load(w, VL, F32);
#define LOAD_F16(u, v, w) const vf u = load(w, 0, F16), v = load(w, VL, F16);
#define LOAD_BF16(u, v, w)                   \
    const vu u##v = *(const vu_any *)(w);    \
    const vf u = (vf)(u##v << 16), v = (vf)(u##v & 0xffff0000u);

/* Sums of row m: a and b, and c and d of the second block. */
#define TAKE_1(m) vf a##m = load(sums, m * COLS, F32), b##m = load(sums, m * COLS + VL, F32);
#define TAKE_2(m) TAKE_1(m) \
    vf c##m = load(others, m * COLS, F32), d##m = load(others, m * COLS + VL, F32);
#define KEEP_1(m) store(sums, m * COLS, a##m, F32); store(sums, m * COLS + VL, b##m, F32);
#define KEEP_2(m) KEEP_1(m) \
    store(others, m * COLS, c##m, F32); store(others, m * COLS + VL, d##m, F32);
#define ADD_1(m)                            \
    const vf v##m = splat(x[m * ldx + p]);  \
    a##m = madd(v##m, w0, a##m);            \
    b##m = madd(v##m, w1, b##m);
#define ADD_2(m) ADD_1(m)                   \
    c##m = madd(v##m, w2, c##m);            \
    d##m = madd(v##m, w3, d##m);
#define FEATURE_1(R, T) { LOAD_##T(w0, w1, w) ROWS_##R(ADD_1) w += line; }
#define FEATURE_2(R, T) \
    { LOAD_##T(w0, w1, w) LOAD_##T(w2, w3, w + w_apart) ROWS_##R(ADD_2) w += line; }

/* Two features at a time: with bfloat16 and AVX2 they are one cache line. */
#define TILE(R, NAME, T, BLOCKS)                                                 \
    static void NAME##_##T##_##R(const Span *s) {                                \
        const int64_t ldx = s->ldx, features = s->features, w_apart = s->w_apart; \
        const int64_t line = COLS * size_of(T), step = 2 * s->step;              \
        const float *x = s->x;                                                   \
        const char *w = s->w, *ahead = s->ahead;                                 \
        float *sums = s->sums, *others = sums + s->sums_apart;                   \
        ROWS_##R(TAKE_##BLOCKS)                                                  \
        int64_t p = 0;                                                           \
        for (; p + 2 <= features; p++) {                                         \
            for (int64_t b = 0; b < 2 * line; b += 64)                           \
                for (int64_t block = 0; block < BLOCKS; block++)                 \
                    __builtin_prefetch(ahead + block * w_apart + b, 0, 2);       \
            ahead += step;                                                       \
            FEATURE_##BLOCKS(R, T)                                               \
            p++;                                                                 \
            FEATURE_##BLOCKS(R, T)                                               \
        }                                                                        \
        if (p < features) FEATURE_##BLOCKS(R, T)                                 \
        ROWS_##R(KEEP_##BLOCKS)                                                  \
        (void)others;                                                            \
    }
#define ONE(R, T) TILE(R, one, T, 1)
#if MAX_ROWS > 6
#define REST(T) ONE(7, T) ONE(8, T) ONE(9, T) ONE(10, T) ONE(11, T) ONE(12, T)
#define NAMES(T) , one_##T##_7, one_##T##_8, one_##T##_9, one_##T##_10, one_##T##_11, one_##T##_12
#else
#define REST(T)
#define NAMES(T)
#endif
#define TILES(T)                                                                               \
    ONE(1, T) ONE(2, T) ONE(3, T) ONE(4, T) ONE(5, T) ONE(6, T) REST(T)                        \
    TILE(1, two, T, 2) TILE(2, two, T, 2)                                                      \
    static const Wide one_##T[MAX_ROWS] = {one_##T##_1, one_##T##_2, one_##T##_3, one_##T##_4, \
                                           one_##T##_5, one_##T##_6 NAMES(T)};                 \
    static const Wide two_##T[2] = {two_##T##_1, two_##T##_2};
TILES(F32) TILES(BF16) TILES(F16)

INLINE const Wide *one_block(int dtype) {
    return dtype == F32 ? one_F32 : dtype == BF16 ? one_BF16 : one_F16;
}
INLINE const Wide *two_blocks(int dtype) {
    return dtype == F32 ? two_F32 : dtype == BF16 ? two_BF16 : two_F16;
}

#endif
