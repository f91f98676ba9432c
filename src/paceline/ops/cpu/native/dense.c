/* Products with a dense matrix, for few or many rows; weights are read once for up to 12 rows.
 *
 * Layout: output columns in blocks of COLS (32 with AVX-512, else 16), zero-padded. For AVX512-BF16:
 * [N/32][K/2][32][2] (K even); otherwise [N/COLS][K][COLS]. Every output has one accumulator, which runs over K in order, so its bits
 * depend on its own row and column only, not on the tile or the thread that computes it.
 */
#include "kernels.h"
#include "pool.h"
#include "rows.h"
#include "vec.h"

#define COLS (2 * VL)
#ifdef __AVX512F__
#define MAX_ROWS 12
#else
#define MAX_ROWS 6 /* 12 sums, two weights and an activation in 16 registers */
#endif

typedef struct {
    const void *x; /* the caller's rows, or float32 copies of them */
    const void *w;
    const void *bias;
    void *y;
    int64_t k, n, ldx, ldy;
    int w_dtype, b_dtype, y_dtype;
} Dense;

static __attribute__((noinline)) void put(const Dense *d, int64_t row, int64_t col, vf v) {
    int64_t n = min64(VL, d->n - col), at = row * d->ldy + col;
    if (n <= 0) return;
    if (d->bias) v += load_part(d->bias, col, n, d->b_dtype);
    store_part(d->y, at, n, v, d->y_dtype);
}

#define DECLARE(m) vf a##m = {0}, b##m = {0};
#define PUT(m)                            \
    put(d, row + m, block * COLS, a##m);  \
    put(d, row + m, block * COLS + VL, b##m);

#ifdef __AVX512BF16__
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
#else
#define TILE_BF16(R)
#endif

#define STEP(m)                              \
    {                                        \
        vf v = splat(x[m * ldx + p]);        \
        a##m = madd(v, w0, a##m);           \
        b##m = madd(v, w1, b##m);           \
    }
#define TILE_WIDE(R, NAME, DTYPE)                                               \
    static void tile_##NAME##_##R(const Dense *d, int64_t row, int64_t block) { \
        const int64_t k = d->k, ldx = d->ldx;                                   \
        const float *x = (const float *)d->x + row * ldx;                       \
        const char *w = (const char *)d->w + block * COLS * k * size_of(DTYPE); \
        ROWS_##R(DECLARE)                                                       \
        for (int64_t p = 0; p < k; p++) {                                       \
            vf w0 = load(w, p * COLS, DTYPE), w1 = load(w, p * COLS + VL, DTYPE); \
            ask_ahead(w + p * COLS * size_of(DTYPE), COLS * size_of(DTYPE));    \
            ROWS_##R(STEP)                                                      \
        }                                                                       \
        ROWS_##R(PUT)                                                           \
    }

#define TILES(R) TILE_BF16(R) TILE_WIDE(R, wide32, F32) TILE_WIDE(R, wideb, BF16) \
    TILE_WIDE(R, wideh, F16)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if MAX_ROWS > 6
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
#define REST(T) , T##_7, T##_8, T##_9, T##_10, T##_11, T##_12
#else
#define REST(T)
#endif

typedef void (*Tile)(const Dense *, int64_t, int64_t);
#define TABLE(T) static const Tile T[MAX_ROWS] = {T##_1, T##_2, T##_3, \
                                                          T##_4, T##_5, T##_6 REST(T)};
#ifdef __AVX512BF16__
TABLE(tile_bf16)
#endif
TABLE(tile_wide32) TABLE(tile_wideb) TABLE(tile_wideh)

/* 1: this was compiled for a machine on which it is faster than the tensor library. */
API int vectors_possible(void) {
#if (defined(__AVX2__) && defined(__FMA__)) || defined(__ARM_NEON)
    return 1;
#else
    return 0;
#endif
}

/* Output columns of a block. */
API int dense_columns(void) { return COLS; }

/* 1: the 16-bit layout in pairs is used on this machine; 0: [N/COLS][K][COLS] for every dtype. */
API int dense_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

typedef struct {
    Dense d;
    const Tile *tiles;
    int64_t rows, height, blocks, chunk;
} Job;

static void work(void *job, int64_t chunk) {
    const Job *j = job;
    const int64_t last = min64(j->blocks, (chunk + 1) * j->chunk);
    for (int64_t block = chunk * j->chunk; block < last; block++)
        for (int64_t row = 0; row < j->rows; row += j->height)
            j->tiles[min64(j->height, j->rows - row) - 1](&j->d, row, block);
}

/* y[rows, n] = x[rows, k] @ w.T + bias. `pairs`: w is in the AVX512-BF16 layout and x is bf16. */
API void dense(const void *x, const void *w, const void *bias, void *y, int64_t rows, int64_t k,
               int64_t n, int64_t ldx, int x_dtype, int w_dtype, int b_dtype, int y_dtype,
               int pairs, int threads) {
    if (rows <= 0) return;
    const int64_t blocks = (n + COLS - 1) / COLS, parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    Job j = {{x, w, bias, y, k, n, ldx, n, w_dtype, b_dtype, y_dtype},
             w_dtype == F32 ? tile_wide32 : w_dtype == BF16 ? tile_wideb : tile_wideh,
             rows, (rows + parts - 1) / parts, blocks, share(blocks, threads)};
    float *copy = NULL;
#ifdef __AVX512BF16__
    if (pairs) j.tiles = tile_bf16;
#endif
    if (!pairs && x_dtype != F32) {
        copy = malloc((size_t)(rows * k) * sizeof(float));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < k; i += VL)
                store_part(copy, r * k + i, min64(VL, k - i),
                           load_part(x, r * ldx + i, min64(VL, k - i), x_dtype), F32);
        j.d.x = copy;
        j.d.ldx = k;
    }
    pool_run(work, &j, (blocks + j.chunk - 1) / j.chunk, threads);
    free(copy);
}
