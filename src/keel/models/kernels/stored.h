/* What weights, keys and values are stored as, and how it is multiplied: single precision or, where
   KEEL_BF16 is defined, bfloat16 (the upper half of a float), two products to a sum at once. Sums are
   single precision in either case. */

#ifndef KEEL_STORED_H
#define KEEL_STORED_H

#include "vector.h"

#if defined(KEEL_BF16)

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

typedef uint16_t stored;
typedef uint32_t uvec __attribute__((vector_size(4 * WIDE)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDE)));
typedef uvec several;

/* Numbers that are multiplied and added to one sum at once. */
#define UNIT 2

INLINE several get(const stored *from) {
    several x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* The same pair in every place. */
INLINE several repeated(const stored *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair - (several){};
}

/* sum + a b; what the processor has for it takes what is smaller than a normal number as 0. */
INLINE vec multiplied(vec sum, several a, several b) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = sum + (vec)(a << 16) * (vec)(b << 16);
    return sum + (vec)(a & 0xffff0000u) * (vec)(b & 0xffff0000u);
#endif
}

INLINE vec times(several a, several b) { return multiplied((vec){}, a, b); }

INLINE float number(stored x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* The nearest, of two the even one; what is no number stays none. */
INLINE stored rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16;
}

/* WIDE numbers, rounded; gives them as they are now. */
INLINE vec put(stored *to, vec x) {
    uvec bits = (uvec)x, near = bits + 0x7fff + (bits >> 16 & 1);
    near = (uvec)choose(x == x, (vec)near, (vec)(bits | 0x400000));
    halves upper = __builtin_convertvector(near >> 16, halves);
    memcpy(to, &upper, sizeof upper);
    return (vec)(near & 0xffff0000u);
}

#else

typedef float stored;
typedef vec several;

#define UNIT 1

INLINE several get(const stored *from) { return load(from); }
INLINE several repeated(const stored *from) { return all(*from); }
INLINE vec multiplied(vec sum, several a, several b) { return sum + a * b; }
INLINE vec times(several a, several b) { return a * b; }
INLINE float number(stored x) { return x; }
INLINE stored rounded(float x) { return x; }
INLINE vec put(stored *to, vec x) {
    store(to, x);
    return x;
}

#endif

/* Inputs of a product with what fills them up. */
#define FILLED(inputs) (((inputs) + UNIT - 1) / UNIT * UNIT)

#endif
