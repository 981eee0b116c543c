/* Causal attention over pieces that lie end to end, forward and backward, in single precision.

   A piece may follow another one, a prompt, whose keys its tokens see before their own. Queries and
   what is like them are (tokens, heads, width), keys and values (tokens, shared heads, width). With
   P = exp(S - l), l the logarithms of the softmax's denominators, D = rowsum(dO * O):

       dV = P^T dO,   dS = scaling P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q.

   Source: Dao, FlashAttention-2 (arXiv:2307.08691), sections 2.3 and 3.1. Gradients of queries and
   of keys are two passes, so that no two threads write to one place. */

#include "tile.h"

#if defined(_OPENMP)
extern int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* Keys, or queries, that are taken at a time in the backward passes; multiples of PANEL. */
#define KEYS 256
#define QUERIES 64

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
    const int64_t *piece, *first, *count; /* of each item: tokens of one piece */
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

/* What the queries of a piece see, up to its own token `last`: the prompt's tokens, if it follows
   one, and its own. */
static int spans(const struct work *w, long piece, long last, struct span found[2]) {
    const struct pieces *p = &w->pieces;
    long before = p->follows[piece];
    int count = 0;
    if (before >= 0) found[count++] = (struct span){p->start[before], 0, p->length[before]};
    long place = count ? found[0].count : 0;
    found[count++] = (struct span){p->start[piece], place, last + 1};
    return count;
}

static struct left rows_of(const float *x, long step) { return (struct left){x, step, 1}; }

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

/* ---- forward ---- */

/* -inf to what is not seen of a row of scores. */
static void hidden(float *score, long low, long high, long end) {
    for (long i = 0; i < low; i++) score[i] = -INFINITY;
    for (long i = high; i < end; i++) score[i] = -INFINITY;
}

/* A row of scores to weights, before they are divided by their sum, which is returned; `*norm` its
   logarithm with that of what they were scaled by. */
static float weighed(float *score, long count, float scaling, float *norm) {
    vec most = all(-INFINITY), sum = {};
    for (long i = 0; i < count; i += WIDE) most = choose(load(score + i) > most, load(score + i), most);
    float top = largest(most) * scaling;
    for (long i = 0; i < count; i += WIDE) {
        vec s = load(score + i);
        vec e = choose(s == all(-INFINITY), all(0.0f), exponential(s * scaling - top));
        store(score + i, e);
        sum += e;
    }
    float whole = total(sum);
    *norm = top + logf(whole);
    return whole;
}

/* What some queries see: spans of keys, these across and end to end, each from `offset` on. */
struct sight {
    struct span span[2];
    int spans;
    long offset[3];
    const float *keys;
};

/* A tile of queries of head h, the first at `token` and `place`. */
static void attend_tile(const struct work *w, const struct sight *s, long token, long place,
                        long rows, long h, float *score) {
    long width = w->width, step = w->heads * width, stride = s->offset[s->spans];
    long shared = h / (w->heads / w->shared);
    struct left query = rows_of(w->query + token * w->query_step + h * width, w->query_step);
    float *out = w->out + token * step + h * width, share[ROWS];
    long low, most = 0;
    for (int i = 0; i < s->spans; i++) {
        long high = seen(w, place + rows - 1, s->span[i], &low);
        most = s->offset[i] + padded(high);
        against(rows, query, s->keys, width, s->offset[i], most, score, stride);
        for (long r = 0; r < rows; r++) {
            high = seen(w, place + r, s->span[i], &low);
            hidden(score + r * stride + s->offset[i], low, high, most - s->offset[i]);
        }
    }
    for (long r = 0; r < rows; r++) {
        share[r] = 1 / weighed(score + r * stride, most, w->scaling,
                               w->norm + (token + r) * w->heads + h);
        memset(out + r * step, 0, width * sizeof *out);
    }
    for (int i = 0; i < s->spans; i++)
        onto(rows, rows_of(score + s->offset[i], stride),
             w->value + s->span[i].token * w->value_step + shared * width, w->value_step, width,
             seen(w, place + rows - 1, s->span[i], &low), out, step);
    for (long r = 0; r < rows; r++)
        for (long d = 0; d < width; d++) out[r * step + d] *= share[r];
}

