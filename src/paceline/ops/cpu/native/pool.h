#ifndef PACELINE_POOL_H
#define PACELINE_POOL_H

#include <stdint.h>

typedef void (*Work)(void *job, int64_t chunk);

/* Run work(job, 0) ... work(job, chunks - 1) on the calling thread and at most threads - 1 others. */
void pool_run(Work work, void *job, int64_t chunks, int threads);

typedef void (*Walk)(void *job, int64_t first, int64_t last);

/* Run walk(job, first, last) for all of `blocks`, `step` at a time. Each thread has a range of its own,
 * which it goes through from the front, so that it reads memory in one direction and can ask for what
 * comes next; who is done helps with the other ranges, so that a slow thread takes fewer. */
void pool_walk(Walk walk, void *job, int64_t blocks, int64_t step, int threads);

/* How many of `items` make a chunk: some chunks per thread, so that a slow thread takes fewer. */
static inline int64_t share(int64_t items, int threads) {
    const int64_t per = threads > 1 ? items / (threads * 6) : items;
    return per > 0 ? per : 1;
}

#endif
