/* From logits and one number of [0, 1) to a token and its log-probability, row by row.

   A token's weight is e^((logit - largest) / T), in double precision; what is not a number or larger
   than all numbers gives the row's log-probability as not a number. The token is the first whose
   cumulative weight exceeds number * total: in the order of the vocabulary; of a truncated
   distribution, which is a beginning of the tokens in falling order (of equals the lowest id first),
   in that order. Sums have an order of their own, which threads do not change. */

#include "double.h"
#include "entries.h"

#include <float.h>

#if defined(_OPENMP)
extern int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* Numbers weighed at a time; logits that go by one largest number; those of a block of sums, of
   which there are at most BLOCKS. */
#define SPAN 32
#define GROUP 64
#define BLOCK 256
#define BLOCKS 1024

/* Bins of a temperature's width, of all; vocabularies that are sorted without. */
#define WIDTH 32
#define BINS 2048
#define FLAT 1024

struct draw {
    const float *logits;   /* (rows, vocabulary), `step` from row to row */
    const double *numbers; /* (rows) */
    int64_t step, rows, vocabulary, threads, room, top_k;
    double temperature, top_p, min_p; /* off: 0, 1, 0 */
    double *rooms;                    /* (threads, room); null where nothing truncates */
    int64_t *tokens;
    double *log_probs;
};

/* A row: its logits, the largest, and what they are multiplied with. */
struct row {
    const float *logits;
    int64_t count;
    double most, inverse;
};

static double sum_of(const double *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i];
    return sum;
}

/* The largest of some, or not a number where one of them is none. */
static float peak(const float *x, int64_t count) {
    vec most = all(-INFINITY);
    ivec none = {};
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE) {
        vec now = load(x + i);
        none |= now != now;
        most = choose(now > most, now, most);
    }
    vec part = choose(none, all(NAN), most);
    float top[WIDE];
    store(top, part);
    for (int left = WIDE / 2; left > 0; left /= 2)
        for (int j = 0; j < left; j++)
            top[j] = top[j] >= top[j + left] || top[j] != top[j] ? top[j] : top[j + left];
    float found = top[0];
    for (; i < count; i++) found = found >= x[i] || found != found ? found : x[i];
    return found;
}

/* Of each `length` logits the largest; returns that of all, or not a number. */
static double peaks(const float *logits, int64_t count, int64_t length, int64_t threads, float *each) {
    int64_t parts = (count + length - 1) / length;
#define PEAK(p)                                                  \
    int64_t first = p * length, left = count - first;            \
    each[p] = peak(logits + first, left < length ? left : length)
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t p = 0; p < parts; p++) { PEAK(p); }
    } else {
        for (int64_t p = 0; p < parts; p++) { PEAK(p); }
    }
    return peak(each, parts);
}

INLINE void weigh(const struct row *r, const float *logits, dvec weight[SPAN / DOUBLES]) {
#pragma GCC unroll 16
    for (int j = 0; j < SPAN / DOUBLES; j++)
        weight[j] = decayed((widened(logits + j * DOUBLES) - r->most) * r->inverse);
}

/* The same of less than SPAN logits; what is not there has no weight. */
static void weigh_some(const struct row *r, const float *logits, int64_t count, double weight[SPAN]) {
    float some[SPAN];
    for (int j = 0; j < SPAN; j++) some[j] = -INFINITY;
    memcpy(some, logits, (count < SPAN ? count : SPAN) * sizeof *some);
    dvec found[SPAN / DOUBLES];
    weigh(r, some, found);
    memcpy(weight, found, sizeof found);
}

static double weight_of(const struct row *r, const float *logits, int64_t count) {
    dvec sum[SPAN / DOUBLES] = {}, some[SPAN / DOUBLES];
    int64_t i = 0;
    for (; i + SPAN <= count; i += SPAN) {
        weigh(r, logits + i, some);
#pragma GCC unroll 16
        for (int j = 0; j < SPAN / DOUBLES; j++) sum[j] += some[j];
    }
    double lane[SPAN], rest[SPAN];
    memcpy(lane, sum, sizeof sum);
    if (i < count) {
        weigh_some(r, logits + i, count - i, rest);
        for (int j = 0; j < SPAN; j++) lane[j] += rest[j];
    }
    for (int left = SPAN / 2; left > 0; left /= 2)
        for (int j = 0; j < left; j++) lane[j] += lane[j + left];
    return lane[0];
}

