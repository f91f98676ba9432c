/* Tiles of dense.c for bfloat16 in pairs: AMX, up to 16 or 32 rows times one block of columns.
 *
 * A tile is 16 rows of 64 bytes. Pairs of input features are what the instruction wants of the second
 * factor, so that 16 pairs of a block, every other line of it, are the weights of 16 columns as they
 * lie. An output is one accumulator; per 32 features it gets the sum of the even ones' products plus
 * the sum of the odd ones' (TDPBF16PS in Intel's manual, volume 2). That is another order than
 * AVX512-BF16's, so a process uses one of both for all numbers of rows.
 *
 * Tiles belong to a thread and are only defined between `amx_begin` and `amx_end`: others in the
 * process set them up for themselves, and a thread without tiles is switched without their 8 KB.
 */
#ifndef PACELINE_DENSE_AMX_H
#define PACELINE_DENSE_AMX_H

#include "dense_put.h"

#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__) && defined(__x86_64__)
#define AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#define AMX_ROWS 16     /* of a tile */
#define AMX_FEATURES 32 /* of a step: 16 pairs */

/* Whether the system lets this process use tiles; asking twice does no harm. */
static int amx_granted(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a tile's row */
    uint8_t rows[16];   /* of a tile */
} TileShapes;

/* Tiles 0 to 3: sums; 4 and 5: activations; 6 and 7: weights. */
static void amx_begin(int64_t height) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = i < 6 ? (uint8_t)height : AMX_ROWS;
    }
    _tile_loadconfig(&shapes);
}

static void amx_end(void) { _tile_release(); }

/* One step: W is [16][COLS][2], X and X2 rows of 32 features, `ldx` bytes apart. */
#define AMX_STEP(TWO, W, X, X2, LDX)                                \
    {                                                               \
        _tile_loadd(6, W, COLS * 4);                                \
        _tile_loadd(7, (const char *)(W) + 64, COLS * 4);           \
        _tile_loadd(4, X, LDX);                                     \
        _tile_dpbf16ps(0, 4, 6);                                    \
        _tile_dpbf16ps(1, 4, 7);                                    \
        if (TWO) {                                                  \
            _tile_loadd(5, X2, LDX);                                \
            _tile_dpbf16ps(2, 5, 6);                                \
            _tile_dpbf16ps(3, 5, 7);                                \
        }                                                           \
    }

/* The last features, fewer than 32: `lines` of them copied, with zeros behind, which add nothing. */
static __attribute__((noinline)) void amx_pad(uint16_t *to, int64_t width, const uint16_t *from,
                                              int64_t apart, int64_t lines, int64_t few) {
    memset(to, 0, (size_t)(lines * width) * 2);
    for (int64_t i = 0; i < lines; i++) memcpy(to + i * width, from + i * apart, (size_t)few * 2);
}

/* `height` rows from `row` on, and as many from `other` on if TWO, times a block. Only the first rows
 * find its weights far away. */
#define AMX_TILE(NAME, TWO)                                                                       \
    static void NAME(const Dense *d, int64_t row, int64_t other, int64_t height, int64_t block) { \
        const int64_t k = d->k, whole = k / AMX_FEATURES * AMX_FEATURES, ldx = d->ldx;            \
        const uint16_t *x = (const uint16_t *)d->x + row * ldx;                                   \
        const uint16_t *x2 = (const uint16_t *)d->x + other * ldx;                                \
        const uint16_t *w = (const uint16_t *)d->w + block * COLS * k;                            \
        float sums[2][AMX_ROWS][COLS] __attribute__((aligned(64)));                               \
        _tile_zero(0);                                                                            \
        _tile_zero(1);                                                                            \
        if (TWO) {                                                                                \
            _tile_zero(2);                                                                        \
            _tile_zero(3);                                                                        \
        }                                                                                         \
        for (int64_t i = 0; i < whole; i += AMX_FEATURES) {                                       \
            if (row == 0) ask_ahead(w + i * COLS, AMX_FEATURES * COLS * 2);                       \
            AMX_STEP(TWO, w + i * COLS, x + i, x2 + i, ldx * 2)                                   \
        }                                                                                         \
        if (whole < k) {                                                                          \
            const int64_t few = k - whole;                                                        \
            uint16_t wide[AMX_FEATURES * COLS], a[AMX_ROWS * AMX_FEATURES];                       \
            uint16_t b[AMX_ROWS * AMX_FEATURES];                                                  \
            amx_pad(wide, AMX_FEATURES * COLS, w + whole * COLS, 0, 1, few * COLS);               \
            amx_pad(a, AMX_FEATURES, x + whole, ldx, height, few);                                \
            if (TWO) amx_pad(b, AMX_FEATURES, x2 + whole, ldx, height, few);                      \
            AMX_STEP(TWO, wide, a, b, AMX_FEATURES * 2)                                           \
        }                                                                                         \
        _tile_stored(0, sums[0][0], COLS * 4);                                                    \
        _tile_stored(1, sums[0][0] + VL, COLS * 4);                                               \
        if (TWO) {                                                                                \
            _tile_stored(2, sums[1][0], COLS * 4);                                                \
            _tile_stored(3, sums[1][0] + VL, COLS * 4);                                           \
        }                                                                                         \
        for (int64_t n = 0; n < (TWO ? 2 : 1); n++)                                               \
            for (int64_t r = 0; r < height; r++)                                                  \
                for (int64_t c = 0; c < COLS; c += VL)                                            \
                    put(d, (n ? other : row) + r, block * COLS + c, load(sums[n][r], c, F32));    \
    }
AMX_TILE(amx_one, 0)
AMX_TILE(amx_two, 1)

/* All rows times one block. Tiles are equally high, so the last may repeat rows of the one before:
 * their bits are the same. */
static void amx_block(const Dense *d, int64_t rows, int64_t height, int64_t block) {
    const int64_t last = rows - height;
    int64_t row = 0;
    for (; row + height < rows; row += 2 * height)
        amx_two(d, row, min64(row + height, last), height, block);
    if (row < rows) amx_one(d, min64(row, last), 0, height, block);
}
#else
#define AMX 0
static int amx_granted(void) { return 0; }
#endif
#endif
