/* Vectors of single precision, as wide as this processor has them. */

#ifndef KEEL_VECTOR_H
#define KEEL_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDE 16
#elif defined(__AVX__)
#define WIDE 8
#else
#define WIDE 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * WIDE)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDE)));

INLINE vec load(const float *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

INLINE vec all(float x) { return x - (vec){}; }

INLINE vec choose(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* e^x to 2 units in the last place (Cody and Waite's reduction, a Taylor polynomial of degree 7 on
   |r| <= ln 2 / 2), 0 and infinite where it is that; what is no number stays none. */
INLINE vec exponential(vec x) {
    x = choose(x < all(-104.0f), all(-104.0f), x);
    x = choose(x > all(89.0f), all(89.0f), x);
    vec halves = choose(x < all(0.0f), all(-0.5f), all(0.5f));
    ivec n = __builtin_convertvector(x * 1.44269504f + halves, ivec);
    vec whole = __builtin_convertvector(n, vec);
    vec r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    vec y = all(1.0f / 5040);
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    /* 2^n in two steps, for n goes from -150 to 128. */
    ivec half = n >> 1;
    return y * (vec)((half + 127) << 23) * (vec)((n - half + 127) << 23);
}

/* Every other number of two vectors, from the first or the second on. */
INLINE vec every_other(vec x, vec y, int from) {
#if defined(__clang__)
    vec out;
    for (int i = 0; i < WIDE / 2; i++) out[i] = x[2 * i + from], out[i + WIDE / 2] = y[2 * i + from];
    return out;
#else
    ivec which;
    for (int i = 0; i < WIDE; i++) which[i] = 2 * i + from;
    return __builtin_shuffle(x, y, which);
#endif
}

/* The halves of two vectors, number by number in turn; the first halves or the second. */
INLINE vec in_turn(vec x, vec y, int half) {
#if defined(__clang__)
    vec out;
    for (int i = 0; i < WIDE / 2; i++)
        out[2 * i] = x[i + half * (WIDE / 2)], out[2 * i + 1] = y[i + half * (WIDE / 2)];
    return out;
#else
    ivec which;
    for (int i = 0; i < WIDE; i++) which[i] = i / 2 + half * (WIDE / 2) + i % 2 * WIDE;
    return __builtin_shuffle(x, y, which);
#endif
}

/* The sums of WIDE vectors, each in the place of its number. */
INLINE vec sums(vec x[WIDE]) {
#pragma GCC unroll 5
    for (int left = WIDE / 2; left > 0; left /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < left; i++)
            x[i] = every_other(x[2 * i], x[2 * i + 1], 0) + every_other(x[2 * i], x[2 * i + 1], 1);
    return x[0];
}

/* Rows become columns: a perfect shuffle, as often as it takes to come round. */
INLINE void transposed(vec x[WIDE]) {
#pragma GCC unroll 5
    for (int times = 1; times < WIDE; times *= 2) {
        vec y[WIDE];
#pragma GCC unroll 16
        for (int i = 0; i < WIDE / 2; i++) {
            y[2 * i] = in_turn(x[i], x[i + WIDE / 2], 0);
            y[2 * i + 1] = in_turn(x[i], x[i + WIDE / 2], 1);
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++) x[i] = y[i];
    }
}

INLINE float total(vec x) {
    float sum[WIDE];
    store(sum, x);
    for (int left = WIDE / 2; left > 0; left /= 2)
        for (int i = 0; i < left; i++) sum[i] += sum[i + left];
    return sum[0];
}

INLINE float largest(vec x) {
    float most = x[0];
    for (int i = 1; i < WIDE; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* The sum of squares of `width` numbers. */
INLINE float squares(const float *x, long width) {
    vec sum = {};
    long i = 0;
    for (; i + WIDE <= width; i += WIDE) sum += load(x + i) * load(x + i);
    float rest = total(sum);
    for (; i < width; i++) rest += x[i] * x[i];
    return rest;
}

#endif
