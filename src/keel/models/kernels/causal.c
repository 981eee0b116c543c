/* Causal attention over pieces that lie end to end, forward and backward, in single precision.

   A piece may follow another one, a prompt, whose keys its tokens see before their own. Queries and
   what is like them are (tokens, heads, width), keys and values (tokens, shared heads, width). With
   P = exp(S - l), l the logarithms of the softmax's denominators, D = rowsum(dO * O):

       dV = P^T dO,   dS = scaling P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q.

   Source: Dao, FlashAttention-2 (arXiv:2307.08691), sections 2.3 and 3.1. No two threads write to one
   place: a thread takes a family, a piece with those that follow it, from its keys to all three
   gradients; or, where these are too few for all threads, queries and keys are a pass each, which
   computes P and dS again. A number is the same sum both ways. */

#include "pieces.h"

#if defined(_OPENMP)
extern int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* Keys, or queries, that are taken at a time in the backward passes; multiples of PANEL. */
#define KEYS 256
#define QUERIES 64

/* Which numbers of a vector whose first is number `i` of a row are `low` to `high` of it. */
static ivec within(long i, long low, long high) {
    ivec at;
    for (int j = 0; j < WIDE; j++) at[j] = j;
    return (at >= (int)(low - i)) & (at < (int)(high - i));
}

/* 0 in the whole vectors of `from` to `end` that hold nothing of `low` to `high`. */
static void blank(float *row, long from, long low, long high, long end) {
    for (long i = from; i + WIDE <= low; i += WIDE) store(row + i, (vec){});
    for (long i = (high + WIDE - 1) / WIDE * WIDE; i < end; i += WIDE) store(row + i, (vec){});
}

/* The largest number, or the sum, in all places. */
static vec top_of(vec x) {
    for (int i = 1; i < WIDE; i *= 2) {
        vec y = in_turn(x, x, 0), z = in_turn(x, x, 1);
        x = choose(y > z, y, z);
    }
    return x;
}

static vec sum_of(vec x) {
    for (int i = 1; i < WIDE; i *= 2) x = in_turn(x, x, 0) + in_turn(x, x, 1);
    return x;
}

/* ---- forward ---- */

/* Scores `low` to `high` of a row to weights, before they are divided by their sum, which is
   returned; `*norm` its logarithm with that of what they were scaled by. */
static float weighed(float *score, long low, long high, float scaling, float *norm) {
    vec most = all(-INFINITY), sum = {};
    for (long i = low / WIDE * WIDE; i < high; i += WIDE) {
        vec s = choose(within(i, low, high), load(score + i), all(-INFINITY));
        most = choose(s > most, s, most);
    }
    vec top = top_of(most) * scaling;
    for (long i = low / WIDE * WIDE; i < high; i += WIDE) {
        /* Of what is not seen too, not of -inf: e^-104 is next to nothing, which processors take
           long over. */
        vec e = exponential(load(score + i) * scaling - top);
        e = choose(within(i, low, high), e, (vec){});
        store(score + i, e);
        sum += e;
    }
    float whole = sum_of(sum)[0];
    *norm = top[0] + logf(whole);
    return whole;
}

/* What some queries see, the prompt's tokens and their piece's own in one span: keys across, values
   next to each other. */
struct sight {
    struct span span;
    const float *keys, *values;
    long stride;
};

/* A tile of queries of head h, the first at `token` and `place`. */
static void attend_tile(const struct work *w, const struct sight *s, long token, long place,
                        long rows, long h, float *score) {
    long width = w->width, step = w->heads * width, stride = s->stride, low, high;
    struct left query = rows_of(w->query + token * w->query_step + h * width, w->query_step);
    float *out = w->out + token * step + h * width, share[ROWS];
    seen(w, place, s->span, &low);
    long from = low / PANEL * PANEL, most = seen(w, place + rows - 1, s->span, &low);
    against(rows, query, s->keys, width, from, padded(most), score, stride);
    for (long r = 0; r < rows; r++) {
        float *row = score + r * stride;
        high = seen(w, place + r, s->span, &low);
        share[r] = 1 / weighed(row, low, high, w->scaling, w->norm + (token + r) * w->heads + h);
        blank(row, from, low, high, padded(most));
    }
    onto(rows, rows_of(score + from, stride), s->values + from * width, width, width, most - from,
         out, step, 0);
    for (long r = 0; r < rows; r++)
        for (long d = 0; d < width; d++) out[r * step + d] *= share[r];
}

