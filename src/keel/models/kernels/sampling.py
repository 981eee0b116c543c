"""`head.c` and `sample.c` from Python: from hidden states to sampled tokens, float32 on a CPU."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keel.models.kernels import load
from keel.types import Sampling

PANEL = 32
"""Outputs in a panel, as in tile.h."""
GROUP = 64
"""Logits that share one maximum, as in sample.c."""
SHARED_PRODUCTS = 1 << 19
"""Products for which a further thread pays: about 15 µs, without copying the panels."""
SHARED_LOGITS = 1 << 14
"""Logits for which a further thread pays: about 20 µs."""


class Logits(ctypes.Structure):
    """struct logits."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias")),
        *((name, c_int64) for name in ("rows", "inputs", "outputs", "threads")),
        *((name, c_void_p) for name in ("rooms", "out")),
    )


@cache
def head_library() -> Any:
    """The compiled functions of head.c, or None."""
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
        self.function = head_library().keel_logits

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
        threads = min(torch.get_num_threads(), 1 + rows * inputs * outputs // SHARED_PRODUCTS)
        rooms = states_RH.new_empty(threads, PANEL * inputs)
        return Product((states_RH, *self._given), rooms, states_RH.new_empty(rows, outputs))


class SampleArguments(ctypes.Structure):
    """struct draw."""

    _fields_ = (
        ("logits", c_void_p),
        ("numbers", c_void_p),
        *((name, c_int64) for name in ("step", "rows", "vocabulary", "threads", "room", "top_k")),
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        *((name, c_void_p) for name in ("rooms", "tokens", "log_probs")),
    )


@cache
def sample_library() -> Any:
    """The compiled functions of sample.c, or None."""
    found = load("sample")
    if found is not None:
        found.keel_draw.argtypes, found.keel_draw.restype = (c_void_p,), None
    return found


@dataclass(frozen=True, eq=False)
class Draw:
    """What sampling reads and writes: float32 logits (R, V) with contiguous rows, a float64 number
    for each row, tokens, and float64 log-probabilities."""

    logits: Tensor
    uniform: Tensor
    sampling: Sampling
    rooms: Tensor | None
    tokens: Tensor
    log_probs: Tensor

    def pointers(self) -> SampleArguments:
        """Valid as long as this object."""
        logits, uniform, sampling, rooms = self.logits, self.uniform, self.sampling, self.rooms
        rows, vocabulary = logits.shape
        assert logits.dtype == torch.float32
        assert vocabulary == 1 or logits.stride(1) == 1
        assert uniform.dtype == torch.float64
        assert uniform.is_contiguous()
        return SampleArguments(
            logits=logits.data_ptr(),
            numbers=uniform.data_ptr(),
            step=logits.stride(0),
            rows=rows,
            vocabulary=vocabulary,
            threads=_threads(logits),
            room=0 if rooms is None else rooms.shape[1],
            top_k=sampling.top_k if sampling.top_k < vocabulary else 0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            rooms=None if rooms is None else rooms.data_ptr(),
            tokens=self.tokens.data_ptr(),
            log_probs=self.log_probs.data_ptr(),
        )


def _threads(logits: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + logits.numel() // SHARED_LOGITS)


def draw_of(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Draw:
    """The buffers to sample from these logits.

    A truncated distribution needs about 16 bytes for each token of the vocabulary and thread.
    """
    rows, vocabulary = logits.shape
    tokens = uniform.new_empty(rows, dtype=torch.int64)
    rooms = None
    if sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0):
        room = 2 * vocabulary + vocabulary // GROUP + 1
        rooms = uniform.new_empty(min(_threads(logits), rows), room)
    return Draw(logits, uniform, sampling, rooms, tokens, uniform.new_empty(rows))


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """`engines.sampler.sample_tokens` by compiled code."""
    found = draw_of(logits, uniform, sampling)
    sample_library().keel_draw(byref(found.pointers()))
    return found.tokens, found.log_probs
