/* Products of few rows with weights that lie in panels.

   A panel holds PANEL columns of a weight, number by number of the input: it is read end to end. A
   row's result does not depend on the rows beside it: each number is one sum, in the order of the
   inputs. */

#ifndef KEEL_PRODUCT_H
#define KEEL_PRODUCT_H

#include "tile.h"

/* What becomes of x W^T + b. */
enum end {
    PLAIN, /* written */
    ADDED, /* added to what is there */
    GATED  /* SiLU of a panel's first half times its second half, written */
};

struct weight {
    const stored *panels; /* (outputs / PANEL, inputs / UNIT, PANEL, UNIT), filled up with zeros */
    const float *bias;    /* outputs, filled up; or null */
    int64_t inputs, outputs;
};

/* What the rows of x stand multiplied with, for `product`. */
static void scales(const float *x, long rows, long inputs, float epsilon, float *scale) {
    for (long r = 0; r < rows; r++) {
        scale[r] = 1.0f;
        if (epsilon >= 0)
            scale[r] = 1.0f / sqrtf(squares(x + r * inputs, inputs) / inputs + epsilon);
    }
}

/* The sums of a panel, of which `left` are wanted at most, to what becomes of them. */
static void finish(const float *sum, float scale, const float *bias, enum end end, long left,
                   float *out) {
    vec y[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        y[v] = load(sum + v * WIDE) * scale;
        if (bias) y[v] += load(bias + v * WIDE);
    }
    int vectors = end == GATED ? VECTORS / 2 : VECTORS;
    if (end == GATED)
        for (int v = 0; v < vectors; v++)
            y[v] = y[v] / (1.0f + exponential(-y[v])) * y[vectors + v];
    if (left >= vectors * WIDE)
        for (int v = 0; v < vectors; v++)
            store(out + v * WIDE, end == ADDED ? load(out + v * WIDE) + y[v] : y[v]);
    else
        for (long i = 0; i < left; i++)
            out[i] = end == ADDED ? out[i] + y[i / WIDE][i % WIDE] : y[i / WIDE][i % WIDE];
}

/* x (rows, inputs) as products take it. */
static const stored *taken(const float *x, long rows, long inputs, stored *room) {
#if defined(KEEL_BF16)
    long filled = FILLED(inputs);
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *from = x + r * inputs;
        stored *to = room + r * filled;
        long i = 0;
        for (; i + WIDE <= inputs; i += WIDE) put(to + i, load(from + i));
        for (; i < filled; i++) to[i] = i < inputs ? rounded(from[i]) : 0;
    }
    return room;
#else
    return x;
#endif
}

/* out (rows, w's outputs; half of them if GATED) from x (rows, w's inputs); with an epsilon of 0 or
   more, x stands for x / sqrt(mean x^2 + epsilon). `room`: of x as `taken`. By all threads of the
   region together. */
static void product(const struct weight *w, const float *x, long rows, float epsilon, enum end end,
                    stored *room, float *out) {
    long width = end == GATED ? w->outputs / 2 : w->outputs;
    long step = end == GATED ? PANEL / 2 : PANEL;
    long panels = (width + step - 1) / step, tiles = (rows + ROWS - 1) / ROWS;
    /* Tiles of one size, or one less. */
    long each = tiles ? rows / tiles : 0, more = tiles ? rows % tiles : 0;
    long inputs = w->inputs, filled = FILLED(inputs);
    const stored *numbers = taken(x, rows, inputs, room);
    float scale[rows + 1]; /* by each thread for itself: cheaper than to wait for another */
    scales(x, rows, inputs, epsilon, scale);
#pragma omp for schedule(static)
    for (long item = 0; item < panels * tiles; item++) {
        long panel = item / tiles, t = item % tiles;
        long first = t * each + (t < more ? t : more), count = each + (t < more);
        struct left a = {numbers + first * filled, filled, UNIT};
        struct panel b = {w->panels + panel * filled * PANEL, UNIT * PANEL};
        float sum[ROWS][PANEL];
        tile(count, a, b, filled / UNIT, sum[0], PANEL, 0);
        for (long r = 0; r < count; r++)
            finish(sum[r], scale[first + r], w->bias ? w->bias + panel * PANEL : 0, end,
                   width - panel * step, out + (first + r) * width + panel * step);
    }
}

#endif
