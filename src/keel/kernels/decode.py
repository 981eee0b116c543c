"""`decode.c` from Python: its structures, and tensors as it takes them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from keel.kernels.build import load

PANEL = 32
"""Columns of a panel, as in product.h."""
PAGE = 16
"""Places of a page, as in attention.h."""
STORED = {torch.float32: "decode", torch.bfloat16: "decode_bf16"}
"""The library for each type that weights, keys and values may be stored as."""


class Weight(ctypes.Structure):
    """struct weight."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
    )


class Layer(ctypes.Structure):
    """struct layer."""

    _fields_ = (
        *((name, Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        *((name, c_int64) for name in ("number", "window")),
        *((name, c_float) for name in ("epsilon", "scaling")),
    )


class Step(ctypes.Structure):
    """struct step."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "shared_heads", "width")),
        *((name, c_int64) for name in ("tokens", "prompt_tokens", "threads", "score_room")),
        *((name, c_int64) for name in ("prompt_most", "answer_most")),
        *((name, c_void_p) for name in ("position", "page", "place")),
        *((name, c_void_p) for name in ("slot", "end", "length", "order")),
        *((name, c_void_p) for name in ("prompt_pages", "answer_pages", "cos", "sin")),
        *((name, c_void_p) for name in ("x", "qkv", "seen", "mid", "scores", "taken")),
    )


def library(dtype: torch.dtype) -> Any:
    """The compiled functions that store numbers as `dtype`, or None."""
    found = load(STORED[dtype]) if dtype in STORED else None
    if found is not None:
        for name in ("keel_enter", "keel_leave"):
            function = getattr(found, name)
            function.argtypes, function.restype = (c_void_p, c_void_p), None
        found.keel_decode.argtypes = (c_void_p, c_int64, c_void_p)
        found.keel_norm.argtypes = (c_void_p, c_float, c_void_p)
        found.keel_copy.argtypes = (*(c_int64,) * 4, *(c_void_p,) * 4)
        for name in ("keel_decode", "keel_norm", "keel_copy"):
            getattr(found, name).restype = None
    return found


def filled(inputs: int, dtype: torch.dtype) -> int:
    """FILLED of stored.h: bfloat16 numbers are multiplied by pairs."""
    return inputs + inputs % 2 if dtype == torch.bfloat16 else inputs


class Arena:
    """One block of memory for many tensors, which goes back to the system as a whole."""

    def __init__(self, numbers: int, like: Tensor) -> None:
        self._room = like.new_empty(numbers)
        self._used = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensors."""
        return self._room.dtype

    def take(self, *shape: int) -> Tensor:
        """The next tensor of this shape; undefined numbers."""
        first, self._used = self._used, self._used + math.prod(shape)
        return self._room[first : self._used].view(shape)


class Panels:
    """A weight (outputs, inputs) with its bias, as `struct weight` reads them, in the arena's type.

    The projections' outputs lie side by side; `gated`: the two lie by turns, half a panel each.
    `scale (inputs,)` is what x would be multiplied with before: a norm's weights.
    """

    def __init__(
        self,
        arena: Arena,
        *parts: tuple[Tensor, Tensor | None],
        scale: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        weights = [weight for weight, _ in parts]
        biases = [bias for _, bias in parts]
        join = _by_turns if gated else _side_by_side
        weight = join(weights)
        weight = weight if scale is None else weight * scale
        inputs = filled(weight.shape[1], arena.dtype)
        weight = F.pad(weight, (0, inputs - weight.shape[1]))
        unit = 2 if arena.dtype == torch.bfloat16 else 1
        panels = weight.view(-1, PANEL, inputs // unit, unit).transpose(1, 2)
        self.panels = arena.take(*panels.shape).copy_(panels)
        self.bias = None if all(b is None for b in biases) else join(_columns(biases, weights))
        self.shape = sum(len(part) for part in weights), weights[0].shape[1]

    @staticmethod
    def numbers(*parts: nn.Linear, dtype: torch.dtype, gated: bool = False) -> int:
        """Of the panels of these projections."""
        step = PANEL // len(parts) if gated else PANEL
        outputs = [part.out_features for part in parts]
        whole = [-(-n // step) * step for n in (outputs if gated else [sum(outputs)])]
        return sum(whole) * filled(parts[0].in_features, dtype)

    @property
    def pointers(self) -> Weight:
        """Valid as long as this is."""
        outputs, inputs = self.shape
        return Weight(pointer(self.panels), pointer(self.bias), inputs, outputs)


def _columns(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(biases, weights, strict=True)
    return [(w.new_zeros(len(w)) if b is None else b).unsqueeze(1) for b, w in pairs]


def _side_by_side(parts: Sequence[Tensor]) -> Float[Tensor, "O K"]:
    both = torch.cat(list(parts))
    return F.pad(both, (0, 0, 0, -len(both) % PANEL))


def _by_turns(parts: Sequence[Tensor]) -> Float[Tensor, "O K"]:
    half, inputs = PANEL // 2, parts[0].shape[1]
    filled = [F.pad(part, (0, 0, 0, -len(part) % half)).view(-1, half, inputs) for part in parts]
    return torch.cat(filled, dim=1).view(-1, inputs)


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