/* Rows of the prompt's tokens, if the piece follows one, and of its own: by places. */
static struct lot lot_of(const struct pieces *p, long piece, const float *x, long step) {
    long prompt = p->follows[piece], start = p->start[piece];
    if (prompt < 0) return (struct lot){x + start * step, step, p->length[piece], 0};
    long first = p->start[prompt], before = p->length[prompt];
    return (struct lot){x + first * step, step, before, start - first - before};
}

static void attend(const struct work *w, long item, long shared, float *room) {
    long piece = w->piece[item], width = w->width, each = w->heads / w->shared, low;
    struct span asks = part(&w->pieces, piece, w->first[item], w->count[item]);
    struct lot keys = lot_of(&w->pieces, piece, w->key + shared * width, w->key_step);
    struct lot values = lot_of(&w->pieces, piece, w->value + shared * width, w->value_step);
    long end = asks.place + asks.count;
    seen(w, asks.place, (struct span){0, 0, end}, &low);
    long wide = padded(end - low);
    float *copied_values = room + wide * width, *score = copied_values + wide * width;
    /* Rows of scores are WIDE further apart: not by a power of two, as below. */
    struct sight s = {{0, low, end - low}, room, copied_values, wide + WIDE};
    all_across(keys, width, low, end, room);
    for (long i = low; i < end; i++)
        memcpy(copied_values + (i - low) * width, row_of(values, i), width * sizeof *copied_values);
    for (long h = shared * each; h < (shared + 1) * each; h++)
        for (long q = 0; q < asks.count; q += ROWS)
            attend_tile(w, &s, asks.token + q, asks.place + q, lesser(ROWS, asks.count - q), h,
                        score);
}

/* ---- backward ---- */

/* D of some queries of the heads that share a key. */
static void deltas(const struct work *w, struct span asks, long shared) {
    long each = w->heads / w->shared;
    for (long i = asks.token; i < asks.token + asks.count; i++)
        for (long h = shared * each; h < (shared + 1) * each; h++) {
            long at = i * w->heads + h;
            vec sum = {};
            for (long d = 0; d < w->width; d += WIDE)
                sum += load(w->out + at * w->width + d) * load(w->grad + at * w->width + d);
            w->delta[at] = sum_of(sum)[0];
        }
}

/* Keys and values across, and what comes of them: weights and scores' gradients, (QUERIES, KEYS) at
   most, `stride` from query to query: not a power of two, so that rows lie next to each other in the
   processor's cache. */
struct block {
    float *keys, *values, *weight, *slope;
    long stride;
};

static struct block block_in(const struct work *w, float *room) {
    float *values = room + KEYS * w->width, *weight = values + KEYS * w->width;
    return (struct block){room, values, weight, weight + QUERIES * (KEYS + WIDE), KEYS + WIDE};
}

/* Keys that are taken together: some at the end of a prompt and some of a piece behind it, or some of
   one piece and none. */
struct keys {
    struct span part[2];
};

static struct span both_of(struct keys keys) {
    return (struct span){0, keys.part[0].place, keys.part[0].count + keys.part[1].count};
}

static void taken(const struct work *w, struct keys keys, long shared, struct block b) {
    long first = keys.part[0].token, before = keys.part[0].count, width = w->width;
    long skip = keys.part[1].token - first - before, end = both_of(keys).count;
    const float *key = w->key + first * w->key_step + shared * width;
    const float *value = w->value + first * w->value_step + shared * width;
    all_across((struct lot){key, w->key_step, before, skip}, width, 0, end, b.keys);
    all_across((struct lot){value, w->value_step, before, skip}, width, 0, end, b.values);
}

/* P and dS of a query of head h, in rows of `weight` and `slope`; 0 where nothing is seen. */
static void sloped_row(const struct work *w, long token, long place, long h, struct span keys,
                       float *weight, float *slope) {
    long at = token * w->heads + h, low, high = seen(w, place, keys, &low);
    float norm = w->norm[at], delta = w->delta[at];
    for (long i = low / WIDE * WIDE; i < high; i += WIDE) {
        ivec mask = within(i, low, high);
        vec p = exponential(load(weight + i) * w->scaling - norm);
        vec s = p * (load(slope + i) - delta) * w->scaling;
        store(weight + i, choose(mask, p, (vec){}));
        store(slope + i, choose(mask, s, (vec){}));
    }
    /* Behind it, as far as a tile of keys or of queries goes that it is part of. */
    blank(weight, 0, low, high, lesser(keys.count, high + ROWS));
    blank(slope, 0, low, high, lesser(keys.count, high + ROWS));
}

