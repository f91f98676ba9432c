/* Products with 4- and 8-bit weights in groups of 32, activations quantised to int8 per row and group.
 *
 * Weight value = code * scale + min, or (code - zero) * scale. Layout: 16 output columns a block,
 * codes [N/16][G][bytes of 32 x 16], scales and mins [N/16][G][16]. Four bits: 64-byte vector r
 * (0..3) holds features 4r..4r+3 in the low nibbles and 16+4r.. in the high ones, as [16 columns][4].
 * Eight bits: vector r (0..7) holds features 4r..4r+3.
 *
 * A group's integer sum is exact; one float accumulator per output runs over the groups in order.
 */
#include "kernels.h"
#include "pool.h"
#include "rows.h"
#include "vec.h"

#define GROUP 32
#define COLS 16
#define MAX_ROWS 12

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

#ifdef __AVX512VNNI__
/* Round 32 activations to int8: absmax / 254 at most off. Infinities and NaN give a NaN scale. */
INLINE void quantize(const void *x, int64_t at, int dtype, int zero, Quant *out) {
    vf a = load(x, at, dtype), b = load(x, at + VL, dtype);
    vi clear = (vi){0} + 0x7fffffff;
    vf aa = (vf)((vi)a & clear), ab = (vf)((vi)b & clear);
    vi more = aa > ab;
    float most = lane_max((vf)(((vi)aa & more) | ((vi)ab & ~more)));
    float total = lane_sum(aa + ab);
    float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    vf magic = splat(12582912.0f);
    vi qa = __builtin_convertvector(madd(a, splat(inverse), magic) - magic, vi);
    vi qb = __builtin_convertvector(madd(b, splat(inverse), magic) - magic, vi);
    int32_t sum = _mm512_reduce_add_epi32((__m512i)(qa + qb));
    typedef int8_t v8 __attribute__((vector_size(16)));
    v8 ca = __builtin_convertvector(qa, v8), cb = __builtin_convertvector(qb, v8);
    memcpy(out->q, &ca, VL);
    memcpy(out->q + VL, &cb, VL);
    out->scale = total < INFINITY ? (inverse > 0 ? most / 127.0f : 0.0f) : NAN;
    out->sum = out->scale * (float)sum;
    out->zero = -zero * sum;
}

static __attribute__((noinline)) void put(const Packed *d, int64_t row, int64_t col, vf v) {
    int64_t n = min64(VL, d->n - col), at = row * d->n + col;
    if (n <= 0) return;
    if (d->bias) v += load_part(d->bias, col, n, d->b_dtype);
    store_part(d->y, at, n, v, d->y_dtype);
}

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
    static void tile_##NAME##_##R(const Packed *d, int64_t row, int64_t block) {   \
        const int64_t groups = d->groups;                                          \
        const int mins = MINS, dtype = d->s_dtype;                                 \
        const uint8_t *codes = d->codes + block * groups * (BITS * 64);            \
        const __m512i nibble = _mm512_set1_epi8(15);                               \
        const Quant *x = d->x + row * groups;                                      \
        (void)nibble;                                                              \
        ROWS_##R(DECLARE)                                                          \
        for (int64_t g = 0; g < groups; g++) {                                     \
            LOAD_##BITS                                                            \
            ask_ahead(c, BITS * 64);                                               \
            const int64_t at = (block * groups + g) * VL;                          \
            vf s = dtype == F16 ? load(d->scales, at, F16) : load(d->scales, at, F32); \
            vf low = {0};                                                          \
            if (mins) low = dtype == F16 ? load(d->mins, at, F16) : load(d->mins, at, F32); \
            ROWS_##R(STEP)                                                         \
        }                                                                          \
        ROWS_##R(PUT)                                                              \
    }
#define TILES(R) TILE(R, 4, min4, 1) TILE(R, 4, zero4, 0) TILE(R, 8, min8, 1) TILE(R, 8, zero8, 0)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)

