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

/* Rows of keys or values, `step` from one to the next; those from `before` on lie `skip` rows further,
   as a piece's own do behind a prompt's. */
struct lot {
    const float *x;
    long step, before, skip;
};

static const float *row_of(struct lot lot, long i) {
    return lot.x + (i < lot.before ? i : i + lot.skip) * lot.step;
}

/* The rows `first` to `first` + PANEL as a panel: (width, PANEL); those from `end` on are the last
   before it again. */
static void across(struct lot lot, long width, long first, long end, float *panel) {
    for (long j = 0; j < PANEL; j += WIDE) {
        const float *row[WIDE];
        for (long i = 0; i < WIDE; i++) row[i] = row_of(lot, lesser(first + j + i, end - 1));
        for (long d = 0; d < width; d += WIDE) {
            vec block[WIDE];
            for (long i = 0; i < WIDE; i++) block[i] = load(row[i] + d);
            transposed(block);
            for (long i = 0; i < WIDE; i++) store(panel + (d + i) * PANEL + j, block[i]);
        }
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

static struct left rows_of(const float *x, long step) { return (struct left){x, step, 1}; }

/* out = a b, `width` columns, or `add`ed to what is there. */
static void onto(long rows, struct left a, const float *b, long step, long width, long inner,
                 float *out, long stride, int add) {
    for (long d = 0; d < width; d += PANEL)
        tile(rows, a, (struct panel){b + d, step}, inner, out + d, stride, add);
}

/* Columns `from` to `to` of out = a b^T, b given across; both multiples of PANEL. */
static void against(long rows, struct left a, const float *across, long width, long from, long to,
                    float *out, long stride) {
    for (long j = from; j < to; j += PANEL)
        tile(rows, a, (struct panel){across + j * width, PANEL}, width, out + j, stride, 0);
}

static void all_across(struct lot lot, long width, long first, long end, float *out) {
    for (long j = first; j < end; j += PANEL, out += PANEL * width) across(lot, width, j, end, out);
}

#endif
