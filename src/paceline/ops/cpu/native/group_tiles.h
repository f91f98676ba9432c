/* Tiles of groups.c: some rows times a block of 16 columns, one implementation per kind of machine.
 *
 * All compute the same bits. A group's integers are summed exactly, and then an output becomes
 * madd((sum + zero) * the row's scale, the column's scale, output), and with mins also
 * madd(the row's sum, the column's min, that).
 */
#ifndef PACELINE_GROUP_TILES_H
#define PACELINE_GROUP_TILES_H

#include "rows.h"
#include "vec.h"

#define GROUP 32
#define COLS 16

typedef struct {
    int8_t q[GROUP];
    float scale;
    float sum;    /* scale * sum of q: multiplies the min */
    int32_t zero; /* -zero * sum of q: where the integer sum starts */
    int32_t pad;
} Quant;

typedef struct {
    const Quant *x;
    const uint8_t *codes;
    const void *scales, *mins, *bias;
    void *y;
    int64_t groups, n;
    int s_dtype, b_dtype, y_dtype;
} Packed;

/* Rows from `row` on times one block; it is the block's tile number `part` of `parts`. */
typedef void (*Tile)(const Packed *, int64_t row, int64_t block, int64_t part, int64_t parts);

static __attribute__((noinline, unused)) void put_any(const Packed *d, int64_t row, int64_t col, vf v) {
    int64_t n = min64(VL, d->n - col), at = row * d->n + col;
    if (n <= 0) return;
    if (d->bias) v += load_part(d->bias, col, n, d->b_dtype);
    store_part(d->y, at, n, v, d->y_dtype);
}

INLINE void put(const Packed *d, int64_t row, int64_t col, vf v) {
    const int usual = !d->bias && col + VL <= d->n;
    if (usual && d->y_dtype == BF16) store(d->y, row * d->n + col, v, BF16);
    else if (usual && d->y_dtype == F32) store(d->y, row * d->n + col, v, F32);
    else put_any(d, row, col, v);
}

#define SIDE(from, i) \
    (dtype == F16 ? load(d->from, at + (i) * VL, F16) : load(d->from, at + (i) * VL, F32))
#define TILES(R) TILE(R, 4, min4, 1) TILE(R, 4, zero4, 0) TILE(R, 8, min8, 1) TILE(R, 8, zero8, 0)

#if defined(__AVX512VNNI__)
/* ---- 512 bits: the 16 columns are one accumulator ------------------------------------------- */

#define INSTRUCTIONS 1 /* see packed_instructions */
#define ROWS_OF_4 12
#define ROWS_OF_8 12

#define DECLARE(m) vf a##m = {0};
#define PUT(m) put(d, row + m, block * VL, a##m);
#define DOT(i, r)                                                        \
    {                                                                    \
        int32_t four;                                                    \
        memcpy(&four, q->q + 4 * r, 4);                                  \
        i = _mm512_dpbusd_epi32(i, w##r, _mm512_set1_epi32(four));       \
    }
#define STEP(m)                                                          \
    {                                                                    \
        const Quant *q = x + m * groups + g;                             \
        __m512i i = _mm512_set1_epi32(q->zero), j = _mm512_setzero_si512(); \
        DOT(i, 0) DOT(j, 4) DOT(i, 1) DOT(j, 5)                          \
        DOT(i, 2) DOT(j, 6) DOT(i, 3) DOT(j, 7)                          \
        vf f = (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(i, j)) * splat(q->scale); \
        a##m = madd(f, s, a##m);                                        \
        if (mins) a##m = madd(splat(q->sum), low, a##m);                \
    }
#define HIGH(v) _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble)
#define LOAD_4                                                                     \
    const uint8_t *c = codes + g * 256;                                           \
    __m512i v0 = _mm512_loadu_si512(c), v1 = _mm512_loadu_si512(c + 64);           \
    __m512i v2 = _mm512_loadu_si512(c + 128), v3 = _mm512_loadu_si512(c + 192);    \
    __m512i w0 = _mm512_and_si512(v0, nibble), w4 = HIGH(v0);                      \
    __m512i w1 = _mm512_and_si512(v1, nibble), w5 = HIGH(v1);                      \
    __m512i w2 = _mm512_and_si512(v2, nibble), w6 = HIGH(v2);                      \
    __m512i w3 = _mm512_and_si512(v3, nibble), w7 = HIGH(v3);
#define LOAD_8                                                                     \
    const uint8_t *c = codes + g * 512;                                           \
    __m512i w0 = _mm512_loadu_si512(c), w1 = _mm512_loadu_si512(c + 64);           \
    __m512i w2 = _mm512_loadu_si512(c + 128), w3 = _mm512_loadu_si512(c + 192);    \
    __m512i w4 = _mm512_loadu_si512(c + 256), w5 = _mm512_loadu_si512(c + 320);    \
    __m512i w6 = _mm512_loadu_si512(c + 384), w7 = _mm512_loadu_si512(c + 448);
#define TILE(R, BITS, NAME, MINS)                                                  \
    static void tile_##NAME##_##R(const Packed *d, int64_t row, int64_t block,     \
                                  int64_t part, int64_t parts) {                   \
        const int64_t groups = d->groups;                                          \
        const int mins = MINS, dtype = d->s_dtype;                                 \
        const uint8_t *codes = d->codes + block * groups * (BITS * 64);            \
        const __m512i nibble = _mm512_set1_epi8(15);                               \
        const Quant *x = d->x + row * groups;                                      \
        (void)nibble, (void)part, (void)parts;                                     \
        ROWS_##R(DECLARE)                                                          \
        for (int64_t g = 0; g < groups; g++) {                                     \
            LOAD_##BITS                                                            \
            ask_ahead(c, BITS * 64);                                               \
            const int64_t at = (block * groups + g) * VL;                          \
            vf s = SIDE(scales, 0), low = {0};                                     \
            if (mins) low = SIDE(mins, 0);                                         \
            ROWS_##R(STEP)                                                         \
        }                                                                          \
        ROWS_##R(PUT)                                                              \
    }
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
#define TABLE(T)                                                                              \
    static const Tile T[ROWS_OF_4] = {T##_1, T##_2, T##_3, T##_4,  T##_5,  T##_6,             \
                                      T##_7, T##_8, T##_9, T##_10, T##_11, T##_12};

#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || \
    (defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD))
