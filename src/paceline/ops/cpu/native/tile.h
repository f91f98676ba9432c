/* One tile of attention: up to 64 keys, the query heads that share them, one update of their state.
 *
 * What a tile yields depends on its keys, in their order, and on the state before: see attention.c.
 */
#ifndef PACELINE_TILE_H
#define PACELINE_TILE_H

#include "vec.h"

#define KEYS 64 /* a tile */

/* ---- scores --------------------------------------------------------------------------------- */

/* VL partial sums of one query head times one key. `pairs`: both bf16, multiplied as they are. */
INLINE vf dot(const void *q, int64_t q_at, const void *k, int64_t slot, int64_t width,
              const int q_dtype, const int dtype, const int pairs) {
#ifdef __AVX512BF16__
    if (pairs) {
        const uint16_t *a = (const uint16_t *)q + q_at, *b = (const uint16_t *)k + slot * width;
        __m512 sum = _mm512_setzero_ps();
        int64_t i = 0;
        for (; i + 32 <= width; i += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + i),
                                   (__m512bh)_mm512_loadu_si512(b + i));
        if (i < width)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(0xffff, a + i),
                                   (__m512bh)_mm512_maskz_loadu_epi16(0xffff, b + i));
        return (vf)sum;
    }
#endif
    (void)pairs;
    vf sum = {0};
    for (int64_t i = 0; i < width; i += VL)
        sum = madd(load(q, q_at + i, q_dtype), load(k, slot * width + i, dtype), sum);
    return sum;
}

#ifdef __AVX512F__
/* Lane 4h + j of the result: the sum of v_j over the h-th four lanes; all by the same tree. */
INLINE __m512 fold4(vf v0, vf v1, vf v2, vf v3) {
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v0, (__m512)v1),
                             _mm512_unpackhi_ps((__m512)v0, (__m512)v1));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v2, (__m512)v3),
                             _mm512_unpackhi_ps((__m512)v2, (__m512)v3));
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

