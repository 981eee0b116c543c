/* Logits: states times the rows of a weight as it lies. In single precision.

   Each number is one sum, in the order of the inputs: it does not depend on the states next to it. */

#include "across.h"
#include "tile.h"

#if defined(_OPENMP)
extern int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* `count` rows of the weight as a panel, filled up with zeros. */
static void lay(const float *weight, long count, long inputs, float *panel) {
    for (long j = 0; j < PANEL; j += WIDE) {
        const float *row[WIDE];
        for (long i = 0; i < WIDE; i++) row[i] = j + i < count ? weight + (j + i) * inputs : 0;
        for (long k = 0; k < inputs; k += WIDE) {
            vec column[WIDE];
            across(row, k, inputs, column);
            for (long i = 0; i < WIDE && k + i < inputs; i++)
                store(panel + (k + i) * PANEL + j, column[i]);
        }
    }
}

struct logits {
    const float *x, *weight, *bias; /* (rows, inputs), (outputs, inputs), (outputs) or null */
    int64_t rows, inputs, outputs, threads;
    float *rooms, *out; /* (threads, PANEL * inputs), (rows, outputs) */
};

/* out = x W^T + b */
void keel_logits(const struct logits *l) {
    const float *x = l->x, *weight = l->weight, *bias = l->bias;
    int64_t rows = l->rows, inputs = l->inputs, outputs = l->outputs;
#pragma omp parallel for num_threads(l->threads) schedule(static)
    for (int64_t first = 0; first < outputs; first += PANEL) {
        float *panel = l->rooms + omp_get_thread_num() * PANEL * inputs, sum[ROWS][PANEL];
        long count = outputs - first < PANEL ? outputs - first : PANEL;
        lay(weight + first * inputs, count, inputs, panel);
        for (long r = 0; r < rows; r += ROWS) {
            long some = rows - r < ROWS ? rows - r : ROWS;
            struct left a = {x + r * inputs, inputs, 1};
            tile(some, a, (struct panel){panel, PANEL}, inputs, sum[0], PANEL, 0);
            for (long i = 0; i < some; i++) {
                float *y = l->out + (r + i) * outputs + first;
                for (long j = 0; j < count; j++) y[j] = sum[i][j] + (bias ? bias[first + j] : 0.0f);
            }
        }
    }
}
