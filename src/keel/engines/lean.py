"""A Llama-like backbone for decoding on a CPU: few operations, on weights laid out anew.

A decode step has few rows, so what it costs is the number of operations and how the matrix product
reads its weights. Here queries, keys and values come of one product, activations and residuals are
part of theirs, and the weights lie as oneDNN wants them: a copy, made at the start of a call of
`sample` and gone at its end, when no gradients or activations are there. The two numbers that a
rotary embedding turns together lie side by side, so that it is one product of complex numbers;
queries and keys are permuted alike, which their products do not see. Every other model goes
through its own modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from keel.engines.decoding import StepLayout
from keel.models.attention import Rules

ALIKE = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""Backbones of one build: norm, attention with rotary embeddings, norm, gated SiLU, both added."""
STILL = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies are fixed."""
_PACK = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class Forward(Protocol):
    """One pass of a backbone over tokens that lie end to end."""

    def __call__(
        self, tokens: Int[Tensor, "T"], positions: Int[Tensor, "T"], layout: StepLayout
    ) -> Float[Tensor, "T H"]: ...


def forward_of(model: PreTrainedModel, longest: int) -> Forward:
    """The quickest pass that says what the model's own modules say, with its weights of now, for
    positions below `longest`."""
    backbone = model.base_model
    # In float64 the model's own norms and rotary embeddings still work in float32.
    quick = model.device.type == "cpu" and model.dtype == torch.float32
    if quick and type(backbone) in ALIKE and _plain(backbone):
        return _Lean(backbone, longest)
    return _own(model)


def _own(model: PreTrainedModel) -> Forward:
    def forward(tokens: Tensor, positions: Tensor, layout: StepLayout) -> Tensor:
        out = model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout
        )
        states: Tensor = out.last_hidden_state[0]
        return states

    return forward


def _plain(backbone: Any) -> bool:
    """Whether nothing was put into the modules (adapters), the activation is the usual one, and a
    position's rotation does not depend on what else enters."""
    still = getattr(backbone.rotary_emb, "rope_type", "") in STILL
    return (
        still
        and backbone.config.hidden_act == "silu"
        and all(
            type(linear) is nn.Linear for layer in backbone.layers for linear in _linears(layer)
        )
    )


def _linears(layer: Any) -> Iterator[nn.Module]:
    a, m = layer.self_attn, layer.mlp
    yield from (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)