INLINE __m512 fold2(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
#endif

/* Scores of one query head against VL keys: lane j is key j's. */
INLINE vf scores_of(const void *q, int64_t q_at, const void *k, const int64_t *slots, int64_t width,
                   const int q_dtype, const int dtype, const int pairs) {
#define DOT(j) dot(q, q_at, k, slots[j], width, q_dtype, dtype, pairs)
#ifdef __AVX512F__
    __m512 a = fold4(DOT(0), DOT(1), DOT(2), DOT(3)), b = fold4(DOT(4), DOT(5), DOT(6), DOT(7));
    __m512 low = fold2(a, b);
    a = fold4(DOT(8), DOT(9), DOT(10), DOT(11));
    b = fold4(DOT(12), DOT(13), DOT(14), DOT(15));
    return (vf)fold2(low, fold2(a, b));
#else
    vf out;
    for (int j = 0; j < VL; j++) out[j] = lane_sum(DOT(j));
    return out;
#endif
}

/* ---- one tile ------------------------------------------------------------------------------- */

#if VL == 16
#define WIDE 4 /* vectors of values that are summed at a time: sums of 4 heads fit the registers */
/* 32 bf16 as their even elements, then their odd ones: half the instructions of keeping the order.
 * Outputs of whole 64s are in this order until they are stored. */
INLINE void load_halves(const void *base, int64_t i, vf *to) {
    vu both;
    memcpy(&both, (const uint16_t *)base + i, 64);
    to[0] = (vf)(both << 16);
    to[1] = (vf)(both & 0xffff0000u);
}

INLINE void store_halves(void *base, int64_t i, vf even, vf odd) {
    uint16_t a[VL], b[VL], *to = (uint16_t *)base + i;
    store(a, 0, even, BF16);
    store(b, 0, odd, BF16);
    for (int j = 0; j < VL; j++) {
        to[2 * j] = a[j];
        to[2 * j + 1] = b[j];
    }
}

#else
#define WIDE 2
INLINE void load_halves(const void *base, int64_t i, vf *to) { (void)base, (void)i, (void)to; }
INLINE void store_halves(void *base, int64_t i, vf a, vf b) { (void)base, (void)i, (void)a, (void)b; }
#endif

/* Slots of the tile after this one, which may be the next head's first. Pages are scattered and no hardware guesses them, so they are
 * asked for while this tile is computed, a few at a time: more at once would wait for each other. */
typedef struct {
    const int64_t *slots;
    int64_t count, offset; /* bytes from this head's keys to that head's */
} Ahead;

INLINE void fetch(const Ahead *ahead, int64_t from, int64_t until, const void *base, int64_t bytes) {
    for (int64_t n = from; n < until; n++)
        for (int64_t b = 0; b < bytes; b += 64)
            __builtin_prefetch((const char *)base + ahead->offset + ahead->slots[n] * bytes + b, 0, 2);
}

/* out[h] = out[h] * fix[h] + sum over keys of p[h] * v, for H heads and N vectors of features. */
#define VALUES(H, N)                                                                             \
    {                                                                                            \
        vf sum[H][N];                                                                            \
        for (int h = 0; h < H; h++)                                                              \
            for (int n = 0; n < N; n++)                                                          \
                sum[h][n] = *(vf *)(out + (head + h) * width + i + n * VL) * splat(fix[head + h]); \
        const int64_t soon = head == 0 && i == 0 ? ahead->count : 0;                             \
        for (int64_t j = 0; j < keys; j++) {                                                     \
            if (j < soon) fetch(ahead, j, j + 1, v, width * size_of(dtype));                     \
            vf part[N];                                                                          \
            if (pairs && VL == 16 && N == 4) {                                                   \
                load_halves(v, slots[j] * width + i, part);                                      \
                load_halves(v, slots[j] * width + i + 32, part + 2);                             \
            } else                                                                               \
                for (int n = 0; n < N; n++)                                                      \
                    part[n] = load(v, slots[j] * width + i + n * VL, dtype);                     \
            for (int h = 0; h < H; h++) {                                                        \
                vf weight = splat(p[(head + h) * KEYS + j]);                                     \
                for (int n = 0; n < N; n++) sum[h][n] = madd(weight, part[n], sum[h][n]);       \
            }                                                                                    \
        }                                                                                        \
        for (int h = 0; h < H; h++)                                                              \
            for (int n = 0; n < N; n++) *(vf *)(out + (head + h) * width + i + n * VL) = sum[h][n]; \
    }

/* State of a query: most[heads], total[heads], out[heads][width]. p: [heads][KEYS] of room. */
INLINE void tile(const void *q, int64_t q_at, const void *k, const void *v, const int64_t *slots,
                 int64_t keys, int64_t heads, int64_t width, float scale, float *most, float *total,
                 float *out, float *p, float *fix, const Ahead *ahead, const int q_dtype,
                 const int dtype, const int pairs) {
    const vf lowest = splat(-INFINITY);
    static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi lane;
    memcpy(&lane, order, sizeof lane);
    const int64_t share = (ahead->count * VL + heads * keys - 1) / (heads * keys);
    int64_t asked = 0;
    for (int64_t h = 0; h < heads; h++) {
        vf s[KEYS / VL], top = lowest;
        for (int64_t g = 0; g * VL < keys; g++) {
            const int64_t until = min64(ahead->count, asked + share);
            fetch(ahead, asked, until, k, width * size_of(dtype));
            asked = until;
            vf x = scores_of(q, q_at + h * width, k, slots + g * VL, width, q_dtype, dtype, pairs);
            vi real = lane < (vi){0} + (int32_t)(keys - g * VL);
            x = x * splat(scale);
            s[g] = (vf)(((vi)x & real) | ((vi)lowest & ~real));
            vi more = s[g] > top;
            top = (vf)(((vi)s[g] & more) | ((vi)top & ~more));
        }
        const float before = most[h], now = fmaxf(before, lane_max(top));
        vf sum = {0};
        for (int64_t g = 0; g * VL < keys; g++) {
            vf e = vexp(s[g] - splat(now));
            *(vf *)(p + h * KEYS + g * VL) = e;
            sum += e;
        }
        most[h] = now;
        fix[h] = vexp(splat(before - now))[0];
        total[h] = total[h] * fix[h] + lane_sum(sum);
    }
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) {
        int64_t i = 0;
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(4, WIDE)
        for (; i < width; i += VL) VALUES(4, 1)
    }
    const int64_t left = heads - head;
    int64_t i = 0;
    if (left == 3) {
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(3, WIDE)
        for (; i < width; i += VL) VALUES(3, 1)
    } else if (left == 2) {
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(2, WIDE)
        for (; i < width; i += VL) VALUES(2, 1)
    } else if (left == 1) {
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(1, WIDE)
        for (; i < width; i += VL) VALUES(1, 1)
    }
}

#endif
