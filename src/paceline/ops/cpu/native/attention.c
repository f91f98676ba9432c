/* Attention over a paged pool, for any mix of rows: decode, trees, chains, drafts and prefill.
 *
 * A query's keys are one list in path order: the places of its row's prefix, then the places of the
 * tail that its mask shows. The list is cut into tiles of 64 at absolute list indices; a tile updates
 * (max, sum, output) of each head in one fixed way. So a query's bits depend on its own list and on
 * nothing else: whether it came alone, in a tree, in a chain or in a prompt.
 *
 * Only listed keys are read; the pool's other memory may hold anything.
 */
#include "kernels.h"
#include "pool.h"
#include "tile.h"
#include "vec.h"

#define QUERIES 16 /* of one row, that walk the tiles together: a tile is in the nearest cache then */

typedef struct {
    const Plan *p;
    const void *q, *k, *v;
    void *out;
    const int32_t *block_rows; /* [blocks] */
    const int64_t *block_at;   /* [blocks] first query */
    int64_t window;            /* 0: none */
    float scale;
    int causal;
    int64_t queries;      /* of a block at most */
    int64_t items, chunk; /* an item is a block and a key head */
} Job;

typedef void (*TileFn)(const float *, const void *, const void *, const int64_t *, int64_t, int64_t,
                       int64_t, float, float *, float *, float *, float *, float *, const Ahead *, int);
#define TILE(NAME, WIDTH, DTYPE, BOTH_BF16)                                                     \
    static void NAME(const float *q, const void *k, const void *v, const int64_t *slots,        \
                     int64_t keys, int64_t heads, int64_t width, float scale, float *most,      \
                     float *total, float *out, float *p, float *fix, const Ahead *ahead,        \
                     int dtype) {                                                               \
        tile(q, k, v, slots, keys, heads, WIDTH, scale, most, total, out, p, fix, ahead, DTYPE, \
             BOTH_BF16);                                                                        \
        (void)width, (void)dtype;                                                               \
    }
TILE(tile_bf16_64, 64, BF16, 1)
TILE(tile_bf16_128, 128, BF16, 1)
TILE(tile_bf16, width, BF16, 1)
TILE(tile_f32, width, F32, 0)
TILE(tile_f16, width, F16, 0)
TILE(tile_mixed, width, dtype, 0)

static TileFn tile_for(const Plan *p) {
    if (p->q_dtype != p->pool_dtype) return tile_mixed;
    if (p->q_dtype == F32) return tile_f32;
    if (p->q_dtype == F16) return tile_f16;
    return p->width == 64 ? tile_bf16_64 : p->width == 128 ? tile_bf16_128 : tile_bf16;
}

/* ---- the walk ------------------------------------------------------------------------------- */

INLINE int64_t slot_of(const Plan *p, int64_t row, int64_t place) {
    const int64_t page = p->pages[row * p->pages_stride + place / p->page_size];
    return page * p->page_size + place % p->page_size;
}

/* Slots of `count` places from `start` on, run by run: one division a tile, none a key. */
INLINE void slots_of(const Plan *p, int64_t row, int64_t start, int64_t count, int64_t *to) {
    if (count <= 0) return;
    const int32_t *page = p->pages + row * p->pages_stride + start / p->page_size;
    int64_t within = start % p->page_size;
    for (int64_t n = 0; n < count; page++, within = 0) {
        const int64_t base = *page * p->page_size + within;
        const int64_t run = min64(p->page_size - within, count - n);
        for (int64_t i = 0; i < run; i++) to[n + i] = base + i;
        n += run;
    }
}

/* Places of the tail that query `t` of a masked pass sees, in order; returns how many.
 *
 * `first` is the tail index of the row's first query, `q0` its flat index: later tail keys have the
 * positions of their own queries, earlier ones their place. Keys that the window hides stay in the
 * list while all so far are hidden (*hidden counts them), so that a key's index in the list, and with
 * it its tile, is its depth: the same as when its ancestors are prefix. */
