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
#include "vec.h"

#define KEYS 64    /* a tile */
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
} Job;

/* ---- scores --------------------------------------------------------------------------------- */

/* VL partial sums of one query head times one key. `pairs`: both bf16, multiplied as they are. */
INLINE vf dot(const void *q, int64_t q_at, const void *k, int64_t slot, int64_t width,
              const int q_dtype, const int dtype, const int pairs) {
#ifdef __AVX512BF16__
    if (pairs) {
        const uint16_t *a = (const uint16_t *)q + q_at, *b = (const uint16_t *)k + slot * width;
        __m512 sum = _mm512_setzero_ps();
        int64_t i = 0;
        for (; i + 32 <= width; i += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + i),
                                   (__m512bh)_mm512_loadu_si512(b + i));
        if (i < width)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(0xffff, a + i),
                                   (__m512bh)_mm512_maskz_loadu_epi16(0xffff, b + i));
        return (vf)sum;
    }
#endif
    (void)pairs;
    vf sum = {0};
    for (int64_t i = 0; i < width; i += VL)
        sum = madd(load(q, q_at + i, q_dtype), load(k, slot * width + i, dtype), sum);
    return sum;
}

#ifdef __AVX512F__
/* Lane 4h + j of the result: the sum of v_j over the h-th four lanes; all by the same tree. */
INLINE __m512 fold4(vf v0, vf v1, vf v2, vf v3) {
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v0, (__m512)v1),
                             _mm512_unpackhi_ps((__m512)v0, (__m512)v1));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v2, (__m512)v3),
                             _mm512_unpackhi_ps((__m512)v2, (__m512)v3));
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