/* The same of all of the queries, each panel of keys with those that see some of it. */
static void sloped(const struct work *w, struct span asks, long h, struct span keys,
                   const struct block *b) {
    long width = w->width, step = w->heads * width, low, last = asks.place + asks.count - 1;
    long high = seen(w, last, keys, &low);
    const float *query = w->query + asks.token * w->query_step + h * width;
    const float *grad = w->grad + asks.token * step + h * width;
    seen(w, asks.place, keys, &low);
    for (long j = low / PANEL * PANEL; j < high; j += PANEL) {
        long q = greater(0, keys.place + j - asks.place), rows = asks.count - q;
        if (w->window) rows = lesser(rows, keys.place + j + PANEL + w->window - 1 - asks.place - q);
        long from = q * b->stride + j;
        tiles(rows, rows_of(query + q * w->query_step, w->query_step),
              (struct panel){b->keys + j * width, PANEL}, width, b->weight + from, b->stride, 0);
        tiles(rows, rows_of(grad + q * step, step), (struct panel){b->values + j * width, PANEL},
              width, b->slope + from, b->stride, 0);
    }
    for (long q = 0; q < asks.count; q++)
        sloped_row(w, asks.token + q, asks.place + q, h, keys, b->weight + q * b->stride,
                   b->slope + q * b->stride);
}

/* dQ += dS K, or = for the first keys that are seen. */
static void asked(const struct work *w, struct span asks, long h, struct span keys,
                  const struct block *b) {
    long width = w->width, step = w->heads * width, low;
    const float *key = w->key + keys.token * w->key_step + h / (w->heads / w->shared) * width;
    int add = keys.place > 0 && !behind(w, asks.place, (struct span){0, 0, keys.place});
    for (long q = 0; q < asks.count; q += ROWS) {
        long rows = lesser(ROWS, asks.count - q);
        onto(rows, rows_of(b->slope + q * b->stride, b->stride), key, w->key_step, width,
             seen(w, asks.place + q + rows - 1, keys, &low),
             w->d_query + (asks.token + q) * step + h * width, step, add);
    }
}