static int64_t visible(const Job *j, int64_t t, int64_t prefix, int64_t tail_len, int64_t first,
                       int64_t q0, int32_t *list, int64_t *hidden) {
    const Plan *p = j->p;
    const int64_t *positions = p->positions;
    int64_t count = 0;
    *hidden = 0;
    for (int64_t w = 0; w < p->words && w * 64 < tail_len; w++) {
        uint64_t bits = (uint64_t)p->mask[t * p->words + w];
        for (; bits; bits &= bits - 1) {
            const int64_t i = w * 64 + __builtin_ctzll(bits);
            if (i >= tail_len) break;
            const int own = i >= first;
            const int64_t position = own ? positions[q0 + i - first] : prefix + i;
            if (j->causal && own && position > positions[t]) continue;
            if (j->window > 0 && position <= positions[t] - j->window) {
                if (*hidden != count) continue;
                ++*hidden;
            }
            list[count++] = (int32_t)i;
        }
    }
    return count;
}

/* One block of queries and one key head; `more`: the same thread goes on with the next head. */
static void attend(const Job *j, int64_t item, int more) {
    const Plan *p = j->p;
    const int64_t block = item / p->kv_heads, kv = item % p->kv_heads;
    const int64_t row = j->block_rows[block], first = j->block_at[block];
    const int64_t group = p->q_heads / p->kv_heads, width = p->width;
    const int64_t count = min64(j->queries, p->cu_q[row + 1] - first);
    const int64_t prefix = p->prefix_lens[row], tail_len = p->tail_lens[row];
    const int64_t own = tail_len - (p->cu_q[row + 1] - p->cu_q[row]); /* of the row's first query */
    const int64_t skip = first - p->cu_q[row];
    const int64_t shared_len = p->mask ? prefix : prefix + tail_len; /* places same for everybody */
    const int64_t pool_bytes = kv * p->pool_head * size_of(p->pool_dtype);
    const char *k = (const char *)j->k + pool_bytes, *v = (const char *)j->v + pool_bytes;
    const TileFn tile_fn = tile_for(p);
    const int bf16 = p->q_dtype == BF16 && p->pool_dtype == BF16;
    int64_t last[QUERIES], least[QUERIES], first_place = INT64_MAX, until = 0;
    int64_t tile_a[KEYS], tile_b[KEYS], mixed[KEYS + VL], *next = tile_a;
    /* One piece of memory: outputs and weights first, which need 64-byte places. */
    const int64_t state = 2 * group * width + 2 * group;
    const int64_t room = (QUERIES * state + group * KEYS + group) * 4 + 64;
    const int64_t lists = p->mask ? QUERIES * tail_len * 4 : 0;
    char *memory = malloc((size_t)(room + lists + 64));
    float *out = (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    float *queries = out + QUERIES * group * width, *weights = queries + QUERIES * group * width;
    float *most = weights + group * KEYS, *total = most + QUERIES * group;
    float *fix = total + QUERIES * group;
    int32_t *list = (int32_t *)(fix + group);

    for (int64_t i = 0; i < count; i++) {
        const int64_t t = first + i;
        int64_t tail = own + skip + i + 1, hidden = 0;
        if (p->mask)
            tail = visible(j, t, prefix, tail_len, own, p->cu_q[row], list + i * tail_len, &hidden);
        last[i] = prefix + tail;
        least[i] = j->window > 0 ? max64(0, p->positions[t] - j->window + 1) : 0;
        if (p->mask && j->window > 0) least[i] = min64(least[i], prefix) + hidden;
        first_place = min64(first_place, least[i]);
        until = max64(until, last[i]);
        take_queries(j->q, (t * p->q_heads + kv * group) * width, group, width, p->q_dtype, bf16,
                     queries + i * group * width);
        for (int64_t h = 0; h < group; h++) {
            most[i * group + h] = -INFINITY;
            total[i * group + h] = 0;
        }
    }
    memset(out, 0, (size_t)(count * group * width) * 4);

    const int64_t begin = first_place / KEYS * KEYS;
    slots_of(p, row, begin, min64(KEYS, shared_len - begin), next);
    for (int64_t start = begin; start < until; start += KEYS) {
        int64_t *const shared = next;
        next = shared == tile_a ? tile_b : tile_a;
        const int64_t soon = min64(KEYS, shared_len - start - KEYS);
        slots_of(p, row, start + KEYS, soon, next);
        Ahead ahead = {next, max64(soon, 0), 0};
        if (more && start + KEYS >= until) {
            ahead.count = max64(min64(KEYS, shared_len - begin), 0);
            ahead.offset = p->pool_head * size_of(p->pool_dtype);
            slots_of(p, row, begin, ahead.count, next);
        }
        for (int64_t i = 0; i < count; i++) {
            const int64_t a = max64(least[i], start), b = min64(last[i], start + KEYS);
            if (a >= b) continue;
            const int64_t keys = b - a, padded = (keys + VL - 1) / VL * VL;
            for (int64_t n = 0; n < keys; n++) {
                const int64_t at = a + n;
                mixed[n] = at < shared_len ? shared[at - start]
                                           : slot_of(p, row, prefix + list[i * tail_len + at - prefix]);
            }
            for (int64_t n = keys; n < padded; n++) mixed[n] = mixed[keys - 1];
            tile_fn(queries + i * group * width, k, v, mixed, keys, group, width, j->scale,
                    most + i * group, total + i * group, out + i * group * width, weights, fix,
                    &ahead, p->pool_dtype);
            ahead.count = 0;
        }
    }

    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < group; h++) {
            const float sum = total[i * group + h];
            const vf inverse = splat(sum == 0 ? 0 : 1.0f / sum);
            const int64_t to = ((first + i) * p->q_heads + kv * group + h) * width;
            const float *from = out + (i * group + h) * width;
            int64_t d = 0;
            for (; bf16 && d + WIDE * VL <= width; d += WIDE * VL)
                for (int n = 0; n < WIDE * VL; n += 2 * VL)
                    store_halves(j->out, to + d + n, *(vf *)(from + d + n) * inverse,
                                 *(vf *)(from + d + n + VL) * inverse);
            for (; d < width; d += VL) store(j->out, to + d, *(vf *)(from + d) * inverse, p->q_dtype);
        }
    free(memory);
}

