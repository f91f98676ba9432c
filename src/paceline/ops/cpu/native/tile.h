/* One tile of attention: up to 64 keys, the query heads that share them, one update of their state.
 *
 * What a tile yields depends on its keys, in their order, and on the state before: see attention.c.
 */
#ifndef PACELINE_TILE_H
#define PACELINE_TILE_H

#include "vec.h"

#define KEYS 64 /* a tile */

/* ---- bfloat16 as even and odd elements ------------------------------------------------------- */

/* 2 * VL bfloat16 as their even elements, then their odd ones: half the instructions of keeping the
 * order. Queries and outputs have this order, too, where both they and the pool are bfloat16. */
INLINE void load_halves(const void *base, int64_t i, vf *to) {
    vu both;
    memcpy(&both, (const uint16_t *)base + i, sizeof both);
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

/* ---- scores --------------------------------------------------------------------------------- */

/* Lane j: the sum of v[j] over its lanes, all by the same tree (the one of lane_sum). */
INLINE vf fold(const vf *v) {
#if defined(__AVX512F__)
#define PS(j) (__m512)v[j]
    __m512 rows[4];
    for (int i = 0; i < 4; i++) {
        const int j = 4 * i;
        __m512d x = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(PS(j), PS(j + 1)),
                                                   _mm512_unpackhi_ps(PS(j), PS(j + 1))));
        __m512d y = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(PS(j + 2), PS(j + 3)),
                                                   _mm512_unpackhi_ps(PS(j + 2), PS(j + 3))));
        rows[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
#define FOLD2(a, b) _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd))
    return (vf)FOLD2(FOLD2(rows[0], rows[1]), FOLD2(rows[2], rows[3]));
#undef FOLD2
#undef PS
#elif defined(__AVX__)
    __m256 pairs[4], fours[2]; /* keys j and j + 4, then j, j + 1, j + 4 and j + 5 */
    for (int j = 0; j < 4; j++) {
        const __m256 a = (__m256)v[j], b = (__m256)v[j + 4];
        pairs[j] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int j = 0; j < 2; j++) {
        const __m256 a = pairs[2 * j], b = pairs[2 * j + 1];
        fours[j] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    }
    return (vf)_mm256_add_ps(_mm256_shuffle_ps(fours[0], fours[1], 0x88),
                             _mm256_shuffle_ps(fours[0], fours[1], 0xdd));
#else
    vf out;
    for (int j = 0; j < VL; j++) out[j] = lane_sum(v[j]);
    return out;
#endif
}

#ifdef __AVX512BF16__
#define PAIRS 1 /* bfloat16 is multiplied as it is */

