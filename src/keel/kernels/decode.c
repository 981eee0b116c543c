/* One step of decoding through a Llama-like backbone, in single precision.

   Norm, attention with rotary embeddings, norm, gated SiLU; norms' weights are folded into the
   weights behind them. Tokens are rows of x, (tokens, hidden). The first ones may be prompts, which
   attend among themselves elsewhere; the last ones are the next token of a live row each, which sees
   its prompt and its own answer. Keys and values lie in pages, (layers, 2, heads, PAGE, width). */

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
    const int64_t *position, *home;     /* of each token; where its page's place begins */
    const int64_t *slot, *end, *length; /* of each row: its prompt, its new place; of each prompt */
    const int64_t *order;               /* rows, those of one prompt behind each other */
    const int64_t *prompt_pages, *answer_pages;
    const float *cos, *sin;             /* (positions, width / 2) */
    float *x, *qkv, *seen, *mid, *scores;
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
        float *home = (float *)(intptr_t)s->home[t];
        for (long h = 0; h < shared; h++) {
            const float *key = head + (heads + h) * width, *value = key + shared * width;
            memcpy(home + keys_at(s, l->number, h), key, width * sizeof *key);
            memcpy(home + values_at(s, l->number, h), value, width * sizeof *value);
        }
    }
}

/* What a row's query sees of its prompt and of its own. */
static void attended(const struct layer *l, const struct step *s, long row, long head, float *score) {
    long prompt = s->slot[row], before = s->length[prompt], end = s->end[row] + 1, width = s->width;
    long from = l->window && before + end > l->window ? before + end - l->window : 0;
    long each = s->heads / s->shared_heads, token = s->prompt_tokens + row;
    long keys = keys_at(s, l->number, head), values = values_at(s, l->number, head);
    struct places first = {s->prompt_pages + prompt * s->prompt_most, from < before ? from : before,
                           before, keys, values};
    struct places own = {s->answer_pages + row * s->answer_most, from < before ? 0 : from - before,
                         end, keys, values};
    const float *queries = s->qkv + token * (s->heads + 2 * s->shared_heads) * width;
    for (long h = head * each; h < (head + 1) * each; h++) {
        float query[width];
        for (long d = 0; d < width; d++) query[d] = queries[h * width + d] * l->scaling;
        attend(width, query, first, own, score, s->seen + (token * s->heads + h) * width);
    }
}

static void rows(const struct layer *l, const struct step *s) {
    long live = s->tokens - s->prompt_tokens;
    float *score = s->scores + omp_get_thread_num() * s->score_room;
#pragma omp for schedule(dynamic, 4)
    for (long item = 0; item < live * s->shared_heads; item++)
        attended(l, s, s->order[item % live], item / live, score);
}

static void entered(const struct layer *l, const struct step *s) {
    product(&l->qkv, s->x, s->tokens, l->epsilon, PLAIN, s->qkv);
    turned(l, s);
    rows(l, s);
}

static void left(const struct layer *l, const struct step *s) {
    product(&l->out, s->seen, s->tokens, -1, ADDED, s->x);
    product(&l->gate_up, s->x, s->tokens, l->epsilon, GATED, s->mid);
    product(&l->down, s->mid, s->tokens, -1, ADDED, s->x);
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
