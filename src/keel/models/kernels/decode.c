/* One step of decoding through a Llama-like backbone: weights, keys and values as `stored`, all else in
   single precision.

   Norm, attention with rotary embeddings, norm, gated SiLU; norms' weights are folded into the
   weights behind them. Tokens are rows of x, (tokens, hidden). The first ones may be prompts, which
   attend among themselves elsewhere; the last ones are the next token of a live row each, which sees
   its prompt and its own answer. Keys and values lie in pages, (layers, 2, heads, PAGE * width). */

#include "across.h"
#include "attention.h"
#include "product.h"

#if defined(_OPENMP)
extern int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

struct layer {
    struct weight qkv, out, gate_up, down;
    const float *query_norm, *key_norm; /* one head's weights, or null */
    int64_t number, window;             /* window: places that are seen, or 0 for all */
    float epsilon, scaling;
};

struct step {
    int64_t hidden, heads, shared_heads, width; /* width: of a head */
    int64_t tokens, prompt_tokens, threads, score_room;
    int64_t prompt_most, answer_most;   /* pages an entry may have in the tables */
    const int64_t *position;            /* of each token */
    const int64_t *page, *place;        /* of each token: where its page begins; its place there */
    const int64_t *slot, *end, *length; /* of each row: its prompt, its new place; of each prompt */
    const int64_t *order;               /* rows, those of one prompt behind each other */
    const int64_t *prompt_pages, *answer_pages;
    const float *cos, *sin;             /* (positions, width / 2) */
    float *x, *qkv, *seen, *mid, *scores;
    stored *taken; /* room for the inputs of a product */
};

static long keys_at(const struct step *s, long layer, long head) {
    return (2 * layer * s->shared_heads + head) * PAGE * s->width;
}

static long values_at(const struct step *s, long layer, long head) {
    return ((2 * layer + 1) * s->shared_heads + head) * PAGE * s->width;
}

static void turn(float *head, long width, const float *norm, float epsilon, const float *cos,
                 const float *sin) {
    if (norm) {
        float scale = 1.0f / sqrtf(squares(head, width) / width + epsilon);
        for (long d = 0; d < width; d++) head[d] *= scale * norm[d];
    }
    long half = width / 2;
    for (long d = 0; d < half; d++) {
        float a = head[d], b = head[d + half];
        head[d] = a * cos[d] - b * sin[d];
        head[d + half] = b * cos[d] + a * sin[d];
    }
}

/* Norms and rotations of queries and keys; keys and values go to their places. */
static void turned(const struct layer *l, const struct step *s) {
    long heads = s->heads, shared = s->shared_heads, width = s->width, half = width / 2;
#pragma omp for schedule(static)
    for (long t = 0; t < s->tokens; t++) {
        const float *cos = s->cos + s->position[t] * half, *sin = s->sin + s->position[t] * half;
        float *head = s->qkv + t * (heads + 2 * shared) * width;
        for (long h = 0; h < heads + shared; h++)
            turn(head + h * width, width, h < heads ? l->query_norm : l->key_norm, l->epsilon, cos,
                 sin);
        for (long h = 0; h < shared; h++) {
            const float *key = head + (heads + h) * width, *value = key + shared * width;
            stored *page = (stored *)(intptr_t)s->page[t];
            stored *keys = page + keys_at(s, l->number, h) + s->place[t] * width;
            stored *values = page + values_at(s, l->number, h);
            for (long d = 0; d < width; d++) keys[d] = rounded(key[d]);
            for (long d = 0; d < width; d++) values[value_at(s->place[t], d, width)] = rounded(value[d]);
        }
    }
}

/* The first place that a row sees, counted from its prompt's first. */
static long seen_from(const struct layer *l, const struct step *s, long row) {
    long end = s->length[s->slot[row]] + s->end[row] + 1;
    return l->window && end > l->window ? end - l->window : 0;
}

static struct places of_prompt(const struct layer *l, const struct step *s, long row, long head) {
    long prompt = s->slot[row], before = s->length[prompt], from = seen_from(l, s, row);
    return (struct places){s->prompt_pages + prompt * s->prompt_most, from < before ? from : before,
                           before, keys_at(s, l->number, head), values_at(s, l->number, head)};
}

static struct places of_own(const struct layer *l, const struct step *s, long row, long head) {
    long before = s->length[s->slot[row]], from = seen_from(l, s, row);
    return (struct places){s->answer_pages + row * s->answer_most, from < before ? 0 : from - before,
                           s->end[row] + 1, keys_at(s, l->number, head),
                           values_at(s, l->number, head)};
}