INLINE __m512 fold2(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
#endif

/* Scores of one query head against VL keys: lane j is key j's. */
INLINE vf scores_of(const void *q, int64_t q_at, const void *k, const int64_t *slots, int64_t width,
                   const int q_dtype, const int dtype, const int pairs) {
#define DOT(j) dot(q, q_at, k, slots[j], width, q_dtype, dtype, pairs)
#ifdef __AVX512F__
    __m512 a = fold4(DOT(0), DOT(1), DOT(2), DOT(3)), b = fold4(DOT(4), DOT(5), DOT(6), DOT(7));
    __m512 low = fold2(a, b);
    a = fold4(DOT(8), DOT(9), DOT(10), DOT(11));
    b = fold4(DOT(12), DOT(13), DOT(14), DOT(15));
    return (vf)fold2(low, fold2(a, b));
#else
    vf out;
    for (int j = 0; j < VL; j++) out[j] = lane_sum(DOT(j));
    return out;
#endif
}

/* ---- one tile ------------------------------------------------------------------------------- */

#if VL == 16
#define WIDE 4 /* vectors of values that are summed at a time: sums of 4 heads fit the registers */
/* 32 bf16 as their even elements, then their odd ones: half the instructions of keeping the order.
 * Outputs of whole 64s are in this order until they are stored. */
INLINE void load_halves(const void *base, int64_t i, vf *to) {
    vu both;
    memcpy(&both, (const uint16_t *)base + i, 64);
    to[0] = (vf)(both << 16);
    to[1] = (vf)(both & 0xffff0000u);
}

INLINE void store_halves(void *base, int64_t i, vf even, vf odd) {
    uint16_t a[VL], b[VL], *to = (uint16_t *)base + i;
    store(a, 0, even, BF16);
    store(b, 0, odd, BF16);
    for (int j = 0; j < VL; j++) {
        to[2 * j] = a[j];
        to[2 * j + 1] = b[j];
    }
}

#else
#define WIDE 2
INLINE void load_halves(const void *base, int64_t i, vf *to) { (void)base, (void)i, (void)to; }
INLINE void store_halves(void *base, int64_t i, vf a, vf b) { (void)base, (void)i, (void)a, (void)b; }
#endif

/* out[h] = out[h] * fix[h] + sum over keys of p[h] * v, for H heads and N vectors of features. */
#define VALUES(H, N)                                                                             \
    {                                                                                            \
        vf sum[H][N];                                                                            \
        for (int h = 0; h < H; h++)                                                              \
            for (int n = 0; n < N; n++)                                                          \
                sum[h][n] = *(vf *)(out + (head + h) * width + i + n * VL) * splat(fix[head + h]); \
        for (int64_t j = 0; j < keys; j++) {                                                     \
            vf part[N];                                                                          \
            if (pairs && VL == 16 && N == 4) {                                                   \
                load_halves(v, slots[j] * width + i, part);                                      \
                load_halves(v, slots[j] * width + i + 32, part + 2);                             \
            } else                                                                               \
                for (int n = 0; n < N; n++)                                                      \
                    part[n] = load(v, slots[j] * width + i + n * VL, dtype);                     \
            for (int h = 0; h < H; h++) {                                                        \
                vf weight = splat(p[(head + h) * KEYS + j]);                                     \
                for (int n = 0; n < N; n++) sum[h][n] = madd(weight, part[n], sum[h][n]);       \
            }                                                                                    \
        }                                                                                        \
        for (int h = 0; h < H; h++)                                                              \
            for (int n = 0; n < N; n++) *(vf *)(out + (head + h) * width + i + n * VL) = sum[h][n]; \
    }

/* Slots of the tile after this one. Pages are scattered and no hardware guesses them, so they are
 * asked for while this tile is computed, sixteen at a time: more at once would wait for each other. */
typedef struct {
    const int64_t *slots;
    int64_t count;
} Ahead;

INLINE void fetch(const Ahead *ahead, int64_t g, const void *base, int64_t bytes) {
    const int64_t last = min64(ahead->count, (g + 1) * VL);
    for (int64_t n = g * VL; n < last; n++)
        for (int64_t b = 0; b < bytes; b += 64)
            __builtin_prefetch((const char *)base + ahead->slots[n] * bytes + b, 0, 2);
}

/* State of a query: most[heads], total[heads], out[heads][width]. p: [heads][KEYS] of room. */
INLINE void tile(const void *q, int64_t q_at, const void *k, const void *v, const int64_t *slots,
                 int64_t keys, int64_t heads, int64_t width, float scale, float *most, float *total,
                 float *out, float *p, float *fix, const Ahead *ahead, const int q_dtype,
                 const int dtype, const int pairs) {
    const vf lowest = splat(-INFINITY);
    static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi lane;
    memcpy(&lane, order, sizeof lane);
    for (int64_t h = 0; h < heads; h++) {
        vf s[KEYS / VL], top = lowest;
        for (int64_t g = 0; g * VL < keys; g++) {
            if (h == 0) fetch(ahead, g, k, width * size_of(dtype));
            if (h == heads / 2) fetch(ahead, g, v, width * size_of(dtype));
            vf x = scores_of(q, q_at + h * width, k, slots + g * VL, width, q_dtype, dtype, pairs);
            vi real = lane < (vi){0} + (int32_t)(keys - g * VL);
            x = x * splat(scale);
            s[g] = (vf)(((vi)x & real) | ((vi)lowest & ~real));
            vi more = s[g] > top;
            top = (vf)(((vi)s[g] & more) | ((vi)top & ~more));
        }
        const float before = most[h], now = fmaxf(before, lane_max(top));
        vf sum = {0};
        for (int64_t g = 0; g * VL < keys; g++) {
            vf e = vexp(s[g] - splat(now));
            *(vf *)(p + h * KEYS + g * VL) = e;
            sum += e;
        }
        most[h] = now;
        fix[h] = vexp(splat(before - now))[0];
        total[h] = total[h] * fix[h] + lane_sum(sum);
    }
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) {
        int64_t i = 0;
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(4, WIDE)
        for (; i < width; i += VL) VALUES(4, 1)
    }
    const int64_t left = heads - head;
    int64_t i = 0;
    if (left == 3) {
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(3, WIDE)
        for (; i < width; i += VL) VALUES(3, 1)
    } else if (left == 2) {
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(2, WIDE)
        for (; i < width; i += VL) VALUES(2, 1)
    } else if (left == 1) {
        for (; i + WIDE * VL <= width; i += WIDE * VL) VALUES(1, WIDE)
        for (; i < width; i += VL) VALUES(1, 1)
    }
}

typedef void (*TileFn)(const void *, int64_t, const void *, const void *, const int64_t *, int64_t,
                       int64_t, int64_t, float, float *, float *, float *, float *, float *,
                       const Ahead *, int, int);
