/* Logits in falling order: those that are equal in the order of their ids. */

#ifndef KEEL_ENTRIES_H
#define KEEL_ENTRIES_H

#include "vector.h"

/* A logit and its id as one number, which is the smaller the larger the logit; of equal logits that
   of the lowest id. */
INLINE uint64_t entry_of(float logit, int64_t id) {
    uint32_t bits;
    logit += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &logit, sizeof bits);
    uint32_t falling = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return (uint64_t)falling << 32 | (uint64_t)id;
}

INLINE float logit_of(uint64_t entry) {
    uint32_t falling = entry >> 32, bits = falling >> 31 ? falling : ~falling & 0x7fffffffu;
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

/* Bits of a digit, and as few entries as are sorted one by one. */
#define DIGIT 11
#define FEW 32

/* Sorts entries that rise in their ids, by their logits digit by digit; `other` is as long. */
static void sorted(uint64_t *entry, uint64_t *other, int64_t count) {
    uint64_t *from = entry, *to = other;
    int bits = count < 2048 ? 8 : DIGIT;
    if (count <= FEW) {
        for (int64_t i = 1; i < count; i++) {
            uint64_t now = entry[i];
            int64_t j = i;
            for (; j > 0 && entry[j - 1] > now; j--) entry[j] = entry[j - 1];
            entry[j] = now;
        }
        return;
    }
    for (int shift = 32; shift < 64; shift += bits) {
        uint32_t place[1 << DIGIT], size = 1u << bits, sum = 0;
        memset(place, 0, size * sizeof *place);
        for (int64_t i = 0; i < count; i++) place[from[i] >> shift & (size - 1)]++;
        if (place[from[0] >> shift & (size - 1)] == count) continue;
        for (uint32_t d = 0; d < size; d++) {
            uint32_t here = place[d];
            place[d] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < count; i++) to[place[from[i] >> shift & (size - 1)]++] = from[i];
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != entry) memcpy(entry, from, count * sizeof *entry);
}

#endif