class _Linear:
    """x Wᵀ + b for projections that read the same x, their outputs side by side.

    `scale` is what x would be multiplied with before: a norm's weights. `order` are the outputs'.
    """

    def __init__(
        self, *parts: nn.Linear, scale: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        weights: list[Tensor] = [part.weight for part in parts]
        weight = torch.cat(weights) if len(parts) > 1 else weights[0]
        weight = weight if scale is None else weight * scale
        weight = weight if order is None else weight.index_select(0, order)
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(biases) if biases else None
        self.bias = bias if bias is None or order is None else bias.index_select(0, order)
        packs = _PACK is not None and _LINEAR is not None
        self.packed = _PACK(weight) if packs else None  # type: ignore[misc]
        self.weight = None if packs else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = _LINEAR.default(x, self.packed, self.bias, "none", [], "")  # type: ignore[union-attr]
        return out

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of it."""
        if self.weight is not None:
            return F.silu(self(x))
        out: Tensor = _LINEAR.default(x, self.packed, self.bias, "swish", [], "")  # type: ignore[union-attr]
        return out

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`other` added to it."""
        return self._with(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Multiplied with `other`."""
        return self._with(x, other, "mul")

    def _with(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        if self.weight is not None:
            return self(x) + other if how == "add" else self(x) * other
        out: Tensor = _LINEAR.binary(x, other, self.packed, self.bias, how)  # type: ignore[union-attr]
        return out


def _normed(x: Tensor, epsilon: Tensor) -> Tensor:
    """x / √(mean x² + ε)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()


def _epsilon(norm: Any) -> Tensor:
    return torch.tensor(norm.variance_epsilon, dtype=norm.weight.dtype)


@dataclass(frozen=True, eq=False)
class _Block:
    """One layer."""

    number: int
    heads: tuple[int, int]
    """Query heads, key-value heads."""
    epsilon: Tensor
    qkv: _Linear
    turned_norm: Tensor | None
    """Weights of the norms of queries and keys, head by head."""
    out: _Linear
    gate: _Linear
    up: _Linear
    down: _Linear
    rules: Rules

    def __call__(
        self, x: Float[Tensor, "T H"], turns: Complex[Tensor, "T 1 D"], layout: StepLayout
    ) -> Float[Tensor, "T H"]:
        queries, keys = self.heads
        both = self.qkv(_normed(x, self.epsilon)).view(len(x), queries + 2 * keys, -1)
        turned, value = both.split_with_sizes((queries + keys, keys), dim=1)
        if self.turned_norm is not None:
            turned = _normed(turned, self.epsilon) * self.turned_norm
        pairs = torch.view_as_complex(turned.view(*turned.shape[:2], -1, 2))
        turned = torch.view_as_real(pairs * turns).flatten(-2)
        query, key = turned.split_with_sizes(self.heads, dim=1)
        seen = layout.attend_tokens(self.number, query, key, value, self.rules)
        x = self.out.plus(seen.flatten(1), x)
        normed = _normed(x, self.epsilon)
        return self.down.plus(self.up.times(normed, self.gate.silu(normed)), x)


class _Lean:
    """`Forward` of a backbone of `ALIKE`."""

    def __init__(self, backbone: Any, longest: int) -> None:
        self.embed = backbone.embed_tokens
        self.norm, self.epsilon = backbone.norm.weight, _epsilon(backbone.norm)
        self.turns = _turns(backbone, longest)
        self.blocks = [_block(number, layer) for number, layer in enumerate(backbone.layers)]

    def __call__(self, tokens: Tensor, positions: Tensor, layout: StepLayout) -> Tensor:
        x: Tensor = F.embedding(tokens, self.embed.weight)
        turns = self.turns.index_select(0, positions).unsqueeze(1)
        for block in self.blocks:
            x = block(x, turns, layout)
        out: Tensor = _normed(x, self.epsilon) * self.norm
        return out


def _turns(backbone: Any, longest: int) -> Complex[Tensor, "P D"]:
    """cos + i sin of each position below `longest`, as the rotary module has them."""
    like = backbone.norm.weight
    positions = torch.arange(longest, device=like.device)
    cos, sin = (table[0] for table in backbone.rotary_emb(like, positions[None]))
    half = cos.shape[-1] // 2
    return torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous())


def _pairs(width: int, heads: tuple[int, int]) -> Int[Tensor, "O"]:
    """Outputs of the queries, keys and values, in each head of the first two number i beside number
    i + width/2, as one rotation turns them."""
    queries, keys = heads
    turned = torch.arange((queries + keys) * width).view(queries + keys, 2, -1)
    values = torch.arange(keys * width) + turned.numel()
    return torch.cat([turned.transpose(1, 2).flatten(), values])


def _block(number: int, layer: Any) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    width = attention.head_dim
    heads = attention.q_proj.out_features // width, attention.k_proj.out_features // width
    norms = None
    if hasattr(attention, "q_norm"):
        pairs = zip((attention.q_norm, attention.k_norm), heads, strict=True)
        norms = torch.cat([norm.weight.expand(count, -1) for norm, count in pairs])
        norms = norms.view(-1, 2, width // 2).transpose(1, 2).flatten(1)
    # Mistral's layers read it from the config.
    alone = attention.config.sliding_window if type(attention) is MistralAttention else None
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Block(
        number=number,
        heads=heads,
        epsilon=_epsilon(first),
        qkv=_Linear(*projections, scale=first.weight, order=_pairs(width, heads)),
        turned_norm=norms,
        out=_Linear(attention.o_proj),
        gate=_Linear(mlp.gate_proj, scale=second.weight),
        up=_Linear(mlp.up_proj, scale=second.weight),
        down=_Linear(mlp.down_proj),
        rules=Rules(attention.scaling, getattr(attention, "sliding_window", alone)),
    )
