"""The maths: every equation once, as a pure function of flat tensors.

Tokens of a batch lie end to end in tensors of shape (N,), `lengths_S` says where each sequence
ends, `groups_S` which prompt it answers; there is no padding and no mask. A docstring holds the
equation, indented, and its source. Functions keep the dtype and the device of their arguments.

Suffixes: `_N` completion token, `_S` sequence, `_K` reasoning step, `_V` vocabulary entry; in the
background, `_B` transition and `_A` action.
"""