static void attend(const struct work *w, long item, long shared, float *room) {
    long piece = w->piece[item], first = w->first[item], count = w->count[item];
    long width = w->width, each = w->heads / w->shared;
    struct sight s = {.keys = room};
    s.spans = spans(w, piece, first + count - 1, s.span);
    for (int i = 0; i < s.spans; i++) {
        all_across(w->key + s.span[i].token * w->key_step + shared * width, w->key_step, width,
                   s.span[i].count, room + s.offset[i] * width);
        s.offset[i + 1] = s.offset[i] + padded(s.span[i].count);
    }
    long token = w->pieces.start[piece] + first, place = s.span[s.spans - 1].place + first;
    for (long h = shared * each; h < (shared + 1) * each; h++)
        for (long q = 0; q < count; q += ROWS)
            attend_tile(w, &s, token + q, place + q, lesser(ROWS, count - q), h,
                        room + s.offset[s.spans] * width);
}

/* ---- backward ---- */

static void deltas(const struct work *w) {
    long total_heads = w->pieces.tokens * w->heads;
#pragma omp for schedule(static)
    for (long i = 0; i < total_heads; i++) {
        float sum = 0;
        for (long d = 0; d < w->width; d += WIDE)
            sum += total(load(w->out + i * w->width + d) * load(w->grad + i * w->width + d));
        w->delta[i] = sum;
    }
}

/* Keys and values across, and what comes of them: weights and scores' gradients, (QUERIES, KEYS) at
   most, `stride` from query to query: not a power of two, so that rows lie beside each other in the
   processor's cache. */
struct block {
    float *keys, *values, *weight, *slope;
    long stride;
};

static struct block block_in(const struct work *w, float *room) {
    float *values = room + KEYS * w->width, *weight = values + KEYS * w->width;
    return (struct block){room, values, weight, weight + QUERIES * (KEYS + WIDE), KEYS + WIDE};
}

static void taken(const struct work *w, struct span keys, long shared, struct block b) {
    all_across(w->key + keys.token * w->key_step + shared * w->width, w->key_step, w->width,
               keys.count, b.keys);
    all_across(w->value + keys.token * w->value_step + shared * w->width, w->value_step, w->width,
               keys.count, b.values);
}

/* P and dS of a tile of queries of head h, in rows of `weight` and `slope`; 0 where nothing is seen. */
static void sloped_tile(const struct work *w, struct span asks, long h, struct span keys,
                        const struct block *b, float *weight, float *slope) {
    long step = w->heads * w->width, low, high, end = padded(keys.count);
    high = seen(w, asks.place + asks.count - 1, keys, &low);
    seen(w, asks.place, keys, &low);
    long from = low / PANEL * PANEL, to = padded(high);
    const float *query = w->query + asks.token * w->query_step + h * w->width;
    const float *grad = w->grad + asks.token * step + h * w->width;
    against(asks.count, rows_of(query, w->query_step), b->keys, w->width, from, to, weight, b->stride);
    against(asks.count, rows_of(grad, step), b->values, w->width, from, to, slope, b->stride);
    for (long q = 0; q < asks.count; q++, weight += b->stride, slope += b->stride) {
        long at = (asks.token + q) * w->heads + h;
        float norm = w->norm[at], delta = w->delta[at];
        high = seen(w, asks.place + q, keys, &low);
        hidden(weight, low, high, end);
        for (long i = 0; i < end; i += WIDE) {
            vec s = load(weight + i);
            ivec none = s == all(-INFINITY);
            vec p = choose(none, all(0.0f), exponential(s * w->scaling - norm));
            vec d = choose(none, all(0.0f), p * (load(slope + i) - delta) * w->scaling);
            store(weight + i, p);
            store(slope + i, d);
        }
    }
}

static void sloped(const struct work *w, struct span asks, long h, struct span keys,
                   const struct block *b) {
    for (long q = 0; q < asks.count; q += ROWS) {
        struct span some = {asks.token + q, asks.place + q, lesser(ROWS, asks.count - q)};
        sloped_tile(w, some, h, keys, b, b->weight + q * b->stride, b->slope + q * b->stride);
    }
}

/* dQ += dS K */
static void asked(const struct work *w, struct span asks, long h, struct span keys,
                  const struct block *b) {
    long width = w->width, step = w->heads * width, low;
    const float *key = w->key + keys.token * w->key_step + h / (w->heads / w->shared) * width;
    for (long q = 0; q < asks.count; q += ROWS) {
        long rows = lesser(ROWS, asks.count - q);
        onto(rows, rows_of(b->slope + q * b->stride, b->stride), key, w->key_step, width,
             seen(w, asks.place + q + rows - 1, keys, &low),
             w->d_query + (asks.token + q) * step + h * width, step);
    }
}

