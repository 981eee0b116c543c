"""`sample.c` from Python: tokens sampled from float32 logits on a CPU."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from keel.models.kernels.build import load
from keel.types import Sampling

GROUP = 64
"""Logits that share one maximum, as in sample.c."""
SHARE = 1 << 14
"""Logits for which a further thread pays: about 20 µs."""


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
def library() -> Any:
    """The compiled functions, or None."""
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
    return min(torch.get_num_threads(), 1 + logits.numel() // SHARE)


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
    library().keel_draw(byref(found.pointers()))
    return found.tokens, found.log_probs