/* ---- other machines: an accumulator of VL columns, so one or two of them ---------------------- */

#define ROWS_OF_4 4
#define ROWS_OF_8 3

#if VL == 16
#define ALSO(...)
#else
#define ALSO(...) __VA_ARGS__ /* what there is for columns 8 to 15 */
#endif

INLINE vi four(const int8_t *q) {
    int32_t bytes;
    memcpy(&bytes, q, 4);
    return (vi){0} + bytes;
}
INLINE vi low_bits(vi v) { return v & 0x0f0f0f0f; }
INLINE vi high_bits(vi v) { return (vi)((vu)v >> 4) & 0x0f0f0f0f; }

/* dot: sum + four codes of 4 bits times four int8, in each lane; times: the lane's sum, scaled. A code
 * of 8 bits goes as two of 4. */
#if defined(__AVXVNNI__) && VL == 8
#define INSTRUCTIONS 2
#define HOLD(v) __asm__("" : "+x"(v));
INLINE vi dot(vi sum, vi codes, vi q) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)q);
}
INLINE vi times(vi sum, int factor) { return sum * factor; }
#elif defined(__ARM_NEON)
#define INSTRUCTIONS 5
#define HOLD(v)
INLINE vi dot(vi sum, vi codes, vi q) {
    union { vi v; int32x4_t h[2]; } s = {sum};
    union { vi v; int8x16_t h[2]; } c = {codes}, x = {q};
    s.h[0] = vdotq_s32(s.h[0], c.h[0], x.h[0]);
    s.h[1] = vdotq_s32(s.h[1], c.h[1], x.h[1]);
    return s.v;
}
INLINE vi times(vi sum, int factor) { return sum * factor; }
#else
/* Unsigned by signed bytes, neighbours added into 16 bits, with saturation. A code of 4 bits times an
 * int8 is at most 15 * 127, so the 16 products of a group that meet in a lane stay exact (30,480). */
#define HOLD(v) __asm__("" : "+x"(v));
#if VL == 16
#define INSTRUCTIONS 4
#define OP(name, u, v) (vi)_mm512_##name((__m512i)(u), (__m512i)(v))
#else
#define INSTRUCTIONS 3
#define OP(name, u, v) (vi)_mm256_##name((__m256i)(u), (__m256i)(v))
#endif
INLINE vi dot(vi sum, vi codes, vi q) { return OP(add_epi16, sum, OP(maddubs_epi16, codes, q)); }
INLINE vi times(vi sum, int factor) { return OP(madd_epi16, sum, (vi){0} + (factor | factor << 16)); }
#endif

/* Sums of row m: i, and j of columns 8 to 15; of 8-bit codes' upper halves k and l. Each stays in its
 * register (HOLD): left alone, the compiler keeps all products for a tree of additions. */