static int64_t block_length(int64_t count) {
    int64_t most = (int64_t)BLOCK * BLOCKS;
    return BLOCK * ((count + most - 1) / most);
}

/* The weights of the row's blocks; returns their sum. */
static double weights(const struct row *r, int64_t threads, double each[BLOCKS]) {
    int64_t length = block_length(r->count), blocks = (r->count + length - 1) / length;
#define WEIGHT(b)                                                                \
    int64_t first = b * length, left = r->count - first;                         \
    each[b] = weight_of(r, r->logits + first, left < length ? left : length)
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t b = 0; b < blocks; b++) { WEIGHT(b); }
    } else {
        for (int64_t b = 0; b < blocks; b++) { WEIGHT(b); }
    }
    return sum_of(each, blocks);
}

/* The first token whose cumulative weight exceeds `target`. Blocks' sums are rounded apart from those
   within: where none exceeds it, it is the last that weighs anything. */
static int64_t inverted(const struct row *r, const double *each, double target) {
    int64_t length = block_length(r->count), blocks = (r->count + length - 1) / length;
    int64_t block = 0, found = 0;
    double below = 0;
    while (block + 1 < blocks && below + each[block] <= target) below += each[block++];
    int64_t first = block * length, end = first + length < r->count ? first + length : r->count;
    for (int64_t i = first; i < end; i += SPAN) {
        double weight[SPAN];
        weigh_some(r, r->logits + i, end - i, weight);
        for (int64_t j = 0; j < SPAN && i + j < end; j++) {
            below += weight[j];
            if (weight[j] > 0) found = i + j;
            if (below > target) return found;
        }
    }
    return found;
}

static int64_t first_of(const float *x, int64_t count, float what) {
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        int hit = 0;
        for (int j = 0; j < BLOCK; j++) hit |= x[i + j] == what;
        if (hit) break;
    }
    while (x[i] != what) i++;
    return i;
}

/* No logit that falls short of the largest by at most `depth` temperatures lies below; and the
   other way round. Wider by more than anything here is rounded by. */
static float lowest(const struct row *r, double depth) {
    double fall = (depth + 1e-9) / r->inverse;
    double least = r->most - fall - 1e-12 * (fabs(r->most) + fall);
    return least > -FLT_MAX ? nextafterf((float)least, -FLT_MAX) : -FLT_MAX;
}

static float highest(const struct row *r, double depth) {
    double fall = fmin(depth / r->inverse, FLT_MAX);
    double most = r->most - fall + 1e-12 * (fabs(r->most) + fall);
    return most < FLT_MAX ? nextafterf((float)most, FLT_MAX) : FLT_MAX;
}

/* Entries of the logits from `least` to `most`, in the order of their ids; how many. */
static int64_t gathered(const struct row *r, const float *top, float least, float most,
                        uint64_t *entry) {
    int64_t found = 0;
    for (int64_t first = 0; first < r->count; first += SPAN) {
        if (top[first / GROUP] < least) continue;
        const float *x = r->logits + first;
        int64_t some = r->count - first < SPAN ? r->count - first : SPAN;
        if (some == SPAN) {
            int hit = 0;
            for (int j = 0; j < SPAN; j++) hit |= (x[j] >= least) & (x[j] <= most);
            if (!hit) continue;
        }
        for (int64_t j = 0; j < some; j++) {
            entry[found] = entry_of(x[j], first + j);
            found += (x[j] >= least) & (x[j] <= most);
        }
    }
    return found;
}