/* dV += P^T dO, dK += dS^T Q, or = for the first head of the queries that begin with a key's own. */
static void answered(const struct work *w, struct span asks, long h, struct span keys,
                     const struct block *b) {
    long width = w->width, step = w->heads * width, stride = w->shared * width;
    float *d_key = w->d_key + keys.token * stride + h / (w->heads / w->shared) * width;
    float *d_value = w->d_value + keys.token * stride + h / (w->heads / w->shared) * width;
    for (long k = 0; k < keys.count; k += ROWS) {
        /* The first query that sees the first of these keys. */
        long ahead = keys.place + k - asks.place, q = greater(0, ahead);
        if (q >= asks.count) return;
        int add = ahead < 0 || h % (w->heads / w->shared);
        long rows = lesser(ROWS, keys.count - k);
        struct left weight = {b->weight + q * b->stride + k, 1, b->stride};
        struct left slope = {b->slope + q * b->stride + k, 1, b->stride};
        const float *grad = w->grad + (asks.token + q) * step + h * width;
        const float *query = w->query + (asks.token + q) * w->query_step + h * width;
        onto(rows, weight, grad, step, width, asks.count - q, d_value + k * stride, stride,
             add);
        onto(rows, slope, query, w->query_step, width, asks.count - q, d_key + k * stride, stride,
             add);
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
static void met(const struct work *w, struct span asks, long shared, struct keys keys,
                const struct block *b, use *used) {
    long each = w->heads / w->shared;
    for (long q = 0; q < asks.count; q += QUERIES) {
        struct span some = {asks.token + q, asks.place + q, lesser(QUERIES, asks.count - q)};
        if (behind(w, some.place, both_of(keys))) return;
        for (long h = shared * each; h < (shared + 1) * each; h++) {
            struct block of = *b;
            sloped(w, some, h, both_of(keys), b);
            for (int i = 0; i < 2 && keys.part[i].count; i++) {
                used(w, some, h, keys.part[i], &of);
                of.weight += keys.part[i].count;
                of.slope += keys.part[i].count;
            }
        }
    }
}

/* Some keys of one piece with the queries of its own that see them, and `others` of them with those
   of the pieces that follow it. */
static void spread(const struct work *w, long piece, long first, long count, long others, long shared,
                   float *room, use *used) {
    const struct pieces *p = &w->pieces;
    struct block b = block_in(w, room);
    struct keys keys = {{part(p, piece, first, count)}};
    taken(w, keys, shared, b);
    met(w, part(p, piece, first, p->length[piece] - first), shared, keys, &b, used);
    keys.part[0].count = others;
    for (long f = p->followers[piece]; others > 0 && f < p->followers[piece + 1]; f++) {
        long other = p->follower[f];
        met(w, part(p, other, 0, p->length[other]), shared, keys, &b, used);
    }
}

static void to_keys(const struct work *w, long item, long shared, float *room) {
    long count = w->count[item];
    spread(w, w->piece[item], w->first[item], count, count, shared, room, answered);
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

static void to_queries(const struct work *w, long item, long shared, float *room) {
    long piece = w->piece[item], first = w->first[item], count = w->count[item];
    struct block b = block_in(w, room);
    struct span found[2], asks = part(&w->pieces, piece, first, count);
    int some = spans(w, piece, first + count - 1, found);
    deltas(w, asks, shared);
    for (int i = 0; i < some; i++)
        for (long k = 0; k < found[i].count; k += KEYS) {
            struct keys keys = {{{found[i].token + k, found[i].place + k,
                                  lesser(KEYS, found[i].count - k)}}};
            if (behind(w, asks.place, keys.part[0])) continue;
            taken(w, keys, shared, b);
            met(w, asks, shared, keys, &b, asked);
        }
}

/* A piece that follows a prompt: its queries with the prompt's keys from `first` on and its own. */
static void to_follower(const struct work *w, long piece, long first, long shared, float *room) {
    const struct pieces *p = &w->pieces;
    long prompt = p->follows[piece], before = p->length[prompt], whole = before + p->length[piece];
    struct block b = block_in(w, room);
    for (long k = first; k < whole; k += KEYS) {
        long end = lesser(k + KEYS, whole), own = greater(0, k - before);
        struct span at_piece = part(p, piece, own, end - before - own);
        struct keys keys = {{at_piece}};
        if (k < before) keys = (struct keys){{part(p, prompt, k, before - k), at_piece}};
        /* Where heads share keys, sums go by blocks of queries: the same as in to_keys. */
        long ask = own / QUERIES * QUERIES;
        taken(w, keys, shared, b);
        met(w, part(p, piece, ask, p->length[piece] - ask), shared, keys, &b, both);
    }
}

/* A piece that follows none, and those that follow it: queries get from keys in the order of
   to_queries. What fills no panel of the prompt's keys is taken with each other piece's own. */
static void to_family(const struct work *w, long item, long shared, float *room) {
    const struct pieces *p = &w->pieces;
    long root = w->piece[item], length = p->length[root], whole = length / PANEL * PANEL;
    const int64_t *first = p->follower + p->followers[root];
    const int64_t *end = p->follower + p->followers[root + 1];
    deltas(w, part(p, root, 0, length), shared);
    for (const int64_t *f = first; f < end; f++)
        deltas(w, part(p, *f, 0, p->length[*f]), shared);
    for (long k = 0; k < length; k += KEYS)
        spread(w, root, k, lesser(KEYS, length - k), lesser(KEYS, whole - k), shared, room, both);
    for (const int64_t *f = first; f < end; f++) to_follower(w, *f, whole, shared, room);
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
    EACH_ITEM(to_family)
}

/* Items are queries. */
void keel_causal_queries(const struct work *w) {
#pragma omp parallel num_threads(w->threads)
    EACH_ITEM(to_queries)
}

/* Items are keys; behind the other. */
void keel_causal_keys(const struct work *w) {
#pragma omp parallel num_threads(w->threads)
    EACH_ITEM(to_keys)
}