INLINE vf dot_pairs(const uint16_t *a, const uint16_t *b, int64_t width) {
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
#else
#define PAIRS 0
INLINE vf dot_pairs(const uint16_t *a, const uint16_t *b, int64_t width) {
    (void)a, (void)b, (void)width;
    return (vf){0};
}
#endif

/* VL partial sums of each of H query heads [H, width] times one key: the key is widened once. */
INLINE void dots(const float *q, const void *k, int64_t at, int64_t width, const int dtype,
                 const int bf16, const int H, vf *sum) {
    int64_t i = 0;
    for (int h = 0; h < H; h++) sum[h] = (vf){0};
    for (; i + 2 * VL <= width; i += 2 * VL) {
        vf part[2];
        if (bf16) load_halves(k, at + i, part);
        else part[0] = load(k, at + i, dtype), part[1] = load(k, at + i + VL, dtype);
        for (int h = 0; h < H; h++) {
            sum[h] = madd(load(q, h * width + i, F32), part[0], sum[h]);
            sum[h] = madd(load(q, h * width + i + VL, F32), part[1], sum[h]);
        }
    }
    if (i < width)
        for (int h = 0; h < H; h++)
            sum[h] = madd(load(q, h * width + i, F32), load(k, at + i, dtype), sum[h]);
}

/* Scores of H query heads against VL keys, a head's to every KEYS-th float. */
#define SCORES(H)                                                                       \
    {                                                                                   \
        vf sum[H], all[H][VL];                                                          \
        for (int j = 0; j < VL; j++) {                                                  \
            dots((const float *)q + h * width, k, slots[j] * width, width, dtype, bf16, H, sum); \
            for (int n = 0; n < H; n++) all[n][j] = sum[n];                             \
        }                                                                               \
        for (int n = 0; n < H; n++) *(vf *)(to + (h + n) * KEYS) = fold(all[n]);        \
    }

/* Queries in the form that `scores` reads: as they are for PAIRS, else float32 [heads, width]. */
INLINE void take_queries(const void *q, int64_t at, int64_t heads, int64_t width, int q_dtype,
                         int bf16, float *to) {
    if (PAIRS && bf16) {
        memcpy(to, (const uint16_t *)q + at, (size_t)(heads * width) * 2);
        return;
    }
    for (int64_t h = 0; h < heads; h++) {
        int64_t i = 0;
        for (; bf16 && i + 2 * VL <= width; i += 2 * VL) {
            vf part[2];
            load_halves(q, at + h * width + i, part);
            store(to, h * width + i, part[0], F32);
            store(to, h * width + i + VL, part[1], F32);
        }
        for (; i < width; i += VL) store(to, h * width + i, load(q, at + h * width + i, q_dtype), F32);
    }
}

/* Of all heads against VL keys: lane j of `to[head * KEYS]` is key j's. */
INLINE void scores(const float *q, const void *k, const int64_t *slots, int64_t heads, int64_t width,
                   float *to, const int dtype, const int bf16) {
    int64_t h = 0;
    if (PAIRS && bf16) {
        for (; h < heads; h++) {
            vf all[VL];
            for (int j = 0; j < VL; j++)
                all[j] = dot_pairs((const uint16_t *)q + h * width,
                                   (const uint16_t *)k + slots[j] * width, width);
            *(vf *)(to + h * KEYS) = fold(all);
        }
        return;
    }
    for (; h + 4 <= heads; h += 4) SCORES(4)
    if (heads - h == 3) SCORES(3)
    if (heads - h == 2) SCORES(2)
    if (heads - h == 1) SCORES(1)
}

/* ---- one tile ------------------------------------------------------------------------------- */

#define WIDE (VL == 16 ? 4 : 2) /* vectors of values summed at a time: 4 heads' fit the registers */

/* Slots of the tile after this one, which may be the next head's first. Pages are scattered and no
 * hardware guesses them, so they are asked for while this tile is computed, a few at a time: more at
 * once would wait for each other. */
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
            for (int n = 0; bf16 && n + 2 <= N; n += 2)                                          \
                load_halves(v, slots[j] * width + i + n * VL, part + n);                         \
            for (int n = bf16 ? N / 2 * 2 : 0; n < N; n++)                                       \
                part[n] = load(v, slots[j] * width + i + n * VL, dtype);                         \
            for (int h = 0; h < H; h++) {                                                        \
                vf weight = splat(p[(head + h) * KEYS + j]);                                     \
                for (int n = 0; n < N; n++) sum[h][n] = madd(weight, part[n], sum[h][n]);       \
            }                                                                                    \
        }                                                                                        \
        for (int h = 0; h < H; h++)                                                              \
            for (int n = 0; n < N; n++) *(vf *)(out + (head + h) * width + i + n * VL) = sum[h][n]; \
    }

/* State of a query: most[heads], total[heads], out[heads][width]. p: [heads][KEYS] of room. `bf16`:
 * queries and pool are, and elements lie as load_halves has them, in whole WIDE * VL. */
INLINE void tile(const float *q, const void *k, const void *v, const int64_t *slots, int64_t keys,
                 int64_t heads, int64_t width, float scale, float *most, float *total, float *out,
                 float *p, float *fix, const Ahead *ahead, const int dtype, const int bf16) {
    const vf lowest = splat(-INFINITY);
    static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi lane;
    memcpy(&lane, order, sizeof lane);
    const int64_t share = (ahead->count * VL + keys - 1) / keys;
    for (int64_t g = 0; g * VL < keys; g++) {
        fetch(ahead, g * share, min64(ahead->count, (g + 1) * share), k, width * size_of(dtype));
        scores(q, k, slots + g * VL, heads, width, p + g * VL, dtype, bf16);
    }
    for (int64_t h = 0; h < heads; h++) {
        vf s[KEYS / VL], top = lowest;
        for (int64_t g = 0; g * VL < keys; g++) {
            vi real = lane < (vi){0} + (int32_t)(keys - g * VL);
            vf x = *(vf *)(p + h * KEYS + g * VL) * splat(scale);
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