/* A number that at least `top_k` logits reach, for each group has its largest. */
static float reached(const float *top, int64_t groups, int64_t top_k, uint64_t *entry,
                     uint64_t *other) {
    if (top_k > groups) return -FLT_MAX;
    for (int64_t g = 0; g < groups; g++) entry[g] = entry_of(top[g], g);
    sorted(entry, other, groups);
    return logit_of(entry[top_k - 1]);
}

/* Entries in falling order, with their weights. */
struct some {
    uint64_t *entry;
    double *weight; /* as long as the vocabulary, as is `entry` */
    int64_t count;
};

static void order(const struct row *r, struct some *s) {
    sorted(s->entry, (uint64_t *)s->weight, s->count);
    for (int64_t i = 0; i < s->count; i += SPAN) {
        int64_t few = s->count - i < SPAN ? s->count - i : SPAN;
        float logits[SPAN];
        double weight[SPAN];
        for (int64_t j = 0; j < few; j++) logits[j] = logit_of(s->entry[i + j]);
        weigh_some(r, logits, few, weight);
        memcpy(s->weight + i, weight, few * sizeof *weight);
    }
}

/* Logits lie in bins by how far they fall short of the largest, the last one for all the rest. */
INLINE int bin_of(const struct row *r, double logit) {
    double depth = (r->most - logit) * r->inverse * WIDTH;
    return depth < BINS - 1 ? (int)depth : BINS - 1;
}

/* The weights of the bins, of which those below `least` are not asked for. */
static void binned(const struct row *r, const float *top, float least, double mass[BINS]) {
    memset(mass, 0, BINS * sizeof *mass);
    for (int64_t first = 0; first < r->count; first += SPAN) {
        if (top[first / GROUP] < least) continue;
        int64_t some = r->count - first < SPAN ? r->count - first : SPAN;
        double weight[SPAN];
        int bin[SPAN];
        weigh_some(r, r->logits + first, some, weight);
        for (int64_t j = 0; j < some; j++) bin[j] = bin_of(r, r->logits[first + j]);
        for (int64_t j = 0; j < some; j++) mass[bin[j]] += weight[j];
    }
}

static void take_bin(const struct row *r, const float *top, const double *mass, int bin,
                     struct some *s) {
    s->count = 0;
    if (mass[bin] == 0) return;
    float least = lowest(r, bin + 1 < BINS ? (bin + 1) / (double)WIDTH : -NOTHING);
    int64_t near = gathered(r, top, least, highest(r, bin / (double)WIDTH), s->entry);
    for (int64_t i = 0; i < near; i++)
        if (bin_of(r, logit_of(s->entry[i])) == bin) s->entry[s->count++] = s->entry[i];
    order(r, s);
}

/* Nothing below is kept, nor counts for top-p. */
static float least_kept(const struct draw *d, const struct row *r) {
    double depth = d->min_p > 0 && d->top_p == 1 ? -log(d->min_p) : -NOTHING;
    return lowest(r, fmin(depth, -NOTHING));
}

/* All that truncation keeps and, for top-p behind top-k, all that this keeps. */
static void take_all(const struct draw *d, const struct row *r, const float *top, struct some *s) {
    float least = least_kept(d, r);
    if (d->top_k) {
        int64_t groups = (r->count + GROUP - 1) / GROUP;
        float kth = reached(top, groups, d->top_k, s->entry, (uint64_t *)s->weight);
        least = fmaxf(least, kth);
    }
    s->count = gathered(r, top, least, FLT_MAX, s->entry);
    order(r, s);
    if (d->top_k && d->top_k < s->count) s->count = d->top_k;
}

/* As many bins as min-p keeps all of. */
static int bins_kept(double min_p) {
    double depth = min_p > 0 ? (-log(min_p) - 1e-9) * WIDTH : BINS;
    return depth < BINS - 1 ? (int)fmax(depth, 0) : BINS - 1;
}

/* How many entries are kept where `kept` is before them, to which their weight is added. */
static int64_t kept_of(const struct some *s, double enough, double min_p, double *kept) {
    int64_t last = 0;
    while (last < s->count && *kept < enough && s->weight[last] >= min_p) *kept += s->weight[last++];
    return last;
}

