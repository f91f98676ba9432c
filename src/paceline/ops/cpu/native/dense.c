/* Products with a dense matrix, for few or many rows; weights come from memory once for all of them.
 *
 * Layout: output columns in blocks of COLS (32 with AVX-512, else 16), zero-padded, as
 * [N/COLS][K][COLS]. bfloat16 for AVX512-BF16 has input features in pairs, [N/32][K/2][32][2] (K
 * even); elsewhere columns c and c + COLS/2 are side by side, [N/COLS][K][COLS/2][2]. Every output has
 * one accumulator, which runs over K in order, so its bits depend on its own row and column only, not
 * on the tile or the thread that computes it.
 */
#include "dense_tiles.h"
#include "kernels.h"
#include "pool.h"

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

/* ---- bfloat16 in pairs ---------------------------------------------------------------------- */

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

/* 1: bfloat16 is laid out in pairs of input features, and multiplied by bfloat16 only. */
API int dense_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* Features that all rows are multiplied with before the next ones: tiles after the first find their
 * weights in the nearest cache. */
#define SPAN 1024

typedef struct {
    Dense d;
    int64_t rows, height;
    int64_t full; /* rows in tiles of one block; the others take two blocks together */
    int pairs;
} Job;

/* A span of one block or two. What is read next is asked for by each tile in part, so that memory is
 * busy while all of them compute. */
static void span(const Job *j, Span s, int64_t together) {
    const int64_t full = together == 2 ? j->full : j->rows, few = j->rows - full;
    const int64_t tiles = (full + j->height - 1) / j->height;
    const Wide *one = one_block(j->d.w_dtype);
    const Span first = s;
    for (int64_t block = 0; block < together; block++) {
        s.step = few ? first.step * 2 / 3 : first.step / tiles;
        s.ahead = first.ahead + block * s.w_apart;
        s.w = first.w + block * s.w_apart;
        for (int64_t row = 0; row < full; row += j->height) {
            s.x = first.x + row * s.ldx;
            s.sums = first.sums + block * s.sums_apart + row * COLS;
            one[min64(j->height, full - row) - 1](&s);
            s.ahead += s.features * s.step;
        }
    }
    if (few == 0) return;
    s = first;
    s.step = full ? first.step / 3 : first.step;
    s.ahead += (first.step - s.step) * s.features;
    s.x += full * s.ldx;
    s.sums += full * COLS;
    two_blocks(j->d.w_dtype)[few - 1](&s);
}

static void walk(const Job *j, int64_t block, int64_t together) {
    const Dense *d = &j->d;
    const int64_t bytes = COLS * size_of(d->w_dtype), rows = j->rows; /* bytes: of a feature */
    float room[16 * COLS] __attribute__((aligned(64)));
    float *sums = rows * together <= 16 ? room : malloc((size_t)(rows * COLS) * sizeof(float));
    memset(sums, 0, (size_t)(rows * together * COLS) * sizeof(float));
    const int64_t spans = (d->k + SPAN - 1) / SPAN, features = (d->k + spans - 1) / spans;
    for (int64_t at = 0; at < d->k; at += features) {
        Span s = {.x = (const float *)d->x + at, .w = (const char *)d->w + (block * d->k + at) * bytes,
                  .step = bytes, .sums = sums, .ldx = d->ldx, .features = min64(features, d->k - at),
                  .w_apart = d->k * bytes, .sums_apart = rows * COLS};
        s.ahead = s.w + s.features * bytes;
        if (at + features >= d->k) s.ahead += (together - 1) * s.w_apart; /* the next blocks */
        span(j, s, together);
    }
    for (int64_t b = 0; b < together; b++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t c = 0; c < COLS; c += VL)
                put(d, row, (block + b) * COLS + c, load(sums, (b * rows + row) * COLS + c, F32));
    if (sums != room) free(sums);
}

static void work(void *job, int64_t block, int64_t last) {
    const Job *j = job;
#ifdef __AVX512BF16__
    for (; j->pairs && block < last; block++)
        for (int64_t row = 0; row < j->rows; row += j->height)
            tile_bf16[min64(j->height, j->rows - row) - 1](&j->d, row, block);
#endif
    for (; j->full < j->rows && block + 2 <= last; block += 2) walk(j, block, 2);
    for (; block < last; block++) walk(j, block, 1);
}

/* y[rows, n] = x[rows, k] @ w.T + bias. `pairs`: w is in the AVX512-BF16 layout and x is bf16. */
API void dense(const void *x, const void *w, const void *bias, void *y, int64_t rows, int64_t k,
               int64_t n, int64_t ldx, int x_dtype, int w_dtype, int b_dtype, int y_dtype,
               int pairs, int threads) {
    if (rows <= 0) return;
    const int64_t blocks = (n + COLS - 1) / COLS, parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    Job j = {{x, w, bias, y, k, n, ldx, n, w_dtype, b_dtype, y_dtype},
             rows, (rows + parts - 1) / parts, rows, pairs};
    /* A sum waits for the one before it: a tile needs 8 to 12 of them to keep the machine busy. */
    if (!pairs && rows <= 2) j.full = 0;
    if (MAX_ROWS == 6 && (rows == 7 || rows == 8)) j.full = j.height = rows - 2;
    float *copy = NULL;
    if (!pairs && x_dtype != F32) {
        copy = malloc((size_t)(rows * k) * sizeof(float));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < k; i += VL)
                store_part(copy, r * k + i, min64(VL, k - i),
                           load_part(x, r * ldx + i, min64(VL, k - i), x_dtype), F32);
        j.d.x = copy;
        j.d.ldx = k;
    }
    pool_walk(work, &j, blocks, j.full < rows ? 2 : 1, threads);
    free(copy);
}
