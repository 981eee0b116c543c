"""`head.c` from Python: logits of a few states, float32 on a CPU."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keel.models.kernels.build import load

PANEL = 32
"""Outputs in a panel, as in tile.h."""
SHARE = 1 << 19
"""Products for which a further thread pays: about 15 µs, without copying the panels."""


class Logits(ctypes.Structure):
    """struct logits."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias")),
        *((name, c_int64) for name in ("rows", "inputs", "outputs", "threads")),
        *((name, c_void_p) for name in ("rooms", "out")),
    )


@cache
def library() -> Any:
    """The compiled functions, or None."""
    found = load("head")
    if found is not None:
        found.keel_logits.argtypes, found.keel_logits.restype = (c_void_p,), None
    return found


@dataclass(frozen=True, eq=False)
class Product:
    """What a product reads and writes."""

    given: tuple[Tensor, Tensor, Tensor | None]
    rooms: Tensor
    out: Float[Tensor, "R V"]

    def pointers(self) -> Logits:
        """Valid as long as this object."""
        x, weight, bias = self.given
        (rows, outputs), inputs = self.out.shape, x.shape[1]
        start = None if bias is None else bias.data_ptr()
        return Logits(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=start,
            rows=rows,
            inputs=inputs,
            outputs=outputs,
            threads=len(self.rooms),
            rooms=self.rooms.data_ptr(),
            out=self.out.data_ptr(),
        )


class HeadWeight:
    """A contiguous weight (V, H) with a bias or None, to multiply hidden states with."""

    def __init__(self, weight_VH: Float[Tensor, "V H"], bias_V: Float[Tensor, "V"] | None) -> None:
        given = (weight_VH, bias_V)
        assert all(x is None or (x.is_contiguous() and x.dtype == torch.float32) for x in given)
        self._given, self.shape = given, weight_VH.shape
        self.function = library().keel_logits

    def __call__(self, states_RH: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """W h + b of contiguous states, without gradients. The result of a row does not depend on
        other rows or on the number of threads."""
        product = self.of(states_RH)
        self.function(byref(product.pointers()))
        return product.out

    def of(self, states_RH: Float[Tensor, "R H"]) -> Product:
        """The buffers of the product with these states."""
        rows, (outputs, inputs) = len(states_RH), self.shape
        assert states_RH.shape[1] == inputs
        assert states_RH.is_contiguous()
        assert states_RH.dtype == torch.float32
        threads = min(torch.get_num_threads(), 1 + rows * inputs * outputs // SHARE)
        rooms = states_RH.new_empty(threads, PANEL * inputs)
        return Product((states_RH, *self._given), rooms, states_RH.new_empty(rows, outputs))
