/* A tile of a product: some rows times a panel of columns, its sums in registers. */

#ifndef KEEL_TILE_H
#define KEEL_TILE_H

#include "stored.h"

#define PANEL 32
#define VECTORS (PANEL / WIDE)

/* Rows of a tile, at most. */
#if WIDE == 16
#define ROWS 12
#else
#define ROWS 3
#endif

/* Numbers of which row r, inner k is at x[r * down + k * along]. Inner ones count by UNIT, here and in
   a panel: UNIT of them lie beside each other. */
struct left {
    const stored *x;
    long down, along;
};

/* PANEL columns side by side, inner k at x[k * next]. */
struct panel {
    const stored *x;
    long next;
};

INLINE void tile_as(int rows, struct left a, struct panel b, long inner, float *out, long stride,
                    int add) {
    vec sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = add ? load(out + r * stride + v * WIDE) : (vec){};
    for (long k = 0; k < inner; k++) {
        several right[VECTORS];
        for (int v = 0; v < VECTORS; v++) right[v] = get(b.x + k * b.next + v * UNIT * WIDE);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            several one = repeated(a.x + r * a.down + k * a.along);
            for (int v = 0; v < VECTORS; v++) sum[r][v] = multiplied(sum[r][v], one, right[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) store(out + r * stride + v * WIDE, sum[r][v]);
}

/* out (rows, PANEL), `stride` from row to row, = a b, or `add`ed to what is there. Each number is one
   sum, in the order of the inner numbers: it does not depend on the rows beside it. */
static void tile(long rows, struct left a, struct panel b, long inner, float *out, long stride,
                 int add) {
    switch (rows) {
#define CASE(n)                                                  \
    case n:                                                      \
        if (add) tile_as(n, a, b, inner, out, stride, 1);        \
        else tile_as(n, a, b, inner, out, stride, 0);            \
        break;
        CASE(1) CASE(2) CASE(3)
#if ROWS > 3
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* Any number of rows, in tiles. */
INLINE void tiles(long rows, struct left a, struct panel b, long inner, float *out, long stride,
                  int add) {
    for (long r = 0; r < rows; r += ROWS, a.x += ROWS * a.down, out += ROWS * stride)
        tile(rows - r < ROWS ? rows - r : ROWS, a, b, inner, out, stride, add);
}

#endif
