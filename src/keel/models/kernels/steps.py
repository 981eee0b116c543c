"""`steps.c` from Python: several steps of decoding in one call."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

from keel.models.kernels.build import load


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


@cache
def library() -> Any:
    """The compiled functions, or None."""
    found = load("steps")
    if found is not None:
        found.keel_steps.argtypes, found.keel_steps.restype = (c_void_p,), c_int64
    return found


def address(function: Any) -> int:
    """The address of a compiled function."""
    found = ctypes.cast(function, c_void_p).value
    assert found is not None
    return found


def run(work: StepsArguments) -> int:
    """Run the steps; returns how many were done."""
    done: int = library().keel_steps(byref(work))
    return done
