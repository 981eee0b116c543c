/* Pieces that lie end to end: which tokens of them see which, and products over spans of them. */

#ifndef KEEL_PIECES_H
#define KEEL_PIECES_H

#include "tile.h"

struct pieces {
    const int64_t *start, *length;
    const int64_t *follows;              /* a piece each, or -1 */
    const int64_t *follower, *followers; /* of piece p: follower[followers[p]] and on */
    int64_t tokens;
};

struct work {
    int64_t heads, shared, width, window, threads, room; /* window: 0 for all */
    float scaling;
    struct pieces pieces;
    int64_t items;
    const int64_t *piece, *first, *count; /* of each item: tokens of one piece; or a family's root */
    const float *query, *key, *value;
    int64_t query_step, key_step, value_step; /* from token to token */
    float *out, *norm;                        /* (tokens, heads, width), (tokens, heads) */
    const float *grad;                        /* dO, like out */
    float *delta;                             /* D, like norm */
    float *d_query, *d_key, *d_value;         /* (tokens, heads or shared heads, width) */
    float *rooms;                             /* `room` numbers for each thread */
};

static long lesser(long a, long b) { return a < b ? a : b; }
static long greater(long a, long b) { return a > b ? a : b; }
static long padded(long count) { return (count + PANEL - 1) / PANEL * PANEL; }

/* Tokens of one piece that are keys, or queries: `place` is that of the first in its sequence. */
struct span {
    long token, place, count;
};

/* The keys `first` to `first` + PANEL of a span as a panel: (width, PANEL); those behind its end are
   the last again. */
static void across(const float *x, long step, long width, long first, long count, float *panel) {
    for (long j = 0; j < PANEL; j += WIDE)
        for (long d = 0; d < width; d += WIDE) {
            vec block[WIDE];
            for (long i = 0; i < WIDE; i++)
                block[i] = load(x + lesser(first + j + i, count - 1) * step + d);
            transposed(block);
            for (long i = 0; i < WIDE; i++) store(panel + (d + i) * PANEL + j, block[i]);
        }
}

/* The keys of a span that a query at `place` sees: from `*low` to what is returned. */
static long seen(const struct work *w, long place, struct span keys, long *low) {
    long from = w->window ? place + 1 - w->window - keys.place : 0;
    *low = greater(0, lesser(from, keys.count));
    return greater(*low, lesser(keys.count, place + 1 - keys.place));
}

/* Whether what a query at `place` sees begins behind all of these keys. */
static int behind(const struct work *w, long place, struct span keys) {
    return w->window && keys.place + keys.count <= place + 1 - w->window;
}

static struct span part(const struct pieces *p, long piece, long first, long count) {
    long before = p->follows[piece] < 0 ? 0 : p->length[p->follows[piece]];
    return (struct span){p->start[piece] + first, before + first, count};
}

/* What the queries of a piece see, up to its own token `last`: the prompt's tokens, if it follows
   one, and its own. */
static int spans(const struct work *w, long piece, long last, struct span found[2]) {
    const struct pieces *p = &w->pieces;
    long before = p->follows[piece];
    int count = 0;
    if (before >= 0) found[count++] = part(p, before, 0, p->length[before]);
    found[count++] = part(p, piece, 0, last + 1);
    return count;
}

static struct left rows_of(const float *x, long step) { return (struct left){x, step, 1}; }

static void zeroed(float *x, long step, long rows, long count) {
    for (long r = 0; r < rows; r++) memset(x + r * step, 0, count * sizeof *x);
}

/* out += a b, `width` columns. */
static void onto(long rows, struct left a, const float *b, long step, long width, long inner,
                 float *out, long stride) {
    for (long d = 0; d < width; d += PANEL)
        tile(rows, a, (struct panel){b + d, step}, inner, out + d, stride, 1);
}

/* Columns `from` to `to` of out = a b^T, b given across; both multiples of PANEL. */
static void against(long rows, struct left a, const float *across, long width, long from, long to,
                    float *out, long stride) {
    for (long j = from; j < to; j += PANEL)
        tile(rows, a, (struct panel){across + j * width, PANEL}, width, out + j, stride, 0);
}

static void all_across(const float *x, long step, long width, long count, float *out) {
    for (long j = 0; j < count; j += PANEL) across(x, step, width, j, count, out + j * width);
}

#endif
