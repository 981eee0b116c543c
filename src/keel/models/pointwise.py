"""What a Llama-like layer does to each token by itself, by compiled code, with gradients.

Inputs are float32 on a CPU; see `models.kernels.pointwise`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.models.kernels import pointwise as rows


def rms_norm(x: Float[Tensor, "... H"], weight: Float[Tensor, "H"], epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · weight (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4)."""
    out: Tensor = _Norm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return out


def added_norm(
    x: Float[Tensor, "... H"],
    update: Float[Tensor, "... H"],
    weight: Float[Tensor, "H"],
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """x + update, and `rms_norm` of it."""
    out: tuple[Tensor, Tensor] = _AddedNorm.apply(x, update, weight, epsilon)  # type: ignore[no-untyped-call]
    return out


def turned(
    x: Float[Tensor, "T heads D"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"]
) -> Float[Tensor, "T heads D"]:
    """Numbers i and i + D/2 of each head turned by the token's angle i (RoFormer, arXiv:2104.09864,
    equation 34, with its pairs a half apart)."""
    out: Tensor = _Turned.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up (Shazeer 2020, arXiv:2002.05202, equation 6)."""
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out, scale = rows.rms(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        learns = ctx.needs_input_grad[1]
        x, weight, scale = ctx.saved_tensors
        return *rows.rms_back(grad.contiguous(), None, x, weight, scale, learns), None


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x, update, weight = x.contiguous(), update.contiguous(), weight.contiguous()
        both, out, scale = rows.added_rms(x, update, weight, epsilon)
        ctx.save_for_backward(both, weight, scale)
        # The last sum is read by its norm alone: no gradient of zeros is made for it.
        ctx.set_materialize_grads(False)
        return both, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, beside: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return beside, beside, None, None
        learns = ctx.needs_input_grad[2]
        both, weight, scale = ctx.saved_tensors
        beside = None if beside is None else beside.contiguous()
        d_both, d_weight = rows.rms_back(grad.contiguous(), beside, both, weight, scale, learns)
        return d_both, d_both, d_weight, None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rows.turn(x.contiguous(), cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rows.turn(grad.contiguous(), cos, sin, -1), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return rows.gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return rows.gated_back(grad.contiguous(), *ctx.saved_tensors)
