/* Causal attention over pieces that lie end to end, forward and backward, in single precision.

   A piece may follow another one, a prompt, whose keys its tokens see before their own. Queries and
   what is like them are (tokens, heads, width), keys and values (tokens, shared heads, width). With
   P = exp(S - l), l the logarithms of the softmax's denominators, D = rowsum(dO * O):

       dV = P^T dO,   dS = scaling P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q.

   Source: Dao, FlashAttention-2 (arXiv:2307.08691), sections 2.3 and 3.1. No two threads write to one
   place: a thread takes a family, a piece with those that follow it, from its keys to all three
   gradients; or, where these are too few for all threads, queries and keys are a pass each, which
   computes P and dS anew. A number is the same sum both ways. */

#include "pieces.h"

#if defined(_OPENMP)
extern int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* Keys, or queries, that are taken at a time in the backward passes; multiples of PANEL. */
#define KEYS 256
#define QUERIES 64

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

static void blank(float *row, long low, long high, long end) {
    memset(row, 0, low * sizeof *row);
    memset(row + high, 0, (end - high) * sizeof *row);
}

/* P and dS of a tile of queries of head h, in rows of `weight` and `slope`; 0 where nothing is seen. */
static void sloped_tile(const struct work *w, struct span asks, long h, struct span keys,
                        const struct block *b, float *weight, float *slope) {
    long step = w->heads * w->width, low, high;
    high = seen(w, asks.place + asks.count - 1, keys, &low);
    seen(w, asks.place, keys, &low);
    long from = low / PANEL * PANEL, to = padded(high);
    /* `answered` takes ROWS keys at a time of which a query sees the first, at least. */
    long end = lesser(padded(keys.count), to + PANEL);
    const float *query = w->query + asks.token * w->query_step + h * w->width;
    const float *grad = w->grad + asks.token * step + h * w->width;
    against(asks.count, rows_of(query, w->query_step), b->keys, w->width, from, to, weight, b->stride);
    against(asks.count, rows_of(grad, step), b->values, w->width, from, to, slope, b->stride);
    for (long q = 0; q < asks.count; q++, weight += b->stride, slope += b->stride) {
        long at = (asks.token + q) * w->heads + h;
        float norm = w->norm[at], delta = w->delta[at];
        high = seen(w, asks.place + q, keys, &low);
        for (long i = low / WIDE * WIDE; i < high; i += WIDE) {
            vec p = exponential(load(weight + i) * w->scaling - norm);
            store(weight + i, p);
            store(slope + i, p * (load(slope + i) - delta) * w->scaling);
        }
        blank(weight, low, high, end);
        blank(slope, low, high, end);
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

/* What becomes of P and dS. */
typedef void use(const struct work *, struct span asks, long h, struct span keys,
                 const struct block *);

static void both(const struct work *w, struct span asks, long h, struct span keys,
                 const struct block *b) {
    asked(w, asks, h, keys, b);
    answered(w, asks, h, keys, b);
}

/* Queries of one piece with the keys taken. */
static void met(const struct work *w, struct span asks, long shared, struct span keys,
                const struct block *b, use *used) {
    long each = w->heads / w->shared;
    for (long q = 0; q < asks.count; q += QUERIES) {
        struct span some = {asks.token + q, asks.place + q, lesser(QUERIES, asks.count - q)};
        if (behind(w, some.place, keys)) return;
        for (long h = shared * each; h < (shared + 1) * each; h++) {
            sloped(w, some, h, keys, b);
            used(w, some, h, keys, b);
        }
    }
}

/* Some keys of one piece with all queries that see them, of its own and of those that follow it. */
static void spread(const struct work *w, long piece, long first, long count, long shared,
                   float *room, use *used) {
    const struct pieces *p = &w->pieces;
    long width = w->width, stride = w->shared * width, after = p->length[piece];
    struct block b = block_in(w, room);
    struct span keys = part(p, piece, first, count);
    zeroed(w->d_key + keys.token * stride + shared * width, stride, count, width);
    zeroed(w->d_value + keys.token * stride + shared * width, stride, count, width);
    taken(w, keys, shared, b);
    met(w, part(p, piece, first, after - first), shared, keys, &b, used);
    for (long f = p->followers[piece]; f < p->followers[piece + 1]; f++) {
        long other = p->follower[f];
        met(w, part(p, other, 0, p->length[other]), shared, keys, &b, used);
    }
}

static void to_keys(const struct work *w, long item, long shared, float *room) {
    spread(w, w->piece[item], w->first[item], w->count[item], shared, room, answered);
}

static void zeroed_queries(const struct work *w, struct span asks, long shared) {
    long some = w->heads / w->shared * w->width, step = w->heads * w->width;
    zeroed(w->d_query + asks.token * step + shared * some, step, asks.count, some);
}

static void to_queries(const struct work *w, long item, long shared, float *room) {
    long piece = w->piece[item], first = w->first[item], count = w->count[item];
    struct block b = block_in(w, room);
    struct span found[2], asks = part(&w->pieces, piece, first, count);
    int some = spans(w, piece, first + count - 1, found);
    zeroed_queries(w, asks, shared);
    for (int i = 0; i < some; i++)
        for (long k = 0; k < found[i].count; k += KEYS) {
            struct span keys = {found[i].token + k, found[i].place + k,
                                lesser(KEYS, found[i].count - k)};
            if (behind(w, asks.place, keys)) continue;
            taken(w, keys, shared, b);
            met(w, asks, shared, keys, &b, asked);
        }
}

/* A piece that follows none, and those that follow it: queries get from keys in the order of
   to_queries. */
static void to_family(const struct work *w, long item, long shared, float *room) {
    const struct pieces *p = &w->pieces;
    long root = w->piece[item], others = p->followers[root + 1] - p->followers[root];
    const int64_t *other = p->follower + p->followers[root];
    for (long i = -1; i < others; i++) {
        long piece = i < 0 ? root : other[i];
        zeroed_queries(w, part(p, piece, 0, p->length[piece]), shared);
    }
    for (long i = -1; i < others; i++) {
        long piece = i < 0 ? root : other[i];
        for (long k = 0; k < p->length[piece]; k += KEYS)
            spread(w, piece, k, lesser(KEYS, p->length[piece] - k), shared, room, both);
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

/* Items are families. */
void keel_causal_families(const struct work *w) {
#pragma omp parallel num_threads(w->threads)
    {
        deltas(w);
        EACH_ITEM(to_family)
    }
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
