/* Several steps of decoding in one call, as long as no row ends.

   A step feeds the last token of each row and draws its next one from the logits behind it. What is
   done to the rows is that of decode.c, head.c and draw.c, through the functions and structures that
   they are called with; what moves on from step to step is moved on here. */

#include <stdint.h>
#include <string.h>
#include <time.h>

struct steps {
    void (*decode)(const void *layers, int64_t count, const void *step);
    void (*norm)(const void *weight, float epsilon, const void *step);
    void (*logits)(const void *logits);
    void (*draw)(const void *draw);
    const void *layers, *step, *weight, *head, *chance; /* weight: the last norm's */
    int64_t count;                                      /* of layers */
    double epsilon;
    int64_t rows, hidden, room, most; /* room: places of a page; most: pages a row may have */
    const float *embed;               /* (vocabulary, hidden) */
    const int8_t *ends;               /* of each token whether a row ends with it */
    const int64_t *pages;             /* (rows, most) */
    float *x;                         /* (rows, hidden): what the step works on */
    int64_t *position, *end, *page, *place, *token; /* of each row */
    double *number, *log_prob;
    const double *numbers; /* (steps, rows): what is drawn with, and what is drawn */
    int64_t *tokens;
    double *log_probs;
    int64_t steps;
    double seconds; /* behind these no step begins */
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void set_layout(const struct steps *s) {
    for (int64_t r = 0; r < s->rows; r++) {
        memcpy(s->x + r * s->hidden, s->embed + s->token[r] * s->hidden, s->hidden * sizeof *s->x);
        s->page[r] = s->pages[r * s->most + s->end[r] / s->room];
        s->place[r] = s->end[r] % s->room;
    }
}

static int any_ended(const struct steps *s) {
    int ended = 0;
    for (int64_t r = 0; r < s->rows; r++) ended |= s->ends[s->token[r]];
    return ended;
}

/* How many steps were done: at least one. */
int64_t keel_steps(const struct steps *s) {
    int64_t rows = s->rows, done = 0;
    double until = now() + s->seconds;
    for (;;) {
        set_layout(s);
        memcpy(s->number, s->numbers + done * rows, rows * sizeof *s->number);
        s->decode(s->layers, s->count, s->step);
        s->norm(s->weight, (float)s->epsilon, s->step);
        s->logits(s->head);
        s->draw(s->chance);
        memcpy(s->tokens + done * rows, s->token, rows * sizeof *s->token);
        memcpy(s->log_probs + done * rows, s->log_prob, rows * sizeof *s->log_prob);
        if (++done == s->steps || any_ended(s) || now() >= until) return done;
        for (int64_t r = 0; r < rows; r++) {
            s->end[r]++;
            s->position[r]++;
        }
    }
}
