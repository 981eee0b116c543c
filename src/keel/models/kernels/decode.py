"""`decode.c` and `steps.c` from Python: their structures, and weights in their format."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_double, c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keel.models.kernels import load

Ints = npt.NDArray[np.int64]
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


class DecodeArguments(ctypes.Structure):
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


class StepsArguments(ctypes.Structure):
    """struct steps."""

    _fields_ = (
        *((name, c_void_p) for name in ("decode", "norm", "logits", "draw")),
        *((name, c_void_p) for name in ("layers", "step", "weight", "head", "chance")),
        ("count", c_int64),
        ("epsilon", c_double),
        *((name, c_int64) for name in ("rows", "hidden", "room", "most")),
        *((name, c_void_p) for name in ("embed", "ends", "pages", "x")),
        *((name, c_void_p) for name in ("position", "end", "page", "place", "token")),
        *((name, c_void_p) for name in ("number", "log_prob", "numbers", "tokens", "log_probs")),
        ("steps", c_int64),
        ("seconds", c_double),
    )


def library(dtype: torch.dtype) -> Any:
    """The compiled functions for weights, keys and values in `dtype`, or None."""
    found = load(STORED[dtype]) if dtype in STORED else None
    if found is not None:
        for name in ("keel_enter", "keel_leave"):
            function = getattr(found, name)
            function.argtypes, function.restype = (c_void_p, c_void_p), None
        found.keel_decode.argtypes = (c_void_p, c_int64, c_void_p)
        found.keel_norm.argtypes = (c_void_p, c_float, c_void_p)
        found.keel_copy.argtypes = (*(c_int64,) * 4, *(c_void_p,) * 4)
        found.keel_panels.argtypes = (*(c_void_p,) * 2, *(c_int64,) * 3, c_void_p)
        for name in ("keel_decode", "keel_norm", "keel_copy", "keel_panels"):
            getattr(found, name).restype = None
    return found


@cache
def steps_library() -> Any:
    """The compiled functions of steps.c, or None."""
    found = load("steps")
    if found is not None:
        found.keel_steps.argtypes, found.keel_steps.restype = (c_void_p,), c_int64
    return found


def address(function: Any) -> int:
    """The address of a compiled function."""
    found = ctypes.cast(function, c_void_p).value
    assert found is not None
    return found


def run_steps(work: StepsArguments) -> int:
    """Run the steps; returns how many were done."""
    done: int = steps_library().keel_steps(byref(work))
    return done


def filled(inputs: int, dtype: torch.dtype) -> int:
    """FILLED of stored.h: bfloat16 numbers are multiplied in pairs."""
    return inputs + inputs % 2 if dtype == torch.bfloat16 else inputs


class Panels:
    """A copy of projections with one input, as `struct weight` reads them, stored in `dtype`.

    Their outputs are concatenated; with `gated` the two alternate, half a panel each. `scale
    (inputs,)` is a norm's weight, which would multiply the input.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *parts: tuple[Tensor, Tensor | None],
        scale: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        weights = [weight if weight.stride(1) == 1 else weight.contiguous() for weight, _ in parts]
        outputs, inputs = [len(weight) for weight in weights], weights[0].shape[1]
        places = _alternating(outputs) if gated else _concatenated(outputs)
        unit = 2 if dtype == torch.bfloat16 else 1
        shape = (len(places) // PANEL, filled(inputs, dtype) // unit, PANEL, unit)
        self.panels = weights[0].new_empty(shape, dtype=dtype)
        self.bias = _bias(parts, places)
        self.shape = sum(outputs), inputs
        rows = np.append(np.concatenate([_rows(weight) for weight in weights]), 0)[places]
        scale = None if scale is None else scale.contiguous()
        library(dtype).keel_panels(
            rows.ctypes.data,
            pointer(scale),
            len(places),
            inputs,
            torch.get_num_threads(),
            pointer(self.panels),
        )

    @property
    def pointers(self) -> Weight:
        """Valid as long as this object."""
        outputs, inputs = self.shape
        return Weight(pointer(self.panels), pointer(self.bias), inputs, outputs)


def _concatenated(outputs: Sequence[int]) -> Ints:
    """The output of each column of the panels; -1 where none is left."""
    whole = sum(outputs)
    return np.append(np.arange(whole), np.full(-whole % PANEL, -1))


def _alternating(outputs: Sequence[int]) -> Ints:
    """`_concatenated` for two projections that have half of each panel."""
    half, count = PANEL // 2, outputs[0]
    own = np.append(np.arange(count), np.full(-count % half, -1)).reshape(-1, half)
    return np.concatenate([own, np.where(own < 0, -1, own + count)], axis=1).ravel()


def _rows(weight: Float[Tensor, "O K"]) -> Ints:
    """The address of each output's row."""
    assert weight.dtype == torch.float32
    rows: Ints = weight.data_ptr() + np.arange(len(weight)) * weight.stride(0) * weight.itemsize
    return rows


def _bias(parts: Sequence[tuple[Tensor, Tensor | None]], places: Ints) -> Tensor | None:
    """The projections' biases, column by column; None where there is none."""
    if all(bias is None for _, bias in parts):
        return None
    own = [w.new_zeros(len(w)) if bias is None else bias for w, bias in parts]
    # Columns without an output take the last.
    whole = F.pad(torch.cat(own), (0, 1))
    return whole[torch.from_numpy(places % len(whole))]


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's data."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