/* dV += P^T dO, dK += dS^T Q */
static void answered(const struct work *w, struct span asks, long h, struct span keys,
                     const struct block *b) {
    long width = w->width, step = w->heads * width, stride = w->shared * width;
    float *d_key = w->d_key + keys.token * stride + h / (w->heads / w->shared) * width;
    float *d_value = w->d_value + keys.token * stride + h / (w->heads / w->shared) * width;
    for (long k = 0; k < keys.count; k += ROWS) {
        /* The first query that sees the first of these keys. */
        long q = greater(0, keys.place + k - asks.place);
        if (q >= asks.count) return;
        long rows = lesser(ROWS, keys.count - k);
        struct left weight = {b->weight + q * b->stride + k, 1, b->stride};
        struct left slope = {b->slope + q * b->stride + k, 1, b->stride};
        const float *grad = w->grad + (asks.token + q) * step + h * width;
        const float *query = w->query + (asks.token + q) * w->query_step + h * width;
        onto(rows, weight, grad, step, width, asks.count - q, d_value + k * stride, stride);
        onto(rows, slope, query, w->query_step, width, asks.count - q, d_key + k * stride, stride);
    }
}

static void to_queries(const struct work *w, long item, long shared, float *room) {
    long piece = w->piece[item], first = w->first[item], count = w->count[item];
    long width = w->width, each = w->heads / w->shared, step = w->heads * width;
    struct block b = block_in(w, room);
    struct span found[2];
    int some = spans(w, piece, first + count - 1, found);
    struct span asks = {w->pieces.start[piece] + first, found[some - 1].place + first, count};
    for (long q = 0; q < count; q++)
        memset(w->d_query + (asks.token + q) * step + shared * each * width, 0,
               each * width * sizeof(float));
    for (int i = 0; i < some; i++)
        for (long k = 0; k < found[i].count; k += KEYS) {
            struct span keys = {found[i].token + k, found[i].place + k,
                                lesser(KEYS, found[i].count - k)};
            if (w->window && keys.place + keys.count <= asks.place + 1 - w->window) continue;
            taken(w, keys, shared, b);
            for (long h = shared * each; h < (shared + 1) * each; h++) {
                sloped(w, asks, h, keys, &b);
                asked(w, asks, h, keys, &b);
            }
        }
}

/* What some queries, of one piece, give to the keys taken. */
static void given(const struct work *w, struct span asks, struct span keys, long shared,
                  const struct block *b) {
    long each = w->heads / w->shared;
    for (long q = 0; q < asks.count; q += QUERIES) {
        struct span some = {asks.token + q, asks.place + q, lesser(QUERIES, asks.count - q)};
        if (w->window && keys.place + keys.count <= some.place + 1 - w->window) return;
        for (long h = shared * each; h < (shared + 1) * each; h++) {
            sloped(w, some, h, keys, b);
            answered(w, some, h, keys, b);
        }
    }
}

static void to_keys(const struct work *w, long item, long shared, float *room) {
    const struct pieces *p = &w->pieces;
    long piece = w->piece[item], first = w->first[item], count = w->count[item];
    long width = w->width, stride = w->shared * width;
    long place = p->follows[piece] < 0 ? 0 : p->length[p->follows[piece]];
    struct block b = block_in(w, room);
    struct span keys = {p->start[piece] + first, place + first, count};
    for (long k = 0; k < count; k++) {
        memset(w->d_key + (keys.token + k) * stride + shared * width, 0, width * sizeof(float));
        memset(w->d_value + (keys.token + k) * stride + shared * width, 0, width * sizeof(float));
    }
    taken(w, keys, shared, b);
    given(w, (struct span){keys.token, keys.place, p->length[piece] - first}, keys, shared, &b);
    for (long f = p->followers[piece]; f < p->followers[piece + 1]; f++) {
        long other = p->follower[f];
        given(w, (struct span){p->start[other], p->length[piece], p->length[other]}, keys, shared,
              &b);
    }
}

#define EACH_ITEM(what)                                                              \
    _Pragma("omp for schedule(dynamic, 1)")                                          \
    for (long i = 0; i < w->items * w->shared; i++)                                  \
        what(w, i / w->shared, i % w->shared, w->rooms + omp_get_thread_num() * w->room);

void keel_causal(const struct work *w) {
#pragma omp parallel num_threads(w->threads)
    EACH_ITEM(attend)
}

/* Items are queries. */
void keel_causal_queries(const struct work *w) {
#pragma omp parallel num_threads(w->threads)
    {
        deltas(w);
        EACH_ITEM(to_queries)
    }
}

/* Items are keys; behind the other. */
void keel_causal_keys(const struct work *w) {
#pragma omp parallel num_threads(w->threads)
    EACH_ITEM(to_keys)
}
