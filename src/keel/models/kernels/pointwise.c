/* What happens to each token by itself between the products of a Llama-like layer, with gradients:
   norms, rotations and gates, each in one pass over memory. In single precision. */

#include "vector.h"

/* y = x / sqrt(mean x^2 + epsilon) * weight, row by row; `scale` keeps what x was multiplied with.
   Unless `update` is null, x is `sum` = x + update. */
void keel_rms(const float *x, const float *update, const float *weight, float epsilon, int64_t rows,
              int64_t width, int64_t threads, float *sum, float *y, float *scale) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * width;
        if (update) {
            const float *more = update + r * width;
            float *both = sum + r * width;
            for (int64_t i = 0; i < width; i++) both[i] = in[i] + more[i];
            in = both;
        }
        float *out = y + r * width, s = 1.0f / sqrtf(squares(in, width) / width + epsilon);
        for (int64_t i = 0; i < width; i++) out[i] = in[i] * s * weight[i];
        scale[r] = s;
    }
}

/* With g = dy * weight, s the scale: dx = s (g - x s^2 mean(g x)). */
INLINE void row_back(const float *dy, const float *x, const float *weight, float s, int64_t width,
                     float *dx) {
    vec sum = {};
    int64_t i = 0;
    for (; i + WIDE <= width; i += WIDE) sum += load(dy + i) * load(weight + i) * load(x + i);
    float mean = total(sum);
    for (; i < width; i++) mean += dy[i] * weight[i] * x[i];
    mean = mean / width * s * s;
    for (i = 0; i < width; i++) dx[i] = s * (dy[i] * weight[i] - x[i] * mean);
}

/* dx is each row's own and what is `beside` it, d weight = sum over rows of dy x s; `beside` or
   d weight may be null. Every `block` rows have a sum of their own in `parts`: what is added to what
   does not depend on the number of threads. */
void keel_rms_back(const float *dy, const float *beside, const float *x, const float *weight,
                   const float *scale, int64_t rows, int64_t width, int64_t block, int64_t threads,
                   float *dx, float *d_weight, float *parts) {
    int64_t blocks = (rows + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        float *part = d_weight ? parts + b * width : 0;
        if (d_weight) memset(part, 0, width * sizeof *part);
        for (int64_t r = b * block; r < rows && r < (b + 1) * block; r++) {
            const float *in = x + r * width, *grad = dy + r * width;
            float *out = dx + r * width;
            row_back(grad, in, weight, scale[r], width, out);
            if (beside)
                for (int64_t i = 0; i < width; i++) out[i] += beside[r * width + i];
            if (d_weight)
                for (int64_t i = 0; i < width; i++) part[i] += grad[i] * in[i] * scale[r];
        }
    }
    if (!d_weight) return;
    memset(d_weight, 0, width * sizeof *d_weight);
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = 0; i < width; i++) d_weight[i] += parts[b * width + i];
}

/* Numbers i and i + width/2 of each head turned by the token's angle i; `sign` -1 turns back. x may
   have `step` numbers from token to token, y (tokens, heads, width). */
void keel_turn(const float *x, int64_t step, const float *cos, const float *sin, float sign,
               int64_t tokens, int64_t heads, int64_t width, int64_t threads, float *y) {
    int64_t half = width / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * half, *s = sin + t * half;
        for (int64_t h = 0; h < heads; h++) {
            const float *a = x + t * step + h * width, *b = a + half;
            float *first = y + (t * heads + h) * width, *second = first + half;
            for (int64_t i = 0; i < half; i++) {
                float turn = sign * s[i];
                first[i] = a[i] * c[i] - b[i] * turn;
                second[i] = b[i] * c[i] + a[i] * turn;
            }
        }
    }
}

/* y = gate / (1 + e^-gate) * up */
void keel_gated(const float *gate, const float *up, int64_t count, int64_t threads, float *y) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count / WIDE; i++) {
        vec g = load(gate + i * WIDE);
        store(y + i * WIDE, g / (1.0f + exponential(-g)) * load(up + i * WIDE));
    }
    for (int64_t i = count / WIDE * WIDE; i < count; i++)
        y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* With s = 1 / (1 + e^-gate): d up = dy gate s, d gate = dy up s (1 + gate (1 - s)). */
void keel_gated_back(const float *dy, const float *gate, const float *up, int64_t count,
                     int64_t threads, float *d_gate, float *d_up) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count / WIDE; i++) {
        vec g = load(gate + i * WIDE), u = load(up + i * WIDE), d = load(dy + i * WIDE);
        vec s = 1.0f / (1.0f + exponential(-g));
        store(d_up + i * WIDE, d * g * s);
        store(d_gate + i * WIDE, d * u * s * (1.0f + g * (1.0f - s)));
    }
    for (int64_t i = count / WIDE * WIDE; i < count; i++) {
        float s = 1.0f / (1.0f + expf(-gate[i]));
        d_up[i] = dy[i] * gate[i] * s;
        d_gate[i] = dy[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
    }
}
