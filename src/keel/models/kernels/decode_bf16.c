/* decode.c with weights, keys, values and the inputs of products in bfloat16. */

#define KEEL_BF16
#include "decode.c"
