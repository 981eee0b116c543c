"""`rows.c` from Python: norms, rotations and gates of contiguous float32 tensors on a CPU.

Results are new tensors.
"""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from keel.models.kernels.build import load

_P, _N, _F = c_void_p, c_int64, c_float
_ARGUMENTS = {
    "keel_rms": (_P, _P, _P, _F, _N, _N, _N, _P, _P, _P),
    "keel_rms_back": (_P, _P, _P, _P, _P, _N, _N, _N, _N, _P, _P, _P),
    "keel_turn": (_P, _N, _P, _P, _F, _N, _N, _N, _N, _P),
    "keel_gated": (_P, _P, _N, _N, _P),
    "keel_gated_back": (_P, _P, _P, _N, _N, _P, _P),
}
_BLOCK = 64
"""Rows whose part of a weight's gradient is summed by itself: few enough to leave all threads work,
many enough that the parts are soon added."""


def library() -> Any:
    """The compiled functions, or None."""
    found = load("pointwise")
    if found is not None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, None
    return found


def rms(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / √(mean x² + ε) · weight over the last dimension, and 1 / √(…) of each row."""
    out, scale = torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1])
    sizes = (len(scale), x.shape[-1], _threads())
    _call("keel_rms", x, None, weight, epsilon, *sizes, None, out, scale)
    return out, scale


def added_rms(
    x: Tensor, update: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x + update, and what `rms` says of it."""
    assert x.shape == update.shape
    both, out = torch.empty_like(x), torch.empty_like(x)
    scale = x.new_empty(x.numel() // x.shape[-1])
    sizes = (len(scale), x.shape[-1], _threads())
    _call("keel_rms", x, update, weight, epsilon, *sizes, both, out, scale)
    return both, out, scale


def rms_back(
    grad: Tensor, beside: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, if it `learns`, of the weight, given that of the output; what x has
    `beside` it is added to its own."""
    rows, width = len(scale), x.shape[-1]
    d_x, d_weight = torch.empty_like(x), torch.empty_like(weight) if learns else None
    parts = x.new_empty(-(-rows // _BLOCK), width) if learns else None
    sizes = (rows, width, _BLOCK, _threads())
    _call("keel_rms_back", grad, beside, x, weight, scale, *sizes, d_x, d_weight, parts)
    return d_x, d_weight


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Heads (T, heads, D), turned by angles of cosines and sines (T, D/2); back for a sign −1."""
    out = torch.empty_like(x)
    tokens, heads, width = x.shape
    sizes = (tokens, heads, width, _threads())
    _call("keel_turn", x, heads * width, cos, sin, sign, *sizes, out)
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up."""
    out = torch.empty_like(gate)
    _call("keel_gated", gate, up, gate.numel(), _threads(), out)
    return out


def gated_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, given that of the output."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    _call("keel_gated_back", grad, gate, up, gate.numel(), _threads(), d_gate, d_up)
    return d_gate, d_up


def _threads() -> int:
    return torch.get_num_threads()


def _call(name: str, *arguments: Any) -> None:
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
    getattr(library(), name)(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))
