/* Attention of one query to keys and values that lie in pages. */

#ifndef KEEL_ATTENTION_H
#define KEEL_ATTENTION_H

#include "vector.h"

/* Places of a page; a multiple of WIDE. */
#define PAGE 16

/* Places `from` to `to` of an entry. `pages`: addresses, the entry's in order. Of a page's numbers
   this layer's and head's keys begin at `keys` and its values at `values`, (PAGE, width) each. */
struct places {
    const int64_t *pages;
    long from, to, keys, values;
};

INLINE const float *inside(struct places p, long page, long offset) {
    return (const float *)(intptr_t)p.pages[page] + offset;
}

/* Scores of all pages that are read, end to end: PAGE each. */
INLINE long first_page(struct places p) { return p.from / PAGE; }
INLINE long end_page(struct places p) { return p.to > p.from ? (p.to + PAGE - 1) / PAGE : p.from / PAGE; }

/* score = q . key, place by place; -inf where nothing is seen. */
INLINE void scored_as(long width, const float *q, struct places p, float *score) {
    for (long page = first_page(p); page < end_page(p); page++) {
        const float *keys = inside(p, page, p.keys);
        long begin = p.from - page * PAGE, here = p.to - page * PAGE;
        here = here < PAGE ? here : PAGE;
        for (long i = 0; i < PAGE; i += WIDE, score += WIDE) {
            vec sum[WIDE];
#pragma GCC unroll 16
            for (long j = 0; j < WIDE; j++) {
                /* Behind the last place, where nothing was written, the last is read again. */
                const float *key = keys + (i + j < here ? i + j : here - 1) * width;
                sum[j] = load(q) * load(key);
                for (long d = WIDE; d < width; d += WIDE) sum[j] += load(q + d) * load(key + d);
            }
            store(score, sums(sum));
            for (long j = 0; j < WIDE; j++)
                if (i + j < begin || i + j >= here) score[j] = -INFINITY;
        }
    }
}

/* out += sum of weight value, place by place */
INLINE void gathered_as(long width, const float *weight, struct places p, float *out) {
    vec sum[256 / WIDE];
    for (long d = 0; d < width / WIDE; d++) sum[d] = load(out + d * WIDE);
    for (long page = first_page(p); page < end_page(p); page++, weight += PAGE) {
        const float *values = inside(p, page, p.values);
        long begin = p.from - page * PAGE, here = p.to - page * PAGE;
        for (long i = begin > 0 ? begin : 0; i < (here < PAGE ? here : PAGE); i++)
            for (long d = 0; d < width / WIDE; d++)
                sum[d] += weight[i] * load(values + i * width + d * WIDE);
    }
    for (long d = 0; d < width / WIDE; d++) store(out + d * WIDE, sum[d]);
}

static void scored_any(long width, const float *q, struct places p, float *score) {
    for (long page = first_page(p); page < end_page(p); page++, score += PAGE) {
        const float *keys = inside(p, page, p.keys);
        for (long i = 0; i < PAGE; i++) {
            int seen = page * PAGE + i >= p.from && page * PAGE + i < p.to;
            float sum = seen ? 0 : -INFINITY;
            for (long d = 0; seen && d < width; d++) sum += q[d] * keys[i * width + d];
            score[i] = sum;
        }
    }
}

static void gathered_any(long width, const float *weight, struct places p, float *out) {
    for (long place = p.from; place < p.to; place++) {
        const float *value = inside(p, place / PAGE, p.values) + place % PAGE * width;
        float w = weight[place - first_page(p) * PAGE];
        for (long d = 0; d < width; d++) out[d] += w * value[d];
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

static void scored(long width, const float *q, struct places p, float *score) {
    BY_WIDTH(scored, q, p, score)
}

static void gathered(long width, const float *weight, struct places p, float *out) {
    BY_WIDTH(gathered, weight, p, out)
}

/* Scores into weights, which sum to 1 when multiplied with what is returned. */
static float weighed(long count, float *score) {
    vec most = all(-INFINITY), sum = {};
    for (long i = 0; i < count; i += WIDE) most = choose(load(score + i) > most, load(score + i), most);
    float top = largest(most);
    for (long i = 0; i < count; i += WIDE) {
        vec s = load(score + i);
        vec e = choose(s == all(-INFINITY), all(0.0f), exponential(s - top));
        store(score + i, e);
        sum += e;
    }
    return 1.0f / total(sum);
}

/* out = softmax(q . keys) values over both. `score`: room for the places of all pages read. */
static void attend(long width, const float *q, struct places prompt, struct places own, float *score,
                   float *out) {
    long first = (end_page(prompt) - first_page(prompt)) * PAGE;
    long second = (end_page(own) - first_page(own)) * PAGE;
    scored(width, q, prompt, score);
    scored(width, q, own, score + first);
    float scale = weighed(first + second, score);
    memset(out, 0, width * sizeof *out);
    gathered(width, score, prompt, out);
    gathered(width, score + first, own, out);
    for (long d = 0; d < width; d++) out[d] *= scale;
}

#endif