static void work(void *job, int64_t chunk) {
    const Job *j = job;
    const int64_t heads = j->p->kv_heads, last = min64(j->items, (chunk + 1) * j->chunk);
    for (int64_t item = chunk * j->chunk; item < last; item++)
        attend(j, item, item + 1 < last && (item + 1) % heads != 0);
}

/* out[tokens, q_heads, width] of one layer; k and v are the layer's pool [kv_heads, slots, width]. */
API void attention(const Plan *p, const void *q, const void *k, const void *v, void *out,
                   float scale, int64_t window, int causal, int threads) {
    /* Few and short rows: blocks so small that every thread gets some. */
    int64_t queries = QUERIES, blocks = 0;
    while (queries > 2 && (p->tokens + queries - 1) / queries * p->kv_heads < 2 * threads) queries /= 2;
    int32_t *rows = malloc((size_t)(p->tokens + 1) * (sizeof(int32_t) + sizeof(int64_t)) + 8);
    int64_t *at = (int64_t *)rows;
    rows = (int32_t *)(at + p->tokens + 1);
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t t = p->cu_q[row]; t < p->cu_q[row + 1]; t += queries) {
            rows[blocks] = (int32_t)row;
            at[blocks++] = t;
        }
    const int64_t live = p->cu_q[p->rows], size = p->q_heads * p->width * size_of(p->q_dtype);
    memset((char *)out + live * size, 0, (size_t)((p->tokens - live) * size));
    /* All heads of a block to one thread, where there are blocks enough. */
    const int64_t items = blocks * p->kv_heads, chunk = blocks >= 2 * threads ? p->kv_heads : 1;
    Job j = {p, q, k, v, out, rows, at, window, scale, causal, queries, items, chunk};
    pool_run(work, &j, (items + chunk - 1) / chunk, threads);
    free(at);
}