#define TILE(NAME, WIDTH, Q, K, PAIRS)                                                          \
    static void NAME(const void *q, int64_t q_at, const void *k, const void *v,                 \
                     const int64_t *slots, int64_t keys, int64_t heads, int64_t width,          \
                     float scale, float *most, float *total, float *out, float *p, float *fix,  \
                     const Ahead *ahead, int q_dtype, int dtype) {                              \
        tile(q, q_at, k, v, slots, keys, heads, WIDTH, scale, most, total, out, p, fix, ahead,  \
             Q, K, PAIRS);                                                                            \
        (void)width, (void)q_dtype, (void)dtype;                                                \
    }
TILE(tile_bf16_64, 64, BF16, BF16, 1)
TILE(tile_bf16_128, 128, BF16, BF16, 1)
TILE(tile_bf16, width, BF16, BF16, 1)
TILE(tile_f32, width, F32, F32, 0)
TILE(tile_f16, width, F16, F16, 0)
TILE(tile_mixed, width, q_dtype, dtype, 0)

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

static void work(void *job, int64_t item) {
    const Job *j = job;
    const Plan *p = j->p;
    const int64_t block = item / p->kv_heads, kv = item % p->kv_heads;
    const int64_t row = j->block_rows[block], first = j->block_at[block];
    const int64_t group = p->q_heads / p->kv_heads, width = p->width;
    const int64_t count = min64(QUERIES, p->cu_q[row + 1] - first);
    const int64_t prefix = p->prefix_lens[row], tail_len = p->tail_lens[row];
    const int64_t own = tail_len - (p->cu_q[row + 1] - p->cu_q[row]); /* of the row's first query */
    const int64_t skip = first - p->cu_q[row];
    const int64_t shared_len = p->mask ? prefix : prefix + tail_len; /* places same for everybody */
    const int64_t pool_bytes = kv * p->pool_head * size_of(p->pool_dtype);
    const char *k = (const char *)j->k + pool_bytes, *v = (const char *)j->v + pool_bytes;
    const TileFn tile_fn = tile_for(p);
    const int halves = VL == 16 && p->q_dtype == BF16 && p->pool_dtype == BF16;
    int64_t last[QUERIES], least[QUERIES], first_place = INT64_MAX, until = 0;
    int64_t tile_a[KEYS], tile_b[KEYS], mixed[KEYS + VL], *next = tile_a;
    /* One piece of memory: outputs and weights first, which need 64-byte places. */
    const int64_t state = group * width + 2 * group;
    const int64_t room = (QUERIES * state + group * KEYS + group) * 4 + 64;
    const int64_t lists = p->mask ? QUERIES * tail_len * 4 : 0;
    char *memory = malloc((size_t)(room + lists + 64));
    float *out = (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    float *weights = out + QUERIES * group * width;
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
        Ahead ahead = {next, max64(soon, 0)};
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
            tile_fn(j->q, ((first + i) * p->q_heads + kv * group) * width, k, v, mixed, keys, group,
                    width, j->scale, most + i * group, total + i * group, out + i * group * width,
                    weights, fix, &ahead, p->q_dtype, p->pool_dtype);
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
            if (halves)
                for (; d + 64 <= width; d += 64)
                    for (int n = 0; n < 64; n += 32)
                        store_halves(j->out, to + d + n, *(vf *)(from + d + n) * inverse,
                                     *(vf *)(from + d + n + VL) * inverse);
            for (; d < width; d += VL) store(j->out, to + d, *(vf *)(from + d) * inverse, p->q_dtype);
        }
    free(memory);
}

/* out[tokens, q_heads, width] of one layer; k and v are the layer's pool [kv_heads, slots, width]. */
API void attention(const Plan *p, const void *q, const void *k, const void *v, void *out,
                   float scale, int64_t window, int causal, int threads) {
    int64_t blocks = 0;
    int32_t *rows = malloc((size_t)(p->tokens + 1) * (sizeof(int32_t) + sizeof(int64_t)) + 8);
    int64_t *at = (int64_t *)rows;
    rows = (int32_t *)(at + p->tokens + 1);
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t t = p->cu_q[row]; t < p->cu_q[row + 1]; t += QUERIES) {
            rows[blocks] = (int32_t)row;
            at[blocks++] = t;
        }
    const int64_t live = p->cu_q[p->rows], size = p->q_heads * p->width * size_of(p->q_dtype);
    memset((char *)out + live * size, 0, (size_t)((p->tokens - live) * size));
    Job j = {p, q, k, v, out, rows, at, window, scale, causal};
    pool_run(work, &j, blocks * p->kv_heads, threads);
    free(at);
}