/* What a row's query sees of its prompt and of its own; `next` is the row that is likely next. */
static void attended(const struct layer *l, const struct step *s, long row, long next, long head,
                     float *score) {
    long width = s->width, each = s->heads / s->shared_heads, token = s->prompt_tokens + row;
    struct places prompt = of_prompt(l, s, row, head), own = of_own(l, s, row, head);
    struct places then = of_own(l, s, next, head);
    const float *queries = s->qkv + token * (s->heads + 2 * s->shared_heads) * width;
    for (long h = head * each; h < (head + 1) * each; h++) {
        stored query[width];
        for (long d = 0; d < width; d++) query[d] = rounded(queries[h * width + d] * l->scaling);
        attend(width, query, prompt, own, then, score, s->seen + (token * s->heads + h) * width);
    }
}

static void rows(const struct layer *l, const struct step *s) {
    long live = s->tokens - s->prompt_tokens;
    float *score = s->scores + omp_get_thread_num() * s->score_room;
#pragma omp for schedule(dynamic, 4)
    for (long item = 0; item < live * s->shared_heads; item++)
        attended(l, s, s->order[item % live], s->order[(item + 1) % live], item / live, score);
}

static void entered(const struct layer *l, const struct step *s) {
    product(&l->qkv, s->x, s->tokens, l->epsilon, PLAIN, s->taken, s->qkv);
    turned(l, s);
    rows(l, s);
}

static void left(const struct layer *l, const struct step *s) {
    product(&l->out, s->seen, s->tokens, -1, ADDED, s->taken, s->x);
    product(&l->gate_up, s->x, s->tokens, l->epsilon, GATED, s->taken, s->mid);
    product(&l->down, s->mid, s->tokens, -1, ADDED, s->taken, s->x);
}

/* A layer up to its attention: that of the rows is done, that of prompts not. */
void keel_enter(const struct layer *l, const struct step *s) {
#pragma omp parallel num_threads(s->threads)
    entered(l, s);
}

/* A layer from its attention on. */
void keel_leave(const struct layer *l, const struct step *s) {
#pragma omp parallel num_threads(s->threads)
    left(l, s);
}

/* All layers, for rows alone. */
void keel_decode(const struct layer *layers, int64_t count, const struct step *s) {
#pragma omp parallel num_threads(s->threads)
    for (int64_t i = 0; i < count; i++) {
        entered(layers + i, s);
        left(layers + i, s);
    }
}

/* The norm behind the last layer, in place. */
void keel_norm(const float *weight, float epsilon, const struct step *s) {
    for (long t = 0; t < s->tokens; t++) {
        float *x = s->x + t * s->hidden;
        float scale = 1.0f / sqrtf(squares(x, s->hidden) / s->hidden + epsilon);
        for (long i = 0; i < s->hidden; i++) x[i] *= scale * weight[i];
    }
}

/* A weight as `product` takes it. Column i of the `columns`, a multiple of PANEL, is the row of numbers
   at row[i], or zeros where that is 0, and each of them times the input's `scale` unless that is
   null. */
void keel_panels(const int64_t *row, const float *scale, int64_t columns, int64_t inputs,
                 int64_t threads, stored *panels) {
    long filled = FILLED(inputs);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < columns; first += WIDE)
        for (long k = 0; k < filled; k += WIDE) {
            const float *rows[WIDE];
            vec column[WIDE];
            for (long i = 0; i < WIDE; i++) rows[i] = (const float *)(intptr_t)row[first + i];
            across(rows, k, inputs, column);
            for (long i = 0; scale && i < WIDE && k + i < inputs; i++) column[i] *= scale[k + i];
            stored *to = panels + (first / PANEL * filled + k) * PANEL + first % PANEL * UNIT;
            for (long i = 0; i < WIDE && k + i < filled; i++) {
                stored some[WIDE];
                put(some, column[i]);
                for (long j = 0; j < WIDE; j++)
                    to[i / UNIT * UNIT * PANEL + j * UNIT + i % UNIT] = some[j];
            }
        }
}

/* Keys and values of places to other places: of each its page, where that begins, and which it is in
   there. */
void keel_copy(int64_t layers, int64_t heads, int64_t width, int64_t count, const int64_t *page,
               const int64_t *place, const int64_t *to_page, const int64_t *to_place) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t layer = 0; layer < layers; layer++)
            for (int64_t head = 0; head < heads; head++) {
                long keys = (2 * layer * heads + head) * PAGE * width, values = keys + heads * PAGE * width;
                const stored *from = (const stored *)(intptr_t)page[t];
                stored *to = (stored *)(intptr_t)to_page[t];
                memcpy(to + keys + to_place[t] * width, from + keys + place[t] * width,
                       width * sizeof *to);
                for (long d = 0; d < width; d++)
                    to[values + value_at(to_place[t], d, width)] =
                        from[values + value_at(place[t], d, width)];
            }
}
