/* Products with a dense matrix, for few or many rows; weights come from memory once for all of them.
 *
 * Layout: output columns in blocks of COLS (32 with AVX-512, else 16), zero-padded, as
 * [N/COLS][K][COLS]. bfloat16 for AVX512-BF16 has input features in pairs, [N/32][K/2][32][2] (K
 * even); elsewhere columns c and c + COLS/2 are side by side, [N/COLS][K][COLS/2][2]. Every output has
 * one accumulator, which runs over K in order, so its bits depend on its own row and column only, not
 * on the tile or the thread that computes it.
 */
#include "dense_amx.h"
#include "dense_pairs.h"
#include "kernels.h"
#include "pool.h"

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

/* 1: they are multiplied in tiles, if the caller wants it (`pairs` = 2). A process that was refused
 * tiles once should not ask for them later: bits would change. */
API int dense_tiles(void) { return amx_granted(); }

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
#if AMX
    if (j->pairs == 2) {
        amx_begin(j->height);
        for (; block < last; block++) amx_block(&j->d, j->rows, j->height, block);
        amx_end();
    }
#endif
#ifdef __AVX512BF16__
    for (; j->pairs && block < last; block++)
        for (int64_t row = 0; row < j->rows; row += j->height)
            tile_bf16[min64(j->height, j->rows - row) - 1](&j->d, row, block);
#endif
    for (; j->full < j->rows && block + 2 <= last; block += 2) walk(j, block, 2);
    for (; block < last; block++) walk(j, block, 1);
}

/* y[rows, n] = x[rows, k] @ w.T + bias. `pairs`: w is in pairs, x is bf16; 1: AVX512-BF16, 2: AMX. */
API void dense(const void *x, const void *w, const void *bias, void *y, int64_t rows, int64_t k,
               int64_t n, int64_t ldx, int x_dtype, int w_dtype, int b_dtype, int y_dtype,
               int pairs, int threads) {
    if (rows <= 0) return;
    const int64_t blocks = (n + COLS - 1) / COLS, most = pairs == 2 ? 16 : MAX_ROWS;
    const int64_t parts = (rows + most - 1) / most;
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

/* out[i, k] = row ids[i] of the weights, bit by bit: an embedding look-up. `pairs`: of the layout. */
API void dense_rows(const void *w, const int64_t *ids, void *out, int64_t count, int64_t k, int64_t n,
                    int dtype, int pairs) {
    const int64_t half = COLS / 2;
    for (int64_t i = 0; i < count; i++) {
        const int64_t block = ids[i] / COLS, column = ids[i] % COLS;
        if (ids[i] < 0 || ids[i] >= n) { /* the caller's fault: seen as NaN, never as another row */
            for (int64_t f = 0; f < k; f++) store1(out, i * k + f, NAN, dtype);
        } else if (dtype == F32) {
            const uint32_t *from = (const uint32_t *)w + block * COLS * k + column;
            for (int64_t f = 0; f < k; f++) ((uint32_t *)out)[i * k + f] = from[f * COLS];
        } else if (pairs) {
            const uint32_t *from = (const uint32_t *)w + block * COLS * (k / 2) + column;
            uint16_t *to = (uint16_t *)out + i * k;
            for (int64_t f = 0; f < k / 2; f++) memcpy(to + 2 * f, from + f * COLS, 4);
        } else {
            const int64_t at = dtype == BF16 ? column % half * 2 + column / half : column;
            const uint16_t *from = (const uint16_t *)w + block * COLS * k + at;
            for (int64_t f = 0; f < k; f++) ((uint16_t *)out)[i * k + f] = from[f * COLS];
        }
    }
}
