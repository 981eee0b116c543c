"""Causal attention over pieces on a CPU by compiled code, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.models.attention.functions import Rules
from keel.models.kernels import causal


def applies(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> bool:
    """Whether there is compiled code for these tensors (T, heads, D) and rules."""
    width = query.shape[-1]
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.float32
        and rules.softcap is None
        and rules.sinks is None
        and width == key.shape[-1] == value.shape[-1]
        and width % causal.PANEL == 0
        and causal.library() is not None
    )


def attend(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    plan: causal.CausalPlan,
    rules: Rules,
) -> Float[Tensor, "T H D"]:
    """softmax(scaling · q·k) v over each token's own earlier tokens, as far as the window goes."""
    query, key, value = (_side_by_side(x) for x in (query, key, value))
    out: Tensor = _Causal.apply(query, key, value, plan, rules)  # type: ignore[no-untyped-call]
    return out


def _side_by_side(x: Tensor) -> Tensor:
    """The same with a token's heads in a row."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: causal.CausalPlan, rules: Rules
    ) -> Tensor:
        out, norm = causal.forward(query, key, value, plan, rules.scaling, rules.window)
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.plan, ctx.rules = plan, rules
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, rules = ctx.plan, ctx.rules
        grad = grad.contiguous()
        found = causal.backward(grad, ctx.saved_tensors, plan, rules.scaling, rules.window)
        return *found, None, None
