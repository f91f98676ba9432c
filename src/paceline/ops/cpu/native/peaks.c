/* Where the largest of many numbers lie, and the logarithm of the sum of their exponentials, in one
 * read: what a drafter wants to know of logits over a whole vocabulary. */
#include <math.h>

#include "kernels.h"
#include "pool.h"
#include "vec.h"

enum { BLOCK = 64, PART = 2048 }; /* numbers of one maximum; of one piece of work, which fits L1 */

typedef struct {
    const float *x;
    float *maxima, *sums;
    int64_t width, parts;
} Peaks;

static void peaks_work(void *job, int64_t chunk) {
    const Peaks *p = job;
    const int64_t row = chunk / p->parts, first = chunk % p->parts * PART;
    const int64_t count = min64(PART, p->width - first);
    const float *x = p->x + row * p->width + first;
    float *maxima = p->maxima + (row * p->width + first) / BLOCK;
    float top = -INFINITY;
    for (int64_t b = 0; b < count / BLOCK; b++) {
        vf best = load(x, b * BLOCK, F32);
        for (int64_t i = VL; i < BLOCK; i += VL) {
            const vf next = load(x, b * BLOCK + i, F32);
            const vi more = next > best;
            best = (vf)(((vi)next & more) | ((vi)best & ~more));
        }
        maxima[b] = lane_max(best);
        if (maxima[b] > top) top = maxima[b];
    }
    float *sum = p->sums + chunk;
    if (isinf(top)) { /* nothing but -inf, or an infinity that outweighs all */
        *sum = top;
        return;
    }
    vf total = splat(0.0f);
    for (int64_t i = 0; i < count; i += VL) total += vexp(load(x, i, F32) - splat(top));
    *sum = top + logf(lane_sum(total));
}

/* x[rows, width], width a multiple of 64: maxima[rows, width / 64] of blocks of 64, and for each part of
 * 2,048 the logarithm of its sum of exponentials, sums[rows, ceil(width / 2048)]. */
API void peaks(const float *x, float *maxima, float *sums, int64_t rows, int64_t width, int threads) {
    Peaks p = {x, maxima, sums, width, (width + PART - 1) / PART};
    pool_run(peaks_work, &p, rows * p.parts, threads);
}
