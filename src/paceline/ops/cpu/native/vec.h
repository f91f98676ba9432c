/* Vectors of floats on any machine: loads and stores of three dtypes, exp, sums.
 *
 * GCC/clang vector extensions, 16 wide with AVX-512 and 8 wide elsewhere (one AVX register, or two of
 * NEON), with the machine's own instructions where they say more than C does. Every function
 * here works on whole vectors in one fixed order, so that what a row yields depends on that row alone.
 */
#ifndef PACELINE_VEC_H
#define PACELINE_VEC_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__
#define VL 16
#else
#define VL 8
#endif

enum { F32 = 0, BF16 = 1, F16 = 2 };

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(VL * 2), aligned(2), may_alias));

INLINE int64_t size_of(int dtype) { return dtype == F32 ? 4 : 2; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE vf splat(float x) { return x - (vf){0}; }

/* Ask for weights 4 KB ahead of what is read now. The hardware does not look past a page, and less far
 * ahead when much is computed per byte. Measured: 15 % off a 4-bit step, 10 to 15 % off 8 to 16 rows. */
INLINE void ask_ahead(const void *now, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)now + 4096 + b, 0, 2);
}

/* a * b + c, rounded once where the machine can. The only fusing there is: the library is compiled
 * with -ffp-contract=off, so that no compiler fuses in one tile and not in another. */
INLINE vf madd(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
    union { vf v; float32x4_t h[2]; } x = {a}, y = {b}, z = {c};
    z.h[0] = vfmaq_f32(z.h[0], x.h[0], y.h[0]);
    z.h[1] = vfmaq_f32(z.h[1], x.h[1], y.h[1]);
    return z.v;
#else
    return a * b + c;
#endif
}

/* ---- 16-bit formats ------------------------------------------------------------------------- */

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff, u;
    if (e == 31) {
        u = sign | 0x7f800000u | (m << 13);
    } else if (e) {
        u = sign | ((e + 112) << 23) | (m << 13);
    } else {
        float f = (float)m * 0x1p-24f;
        memcpy(&u, &f, 4);
        u |= sign;
    }
    float out;
    memcpy(&out, &u, 4);
    return out;
}

INLINE uint16_t float_to_half(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint16_t sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000u) return sign | 0x7e00;
    if (u >= 0x477ff000u) return sign | 0x7c00; /* rounds to 65536 or more */
    if (u < 0x38800000u) {                      /* below the least normal number */
        float a;
        memcpy(&a, &u, 4);
        return sign | (uint16_t)lrintf(a * 0x1p24f);
    }
    uint32_t odd = (u >> 13) & 1;
    return sign | (uint16_t)((u + 0xfff + odd - 0x38000000u) >> 13);
}

INLINE uint16_t float_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE float load1(const void *base, int64_t i, int dtype) {
    if (dtype == F32) return ((const float *)base)[i];
    uint16_t h = ((const uint16_t *)base)[i];
    if (dtype == F16) return half_to_float(h);
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE void store1(void *base, int64_t i, float x, int dtype) {
    if (dtype == F32)
        ((float *)base)[i] = x;
    else
        ((uint16_t *)base)[i] = dtype == BF16 ? float_to_bf16(x) : float_to_half(x);
}

/* ---- whole vectors -------------------------------------------------------------------------- */

INLINE vf load(const void *base, int64_t i, int dtype) {
    if (dtype == F32) return *(const vf_any *)((const float *)base + i);
    const uint16_t *p = (const uint16_t *)base + i;
#if defined(__AVX512F__)
    if (dtype == BF16)
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    if (dtype == BF16)
        return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    if (dtype == BF16) return (vf)(__builtin_convertvector(*(const vh_any *)p, vu) << 16);
#endif
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf out;
    for (int j = 0; j < VL; j++) out[j] = half_to_float(p[j]);
    return out;
#endif
}

INLINE void store(void *base, int64_t i, vf x, int dtype) {
    if (dtype == F32) {
        *(vf_any *)((float *)base + i) = x;
        return;
    }
    uint16_t *p = (uint16_t *)base + i;
    if (dtype == BF16) {
        vu u = (vu)x;
        vu nan = (vu)((vi)(u & 0x7fffffff) > 0x7f800000);
        vu round = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        vu quiet = (u >> 16) | 0x40;
        *(vh_any *)p = __builtin_convertvector((nan & quiet) | (~nan & round), vh);
        return;
    }
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int j = 0; j < VL; j++) p[j] = float_to_half(x[j]);
#endif
}

/* The first n (0..VL) elements; the rest reads as zero and is not touched. Out of line: rare. */
static __attribute__((noinline, unused)) void load_few(float *to, const void *base, int64_t i,
                                                       int64_t n, int dtype) {
    for (int64_t j = 0; j < n; j++) to[j] = load1(base, i + j, dtype);
}

static __attribute__((noinline, unused)) void store_few(void *base, int64_t i, int64_t n,
                                                        const float *from, int dtype) {
    for (int64_t j = 0; j < n; j++) store1(base, i + j, from[j], dtype);
}

INLINE vf load_part(const void *base, int64_t i, int64_t n, int dtype) {
    if (n >= VL) return load(base, i, dtype);
    float few[VL] = {0};
    load_few(few, base, i, n, dtype);
    return load(few, 0, F32);
}

INLINE void store_part(void *base, int64_t i, int64_t n, vf x, int dtype) {
    if (n >= VL) {
        store(base, i, x, dtype);
        return;
    }
    float few[VL];
    store(few, 0, x, F32);
    store_few(base, i, n, few, dtype);
}

/* Over all lanes, by halves: always the same tree. */
INLINE float lane_sum(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX__)
    __m128 v = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
#else
    for (int w = VL / 2; w; w >>= 1)
        for (int j = 0; j < w; j++) x[j] += x[j + w];
    return x[0];
#endif
}

INLINE float lane_max(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int j = 1; j < VL; j++) m = x[j] > m ? x[j] : m;
    return m;
#endif
}

INLINE int32_t lane_sum_int(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
#else
    int32_t sum = 0;
    for (int j = 0; j < VL; j++) sum += x[j];
    return sum;
#endif
}

INLINE int32_t lane_max_int(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
#else
    int32_t most = x[0];
    for (int j = 1; j < VL; j++) most = x[j] > most ? x[j] : most;
    return most;
#endif
}

/* exp(x) for x <= 88, relative error below 2e-7; 0 below -87.3; NaN stays NaN. */
INLINE vf vexp(vf x) {
    vi under = x < splat(-87.3f);
    vf safe = (vf)((vi)x & ~under);
    vi over = safe > splat(88.0f);
    safe = (vf)(((vi)safe & ~over) | ((vi)splat(88.0f) & over));
    vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = madd(safe, splat(1.44269504f), magic) - magic;
    vf r = madd(n, splat(-0.693359375f), safe);
    r = madd(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = madd(p, r, splat(1.3981999507e-3f));
    p = madd(p, r, splat(8.3334519073e-3f));
    p = madd(p, r, splat(4.1665795894e-2f));
    p = madd(p, r, splat(1.6666665459e-1f));
    p = madd(p, r, splat(5.0000001201e-1f));
    p = madd(p, r * r, r + splat(1.0f));
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    vf y = p * (vf)e;
    return (vf)((vi)y & ~under);
}

#endif