typedef void (*Tile)(const Packed *, int64_t, int64_t);
#define TABLE(T)                                                                              \
    static const Tile T[MAX_ROWS] = {T##_1, T##_2, T##_3, T##_4,  T##_5,  T##_6,              \
                                     T##_7, T##_8, T##_9, T##_10, T##_11, T##_12};
TABLE(tile_min4) TABLE(tile_zero4) TABLE(tile_min8) TABLE(tile_zero8)
#endif

/* 1: this machine has the instructions that `packed` is made of. */
API int packed_possible(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512VNNI__
typedef struct {
    Packed d;
    const Tile *tiles;
    const void *x;
    Quant *quants;
    int64_t rows, height, blocks, chunk, ldx;
    int zero, x_dtype;
} Job;

static void round_row(void *job, int64_t r) {
    const Job *j = job;
    for (int64_t g = 0; g < j->d.groups; g++) {
        Quant *to = j->quants + r * j->d.groups + g;
        const int64_t at = r * j->ldx + g * GROUP;
        if (j->x_dtype == BF16) quantize(j->x, at, BF16, j->zero, to);
        else if (j->x_dtype == F16) quantize(j->x, at, F16, j->zero, to);
        else quantize(j->x, at, F32, j->zero, to);
    }
}

static void work(void *job, int64_t chunk) {
    const Job *j = job;
    const int64_t last = min64(j->blocks, (chunk + 1) * j->chunk);
    for (int64_t block = chunk * j->chunk; block < last; block++)
        for (int64_t row = 0; row < j->rows; row += j->height)
            j->tiles[min64(j->height, j->rows - row) - 1](&j->d, row, block);
}
#endif

/* y[rows, n] = x[rows, k] @ w.T + bias. Scales and mins are float16 or float32 (s_dtype). */
API void packed(const void *x, const void *codes, const void *scales, const void *mins,
                const void *bias, void *y, int64_t rows, int64_t k, int64_t n, int64_t ldx, int bits,
                int zero, int x_dtype, int s_dtype, int b_dtype, int y_dtype, int threads) {
#ifdef __AVX512VNNI__
    if (rows <= 0) return;
    const int64_t groups = k / GROUP, blocks = (n + VL - 1) / VL;
    const int64_t parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    Quant *quants = malloc((size_t)(rows * groups) * sizeof(Quant));
    Job j = {{quants, codes, scales, mins, bias, y, groups, n, s_dtype, b_dtype, y_dtype},
             bits == 4 ? (mins ? tile_min4 : tile_zero4) : (mins ? tile_min8 : tile_zero8),
             x, quants, rows, (rows + parts - 1) / parts, blocks, share(blocks, threads), ldx,
             zero, x_dtype};
    pool_run(round_row, &j, rows, rows < 4 ? 1 : threads);
    pool_run(work, &j, (blocks + j.chunk - 1) / j.chunk, threads);
    free(quants);
#endif
}

/* out[i, k] = row ids[i] of the weights: an embedding look-up. Works on any machine. */
API void packed_rows(const uint8_t *codes, const void *scales, const void *mins, const int64_t *ids,
                     void *out, int64_t count, int64_t k, int64_t n, int bits, int zero, int s_dtype,
                     int out_dtype) {
    const int64_t groups = k / GROUP;
    for (int64_t i = 0; i < count; i++) {
        const int64_t block = ids[i] / COLS, column = ids[i] % COLS;
        if (ids[i] < 0 || ids[i] >= n) { /* the caller's fault: seen as NaN, never as another row */
            for (int64_t f = 0; f < k; f++) store1(out, i * k + f, NAN, out_dtype);
            continue;
        }
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = (block * groups + g) * COLS + column;
            const float scale = load1(scales, at, s_dtype), low = mins ? load1(mins, at, s_dtype) : 0;
            const uint8_t *c = codes + (block * groups + g) * bits * 64 + column * 4;
            for (int f = 0; f < GROUP; f++) {
                const int r = f / 4, b = f % 4;
                const int code = bits == 8 ? c[r * 64 + b]
                                           : (c[r % 4 * 64 + b] >> (r < 4 ? 0 : 4)) & 15;
                store1(out, i * k + g * GROUP + f, (float)(code - zero) * scale + low, out_dtype);
            }
        }
    }
}
