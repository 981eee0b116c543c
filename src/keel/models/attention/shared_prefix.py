"""Plain causal attention over pieces on a CPU, a prompt's keys and values read in place.

What follows a prompt attends in two parts, to itself and to the prompt. A part gives its output and
the logarithm of its softmax's denominator, and two parts join by

    l = log(e^l₁ + e^l₂),   o = e^(l₁−l) o₁ + e^(l₂−l) o₂.

The gradient of the scores needs only the joint l and o: dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)) with
P = exp(S − l), so each part's own backward kernel, given the joint ones, returns its share.
Source: Dao et al. 2022, FlashAttention (arXiv:2205.14135), section 3.1 and appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.models.attention.segments import Pieces, alike

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


@dataclass(frozen=True, eq=False)
class PrefixPlan:
    """Which tokens attend together.

    Each piece attends to itself, pieces of one length in one call: `runs` are (count, length), for
    tokens in `order` (None: theirs). `families` attend to what they follow as well.
    """

    runs: tuple[tuple[int, int], ...]
    order: Tensor | None
    inverse: Tensor | None
    families: tuple[tuple[slice, slice], ...]


def applies(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch has the kernels for these tensors (…, D); they read a D that lies in a row."""
    return (
        _FORWARD is not None
        and _BACKWARD is not None
        and query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16)
        and query.shape[-1] == value.shape[-1]
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    )


def plan(pieces: Pieces) -> PrefixPlan:
    """The plan for a layout; it serves all layers."""
    order, counts = alike(pieces.lengths)
    runs, first = [], 0
    for count in counts:
        runs.append((count, pieces.lengths[order[first]]))
        first += count
    families = tuple(pieces.families())
    if order == tuple(range(len(order))):
        return PrefixPlan(tuple(runs), None, None, families)
    spans = [range(pieces.starts[p], pieces.starts[p] + pieces.lengths[p]) for p in order]
    index = torch.tensor([token for span in spans for token in span])
    return PrefixPlan(tuple(runs), index, index.argsort(), families)


def attend(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    made: PrefixPlan,
    scaling: float,
) -> Float[Tensor, "T H D"]:
    """softmax(scaling · q·k) v over each token's own earlier tokens."""
    out: Tensor = _Branching.apply(query, key, value, made, scaling)  # type: ignore[no-untyped-call]
    return out


def part(
    query: Float[Tensor, "S Q D"],
    key: Float[Tensor, "S K D"],
    value: Float[Tensor, "S K D"],
    scaling: float,
    bias: Float[Tensor, "S 1 K"] | None,
) -> tuple[Float[Tensor, "S Q D"], Float[Tensor, "S Q"]]:
    """One part without a gradient: its output and the logarithm of its denominator.

    `bias` is 0 where a key is visible and -inf where not; at least one must be to each query.
    """
    query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    bias = None if bias is None else bias.unsqueeze(1)
    out, norm = _FORWARD(query, key, value, 0.0, False, attn_mask=bias, scale=scaling)  # type: ignore[misc]
    return out[:, 0], norm[:, 0]


class _Branching(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, made: PrefixPlan, scaling: float
    ) -> Tensor:
        outs, norms = [], []
        for q, k, v in _runs(made, query, key, value):
            out, norm = _FORWARD(q, k, v, 0.0, True, scale=scaling)  # type: ignore[misc]
            outs.append(out.transpose(1, 2).flatten(0, 1))
            norms.append(norm.transpose(1, 2).flatten(0, 1))
        out_TH, norm_TH = _restored(made, outs), _restored(made, norms)
        for own, first in made.families:
            q, k, v = _batched(query[own]), _batched(key[first]), _batched(value[first])
            out, norm = _FORWARD(q, k, v, 0.0, False, scale=scaling)  # type: ignore[misc]
            _join(out_TH[own], norm_TH[own], out[0].transpose(0, 1), norm[0].transpose(0, 1))
        ctx.save_for_backward(query, key, value, out_TH, norm_TH)
        ctx.made, ctx.scaling = made, scaling
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm = ctx.saved_tensors
        made, scaling = ctx.made, ctx.scaling
        parts: tuple[list[Tensor], ...] = ([], [], [])
        for g, q, k, v, o, n in _runs(made, grad, query, key, value, out, norm):
            found = _BACKWARD(g, q, k, v, o, n, 0.0, True, scale=scaling)  # type: ignore[misc]
            for column, one in zip(parts, found, strict=True):
                column.append(one.transpose(1, 2).flatten(0, 1))
        d_query, d_key, d_value = (_restored(made, column) for column in parts)
        for own, first in made.families:
            g, q, o, n = (_batched(x[own]) for x in (grad, query, out, norm))
            k, v = _batched(key[first]), _batched(value[first])
            found = _BACKWARD(g, q, k, v, o, n, 0.0, False, scale=scaling)  # type: ignore[misc]
            for whole, span, one in zip(
                (d_query, d_key, d_value), (own, first, first), found, strict=True
            ):
                whole[span] += one[0].transpose(0, 1)
        return d_query, d_key, d_value, None, None


def _runs(made: PrefixPlan, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Of tensors (T, heads, …) the tokens of each run, as (count, heads, length, …)."""
    if made.order is not None:
        tensors = tuple(tensor.index_select(0, made.order) for tensor in tensors)
    start = 0
    for count, length in made.runs:
        stop = start + count * length
        yield [
            tensor[start:stop].view(count, length, *tensor.shape[1:]).transpose(1, 2)
            for tensor in tensors
        ]
        start = stop


def _restored(made: PrefixPlan, parts: Sequence[Tensor]) -> Tensor:
    """The runs' results in the order of the tokens, in memory of its own."""
    whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()
    return whole if made.inverse is None else whole.index_select(0, made.inverse)


def _batched(tensor: Tensor) -> Tensor:
    """(L, heads, …) as a batch of one, (1, heads, L, …)."""
    return tensor.unsqueeze(0).transpose(1, 2)


def _join(out: Tensor, norm: Tensor, other: Tensor, other_norm: Tensor) -> None:
    """Join a second part (L, H, D), (L, H) to the first, in place; the module's equation."""
    joint = torch.logaddexp(norm, other_norm)
    mine = (norm - joint).exp_().unsqueeze(-1)
    theirs = (other_norm - joint).exp_().unsqueeze(-1)
    out.copy_(out * mine + other * theirs)
    norm.copy_(joint)
