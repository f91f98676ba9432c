/* Products with 4- and 8-bit weights in groups of 32, activations quantised to int8 per row and group.
 *
 * Weight value = code * scale + min, or (code - zero) * scale. Layout: 16 output columns a block,
 * codes [N/16][G][bytes of 32 x 16], scales and mins [N/16][G][16]. Four bits: 64-byte vector r
 * (0..3) holds features 4r..4r+3 in the low nibbles and 16+4r.. in the high ones, as [16 columns][4].
 * Eight bits: vector r (0..7) holds features 4r..4r+3.
 *
 * A group's integer sum is exact; one float accumulator per output runs over the groups in order.
 */
#include "group_tiles.h"
#include "kernels.h"
#include "pool.h"

#ifdef ROWS_OF_4
/* A group of integers from -127 to 127 as bytes. */
INLINE void narrow(const vi *from, int8_t *to) {
#if defined(__AVX2__) && VL == 8
    const __m256i a = _mm256_packs_epi32((__m256i)from[0], (__m256i)from[1]);
    const __m256i b = _mm256_packs_epi32((__m256i)from[2], (__m256i)from[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing goes by halves */
    _mm256_storeu_si256((__m256i *)to,
                        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
    typedef int8_t bytes __attribute__((vector_size(VL)));
    for (int i = 0; i < GROUP / VL; i++) {
        const bytes part = __builtin_convertvector(from[i], bytes);
        memcpy(to + i * VL, &part, VL);
    }
#endif
}

/* Round 32 activations to int8: absmax / 254 at most off. Infinities and NaN give a NaN scale. */
INLINE void quantize(const void *x, int64_t at, int dtype, int zero, Quant *out) {
    enum { PARTS = GROUP / VL };
    vf v[PARTS];
    vi q[PARTS], most = {0}, sums = {0}; /* absolute values compare as their bits do, NaN above infinity */
    for (int i = 0; i < PARTS; i++) {
        v[i] = load(x, at + i * VL, dtype);
        const vi size = (vi)v[i] & 0x7fffffff, more = size > most;
        most = (size & more) | (most & ~more);
    }
    const int32_t bits = lane_max_int(most);
    float top;
    memcpy(&top, &bits, 4);
    const int finite = bits < 0x7f800000;
    const float inverse = finite && top > 1e-30f ? 127.0f / top : 0.0f;
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    for (int i = 0; i < PARTS; i++) {
        const vf near = finite ? madd(v[i], splat(inverse), magic) - magic : (vf){0};
        q[i] = __builtin_convertvector(near, vi);
        sums += q[i];
    }
    narrow(q, out->q);
    const int32_t sum = lane_sum_int(sums);
    out->scale = finite ? (inverse > 0 ? top / 127.0f : 0.0f) : NAN;
    out->sum = out->scale * (float)sum;
    out->zero = -zero * sum;
}
#endif

/* What `packed` is made of on this machine: 0 nothing, 1 AVX512-VNNI, 2 AVX-VNNI, 3 AVX2, 4 AVX512BW,
 * 5 NEON with dot products. */
API int packed_instructions(void) {
#ifdef INSTRUCTIONS
    return INSTRUCTIONS;
#else
    return 0;
#endif
}

#ifdef ROWS_OF_4
typedef struct {
    Packed d;
    const Tile *tiles;
    const void *x;
    Quant *quants;
    int64_t rows, height, ldx;
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

static void work(void *job, int64_t block, int64_t last) {
    const Job *j = job;
    const int64_t parts = (j->rows + j->height - 1) / j->height;
    for (; block < last; block++)
        for (int64_t row = 0, part = 0; row < j->rows; row += j->height, part++)
            j->tiles[min64(j->height, j->rows - row) - 1](&j->d, row, block, part, parts);
}
#endif

/* y[rows, n] = x[rows, k] @ w.T + bias. Scales and mins are float16 or float32 (s_dtype). */
API void packed(const void *x, const void *codes, const void *scales, const void *mins,
                const void *bias, void *y, int64_t rows, int64_t k, int64_t n, int64_t ldx, int bits,
                int zero, int x_dtype, int s_dtype, int b_dtype, int y_dtype, int threads) {
#ifdef ROWS_OF_4
    if (rows <= 0) return;
    const int64_t groups = k / GROUP, blocks = (n + COLS - 1) / COLS;
    const int64_t most = bits == 4 ? ROWS_OF_4 : ROWS_OF_8, parts = (rows + most - 1) / most;
    Quant *quants = malloc((size_t)(rows * groups) * sizeof(Quant));
    Job j = {{quants, codes, scales, mins, bias, y, groups, n, s_dtype, b_dtype, y_dtype},
             bits == 4 ? (mins ? tile_min4 : tile_zero4) : (mins ? tile_min8 : tile_zero8),
             x, quants, rows, (rows + parts - 1) / parts, ldx, zero, x_dtype};
    pool_run(round_row, &j, rows, rows < 4 ? 1 : threads);
    pool_walk(work, &j, blocks, 1, threads);
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
