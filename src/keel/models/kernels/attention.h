/* Attention of one query to keys and values that lie in pages. */

#ifndef KEEL_ATTENTION_H
#define KEEL_ATTENTION_H

#include "stored.h"

/* Places of a page; a multiple of WIDE. */
#define PAGE 16

/* Places `from` to `to` of an entry. `pages`: addresses, the entry's in order. Of a page's numbers
   this layer's and head's keys begin at `keys`, (PAGE, width), and its values at `values`, (PAGE /
   UNIT, width, UNIT). */
struct places {
    const int64_t *pages;
    long from, to, keys, values;
};

INLINE const stored *inside(struct places p, long page, long offset) {
    return (const stored *)(intptr_t)p.pages[page] + offset;
}

/* Where among a page's values a number is. */
INLINE long value_at(long place, long d, long width) {
    return (place / UNIT * width + d) * UNIT + place % UNIT;
}

/* Scores of all pages that are read, end to end: PAGE each. */
INLINE long first_page(struct places p) { return p.from / PAGE; }
INLINE long end_page(struct places p) { return p.to > p.from ? (p.to + PAGE - 1) / PAGE : p.from / PAGE; }

/* What is read soon is fetched from memory meanwhile, its first lines: the processor fetches the rest
   itself, once these are read in order, and more than it can have under way would only stop it. */
INLINE void fetch(const stored *from) {
    for (long line = 0; line < 8; line++) __builtin_prefetch((const char *)from + 64 * line, 0, 2);
}

/* Pages between what is fetched and what is read. */
#define AHEAD 2

/* The keys of a page AHEAD of this one: of these places, or of those that are read after them. */
INLINE void fetch_keys(struct places p, struct places next, long page) {
    page += AHEAD;
    if (page < end_page(p)) fetch(inside(p, page, p.keys));
    page += first_page(next) - end_page(p);
    if (page >= first_page(next) && page < end_page(next)) fetch(inside(next, page, next.keys));
}

/* score = q . key, place by place; -inf where nothing is seen. */
INLINE void scored_as(long width, const stored *q, struct places p, struct places next, float *score) {
    for (long page = first_page(p); page < end_page(p); page++) {
        const stored *keys = inside(p, page, p.keys);
        fetch(inside(p, page, p.values));
        fetch_keys(p, next, page);
        long begin = p.from - page * PAGE, here = p.to - page * PAGE;
        here = here < PAGE ? here : PAGE;
        for (long i = 0; i < PAGE; i += WIDE, score += WIDE) {
            vec sum[WIDE];
#pragma GCC unroll 16
            for (long j = 0; j < WIDE; j++) {
                /* Behind the last place, where nothing was written, the last is read again. */
                const stored *key = keys + (i + j < here ? i + j : here - 1) * width;
                sum[j] = times(get(q), get(key));
                for (long d = UNIT * WIDE; d < width; d += UNIT * WIDE)
                    sum[j] = multiplied(sum[j], get(q + d), get(key + d));
            }
            store(score, sums(sum));
            for (long j = 0; j < WIDE; j++)
                if (i + j < begin || i + j >= here) score[j] = -INFINITY;
        }
    }
}

/* UNIT places' values; 0 for those of them that are not among `from` to `to`, where anything may be. */
INLINE several seen(const stored *values, long place, long from, long to) {
    several x = get(values);
#if UNIT == 2
    if (place < from) x &= 0xffff0000u;
    if (place + 1 >= to) x &= 0xffffu;
#endif
    return x;
}

/* out += sum of weight value, place by place */
INLINE void gathered_as(long width, const stored *weight, struct places p, float *out) {
    vec sum[256 / WIDE];
    for (long d = 0; d < width / WIDE; d++) sum[d] = load(out + d * WIDE);
    for (long page = first_page(p); page < end_page(p); page++, weight += PAGE) {
        const stored *values = inside(p, page, p.values);
        long begin = p.from - page * PAGE, here = p.to - page * PAGE;
        for (long i = begin > 0 ? begin / UNIT * UNIT : 0; i < (here < PAGE ? here : PAGE); i += UNIT)
            for (long d = 0; d < width / WIDE; d++)
                sum[d] = multiplied(sum[d], repeated(weight + i),
                                    seen(values + i * width + d * UNIT * WIDE, i, begin, here));
    }
    for (long d = 0; d < width / WIDE; d++) store(out + d * WIDE, sum[d]);
}

static void scored_any(long width, const stored *q, struct places p, struct places next, float *score) {
    (void)next;
    for (long page = first_page(p); page < end_page(p); page++, score += PAGE) {
        const stored *keys = inside(p, page, p.keys);
        for (long i = 0; i < PAGE; i++) {
            int seen = page * PAGE + i >= p.from && page * PAGE + i < p.to;
            float sum = seen ? 0 : -INFINITY;
            for (long d = 0; seen && d < width; d++) sum += number(q[d]) * number(keys[i * width + d]);
            score[i] = sum;
        }
    }
}

static void gathered_any(long width, const stored *weight, struct places p, float *out) {
    for (long place = p.from; place < p.to; place++) {
        const stored *values = inside(p, place / PAGE, p.values);
        float w = number(weight[place - first_page(p) * PAGE]);
        for (long d = 0; d < width; d++) out[d] += w * number(values[value_at(place % PAGE, d, width)]);
    }
}

/* Usual widths of a head, each a loop of its own. */
#define BY_WIDTH(name, ...)                                            \
    switch (width) {                                                   \
        case 32: name##_as(32, __VA_ARGS__); break;                    \
        case 64: name##_as(64, __VA_ARGS__); break;                    \
        case 96: name##_as(96, __VA_ARGS__); break;                    \
        case 128: name##_as(128, __VA_ARGS__); break;                  \
        case 256: name##_as(256, __VA_ARGS__); break;                  \
        default: name##_any(width, __VA_ARGS__);                       \
    }

static void scored(long width, const stored *q, struct places p, struct places next, float *score) {
    BY_WIDTH(scored, q, p, next, score)
}

static void gathered(long width, const stored *weight, struct places p, float *out) {
    BY_WIDTH(gathered, weight, p, out)
}

/* Scores into weights in their place, which sum to 1 when multiplied with what is returned. */
static float weighed(long count, float *score) {
    stored *weight = (stored *)score;
    vec most = all(-INFINITY), sum = {};
    for (long i = 0; i < count; i += WIDE) most = choose(load(score + i) > most, load(score + i), most);
    float top = largest(most);
    for (long i = 0; i < count; i += WIDE) {
        vec s = load(score + i);
        ivec seen = s != all(-INFINITY);
        /* Not of -inf: e^-104 is next to nothing, which processors take long over. */
        vec e = exponential(choose(seen, s - top, (vec){}));
        sum += put(weight + i, choose(seen, e, (vec){}));
    }
    return 1.0f / total(sum);
}

/* out = softmax(q . keys) values over both. `score`: room for the places of all pages read. */
static void attend(long width, const stored *q, struct places prompt, struct places own,
                   struct places next, float *score, float *out) {
    const stored *weight = (const stored *)score;
    long first = (end_page(prompt) - first_page(prompt)) * PAGE;
    long second = (end_page(own) - first_page(own)) * PAGE;
    scored(width, q, prompt, own, score);
    scored(width, q, own, next, score + first);
    float scale = weighed(first + second, score);
    memset(out, 0, width * sizeof *out);
    gathered(width, weight, prompt, out);
    gathered(width, weight + first, own, out);
    for (long d = 0; d < width; d++) out[d] *= scale;
}

#endif