/* The bin in which truncation ends, with the entries kept of it, their number and all that is kept. */
static int end_of(const struct draw *d, const struct row *r, const float *top, const double *mass,
                  double enough, struct some *s, int64_t *last, double *kept) {
    double before = 0;
    int bin = 0, most = bins_kept(d->min_p);
    for (;; before += mass[bin++]) {
        for (; bin < most && before + mass[bin] < enough; bin++) before += mass[bin];
        take_bin(r, top, mass, bin, s);
        *kept = before;
        *last = kept_of(s, enough, d->min_p, kept);
        /* Sums in another order may fall short of what the bin's has reached. */
        if (*last < s->count || *kept >= enough || bin + 1 == BINS) return bin;
    }
}

static double truncated(const struct draw *d, const struct row *r, double number, const float *top,
                        struct some *s, int64_t *token) {
    double mass[BINS], kept = 0, below = 0, enough = INFINITY;
    int bins = !d->top_k && r->count > FLAT, end = 0, bin = 0;
    int64_t last, j = 0;
    if (bins) {
        binned(r, top, least_kept(d, r), mass);
        if (d->top_p < 1) enough = d->top_p * sum_of(mass, BINS);
        end = end_of(d, r, top, mass, enough, s, &last, &kept);
    } else {
        take_all(d, r, top, s);
        if (d->top_p < 1) enough = d->top_p * sum_of(s->weight, s->count);
        last = kept_of(s, enough, d->min_p, &kept);
    }
    double target = number * kept;
    while (bin < end && below + mass[bin] <= target) below += mass[bin++];
    if (bin < end) {
        take_bin(r, top, mass, bin, s);
        last = s->count;
    }
    while (j < last && below + s->weight[j] <= target) below += s->weight[j++];
    /* Also a bin's sum may exceed the target where that in falling order does not. */
    while (j == last || s->weight[j] == 0) j--;
    *token = (uint32_t)s->entry[j];
    return (logit_of(s->entry[j]) - r->most) * r->inverse - log(kept);
}

static void drawn(const struct draw *d, int64_t n, int64_t threads, double *room) {
    double inverse = d->temperature > 0 ? 1 / d->temperature : 1;
    struct row r = {d->logits + n * d->step, d->vocabulary, 0, fmin(fmax(inverse, DBL_MIN), DBL_MAX)};
    int cut = d->rooms != 0;
    float some[BLOCKS], *top = cut ? (float *)(room + 2 * r.count) : some;
    r.most = peaks(r.logits, r.count, cut ? GROUP : block_length(r.count), threads, top);
    if (!isfinite(r.most)) {
        d->tokens[n] = 0;
        d->log_probs[n] = NAN;
        return;
    }
    double number = fmin(fmax(d->numbers[n], 0), 1 - DBL_EPSILON / 2);
    if (cut) {
        struct some s = {(uint64_t *)room, room + r.count, 0};
        d->log_probs[n] = truncated(d, &r, number, top, &s, d->tokens + n);
        return;
    }
    double each[BLOCKS], total = weights(&r, threads, each);
    int64_t token = d->temperature > 0 ? inverted(&r, each, number * total)
                                       : first_of(r.logits, r.count, r.most);
    d->tokens[n] = token;
    d->log_probs[n] = (r.logits[token] - r.most) * r.inverse - log(total);
}

/* Rows are spread over the threads; where there are fewer, each row's sums are. */
void keel_draw(const struct draw *d) {
    if (d->threads == 1 || d->rows < d->threads) {
        for (int64_t n = 0; n < d->rows; n++) drawn(d, n, d->threads, d->rooms);
        return;
    }
#pragma omp parallel for num_threads(d->threads) schedule(dynamic, 1)
    for (int64_t n = 0; n < d->rows; n++)
        drawn(d, n, 1, d->rooms ? d->rooms + omp_get_thread_num() * d->room : 0);
}
