/* Rows become columns. */

#ifndef KEEL_ACROSS_H
#define KEEL_ACROSS_H

#include "vector.h"

/* Numbers `k` to `k` + WIDE of WIDE rows, each of them side by side. What lies behind the `inputs`
   numbers of a row, and all of one that is null, is 0. */
INLINE void across(const float *const row[WIDE], long k, long inputs, vec column[WIDE]) {
    long here = inputs - k < WIDE ? inputs - k : WIDE;
    for (long i = 0; i < WIDE; i++) {
        column[i] = (vec){};
        if (row[i] && here == WIDE) column[i] = load(row[i] + k);
        else if (row[i]) memcpy(column + i, row[i] + k, here * sizeof(float));
    }
    transposed(column);
}

#endif