#define CLEAR_4(m) vi i##m = {0}; ALSO(vi j##m = {0};)
#define CLEAR_8(m) CLEAR_4(m) vi k##m = {0}; ALSO(vi l##m = {0};)
#define DOT_4(m)                                                                          \
    {                                                                                     \
        const int8_t *q = x[m * groups + g].q + 4 * r;                                    \
        const vi a = four(q), b = four(q + 16);                                           \
        i##m = dot(dot(i##m, low0, a), high0, b);                                         \
        HOLD(i##m)                                                                        \
        ALSO(j##m = dot(dot(j##m, low1, a), high1, b); HOLD(j##m))                        \
    }
#define DOT_8(m)                                                                          \
    {                                                                                     \
        const vi a = four(x[m * groups + g].q + 4 * r);                                   \
        i##m = dot(i##m, low0, a), k##m = dot(k##m, high0, a);                            \
        HOLD(i##m) HOLD(k##m)                                                             \
        ALSO(j##m = dot(j##m, low1, a); l##m = dot(l##m, high1, a); HOLD(j##m) HOLD(l##m)) \
    }
#define SUM_4(m) const vi s##m = times(i##m, 1); ALSO(const vi t##m = times(j##m, 1);)
#define SUM_8(m)                                                                          \
    const vi s##m = times(i##m, 1) + times(k##m, 16);                                     \
    ALSO(const vi t##m = times(j##m, 1) + times(l##m, 16);)
#define ADD(to, from, n)                                                                  \
    {                                                                                     \
        const vf f = __builtin_convertvector(from + q->zero, vf) * splat(q->scale);       \
        to = madd(f, scale##n, to);                                                       \
        if (mins) to = madd(splat(q->sum), min##n, to);                                   \
    }
#define STEP(m)                                                                           \
    {                                                                                     \
        const Quant *q = x + m * groups + g;                                              \
        ADD(a##m, s##m, 0)                                                                \
        ALSO(ADD(b##m, t##m, 1))                                                          \
    }
#define DECLARE(m) vf a##m = {0}; ALSO(vf b##m = {0};)
#define PUT(m)                            \
    put(d, row + m, block * COLS, a##m);  \
    ALSO(put(d, row + m, block * COLS + VL, b##m);)
#define HALVES(n)                                                                         \
    const vi both##n = *(const vi *)(codes + r * 64 + n * 32);                            \
    const vi low##n = low_bits(both##n), high##n = high_bits(both##n);
#define SIDES(n)                                                                          \
    const vf scale##n = SIDE(scales, n);                                                  \
    vf min##n = {0};                                                                      \
    if (mins) min##n = SIDE(mins, n);
/* Each tile of a block asks for its part of the next block's codes. */
#define TILE(R, BITS, NAME, MINS)                                                         \
    static void tile_##NAME##_##R(const Packed *d, int64_t row, int64_t block,            \
                                  int64_t part, int64_t parts) {                          \
        const int64_t groups = d->groups, bytes = BITS * 64, step = bytes / parts;        \
        const int mins = MINS, dtype = d->s_dtype;                                        \
        const uint8_t *codes = d->codes + block * groups * bytes;                         \
        const uint8_t *ahead = codes + (bytes + part * step) * groups;                    \
        const Quant *x = d->x + row * groups;                                             \
        ROWS_##R(DECLARE)                                                                 \
        for (int64_t g = 0; g < groups; g++, codes += bytes, ahead += step) {             \
            for (int64_t b = 0; b < step; b += 64) __builtin_prefetch(ahead + b, 0, 2);   \
            ROWS_##R(CLEAR_##BITS)                                                        \
            _Pragma("GCC unroll 8") for (int r = 0; r < BITS; r++) {                      \
                HALVES(0)                                                                 \
                ALSO(HALVES(1))                                                           \
                ROWS_##R(DOT_##BITS)                                                      \
            }                                                                             \
            ROWS_##R(SUM_##BITS)                                                          \
            const int64_t at = (block * groups + g) * COLS;                               \
            SIDES(0)                                                                      \
            ALSO(SIDES(1))                                                                \
            ROWS_##R(STEP)                                                                \
        }                                                                                 \
        ROWS_##R(PUT)                                                                     \
    }
TILES(1) TILES(2) TILES(3) TILES(4)
#define TABLE(T) static const Tile T[ROWS_OF_4] = {T##_1, T##_2, T##_3, T##_4};
#endif

#ifdef ROWS_OF_4
TABLE(tile_min4) TABLE(tile_zero4) TABLE(tile_min8) TABLE(tile_zero8)
#endif
#endif
