"""`head.c` from Python: logits of a few states, float32 on a CPU."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from keel.kernels.build import load

PANEL = 32
"""Outputs side by side, as in tile.h."""
SHARE = 1 << 19
"""Products that are worth a thread: some 15 µs, beside what it takes to lay the panels."""


@cache
def library() -> Any:
    """The compiled functions, or None."""
    found = load("head")
    if found is not None:
        found.keel_logits.argtypes = (*(c_void_p,) * 3, *(c_int64,) * 4, *(c_void_p,) * 2)
        found.keel_logits.restype = None
    return found


class Weight:
    """A contiguous weight (V, H), with a bias or None: what states are multiplied with."""

    def __init__(self, weight_VH: Float[Tensor, "V H"], bias_V: Float[Tensor, "V"] | None) -> None:
        given = (weight_VH, bias_V)
        assert all(x is None or (x.is_contiguous() and x.dtype == torch.float32) for x in given)
        self._given, self.shape = given, weight_VH.shape
        self._function = library().keel_logits

    def __call__(self, states_RH: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """W h + b of contiguous states, without gradients. A row's numbers do not depend on the
        rows beside it, nor on the number of threads."""
        rows, (outputs, inputs) = len(states_RH), self.shape
        threads = min(torch.get_num_threads(), 1 + rows * inputs * outputs // SHARE)
        out = states_RH.new_empty(rows, outputs)
        rooms = states_RH.new_empty(threads, PANEL * inputs)
        if not isinstance(states_RH, FakeTensor):
            assert states_RH.shape[1] == inputs
            assert states_RH.is_contiguous()
            assert states_RH.dtype == torch.float32
            weight, bias = self._given
            self._function(
                states_RH.data_ptr(),
                weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
                *(rows, inputs, outputs, threads),
                rooms.data_ptr(),
                out.data_ptr(),
            )
        return out
