/* Vectors of double precision, and e^x of them. */

#ifndef KEEL_DOUBLE_H
#define KEEL_DOUBLE_H

#include "vector.h"

#define DOUBLES (WIDE / 2)

typedef double dvec __attribute__((vector_size(4 * WIDE)));
typedef uint64_t lvec __attribute__((vector_size(4 * WIDE)));

INLINE dvec every(double x) { return x - (dvec){}; }

INLINE dvec widened(const float *from) {
    float x __attribute__((vector_size(2 * WIDE)));
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, dvec);
}

/* Below this e^x counts as 0: it would be less than what double precision holds in full. */
#define NOTHING -708.0

/* e^x for x <= 0, its relative error below 1.8e-16: Cody and Waite's reduction to |r| <= ln 2 / 2, and
   a Taylor polynomial of degree 13, whose rest is below 5e-18. 1 at 0, never more; 0 below NOTHING. */
INLINE dvec decayed(dvec x) {
    const double shift = 0x1.8p52; /* added, it leaves a whole number in the last bits */
    dvec rounded = x * 0x1.71547652b82fep0 + shift;
    dvec n = rounded - shift;
    dvec r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    dvec y = every(1.0 / 6227020800);
    y = y * r + 1.0 / 479001600;
    y = y * r + 1.0 / 39916800;
    y = y * r + 1.0 / 3628800;
    y = y * r + 1.0 / 362880;
    y = y * r + 1.0 / 40320;
    y = y * r + 1.0 / 5040;
    y = y * r + 1.0 / 720;
    y = y * r + 1.0 / 120;
    y = y * r + 1.0 / 24;
    y = y * r + 1.0 / 6;
    y = y * r + 0.5;
    y = y * r + 1.0;
    y = y * r + 1.0;
    lvec grown = (lvec)y + ((lvec)rounded << 52);
    return (dvec)(grown & ~(lvec)(x < every(NOTHING)));
}

#endif
