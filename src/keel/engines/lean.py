"""A Llama-like backbone for decoding on a CPU: few operations, on weights laid out anew.

A decode step has few rows, so what it costs is the number of operations and how the matrix product
reads its weights. Here the projections that read the same input are one, and the weights lie as
oneDNN wants them: a copy, made at the start of a call of `sample` and gone at its end, when no
gradients or activations are there. Every other model goes through its own modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
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
_PACK = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class Forward(Protocol):
    """One pass of a backbone over tokens that lie end to end."""

    def __call__(
        self, tokens: Int[Tensor, "T"], positions: Int[Tensor, "T"], layout: StepLayout
    ) -> Float[Tensor, "T H"]: ...


def forward_of(model: PreTrainedModel) -> Forward:
    """The quickest pass that says what the model's own modules say, with its weights of now."""
    backbone = model.base_model
    # In float64 the model's own norms and rotary embeddings still work in float32.
    quick = model.device.type == "cpu" and model.dtype == torch.float32
    if quick and type(backbone) in ALIKE and _plain(backbone):
        return _Lean(backbone)
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
    """Whether nothing was put into the modules (adapters), and the activation is the usual one."""
    return backbone.config.hidden_act == "silu" and all(
        type(linear) is nn.Linear for layer in backbone.layers for linear in _linears(layer)
    )


def _linears(layer: Any) -> Iterator[nn.Module]:
    a, m = layer.self_attn, layer.mlp
    yield from (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)


class _Linear:
    """x Wᵀ + b for projections that read the same x, their outputs side by side.

    `scale` is what x would be multiplied with before: a norm's weights.
    """

    def __init__(self, *parts: nn.Linear, scale: Tensor | None = None) -> None:
        weights: list[Tensor] = [part.weight for part in parts]
        weight = torch.cat(weights) if len(parts) > 1 else weights[0]
        weight = weight if scale is None else weight * scale
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        packs = _PACK is not None and _LINEAR is not None and weight.dtype == torch.float32
        self.packed = _PACK(weight) if packs else None  # type: ignore[misc]
        self.weight = None if packs else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = _LINEAR(x, self.packed, self.bias, "none", [], "")  # type: ignore[misc]
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
    gate_up: _Linear
    down: _Linear
    rules: Rules

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, layout: StepLayout) -> Tensor:
        queries, keys = self.heads
        both = self.qkv(_normed(x, self.epsilon)).view(len(x), queries + 2 * keys, -1)
        turned, value = both.split_with_sizes((queries + keys, keys), dim=1)
        if self.turned_norm is not None:
            turned = _normed(turned, self.epsilon) * self.turned_norm
        # Halves exchanged, the sign in `sin`: x cos + rotate(x) sin.
        turned = torch.addcmul(turned * cos, turned.roll(turned.shape[-1] // 2, -1), sin)
        query, key = turned.split_with_sizes(self.heads, dim=1)
        seen = layout.attend_tokens(self.number, query, key, value, self.rules)
        x = x + self.out(seen.flatten(1))
        gate, up = self.gate_up(_normed(x, self.epsilon)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class _Lean:
    """`Forward` of a backbone of `ALIKE`."""

    def __init__(self, backbone: Any) -> None:
        self.embed = backbone.embed_tokens
        self.rotary = backbone.rotary_emb
        self.norm, self.epsilon = backbone.norm.weight, _epsilon(backbone.norm)
        self.blocks = [_block(number, layer) for number, layer in enumerate(backbone.layers)]

    def __call__(self, tokens: Tensor, positions: Tensor, layout: StepLayout) -> Tensor:
        x: Tensor = self.embed(tokens)
        cos, sin = (table[0].unsqueeze(1) for table in self.rotary(x, positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for block in self.blocks:
            x = block(x, cos, sin, layout)
        out: Tensor = _normed(x, self.epsilon) * self.norm
        return out


def _block(number: int, layer: Any) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    width = attention.head_dim
    heads = attention.q_proj.out_features // width, attention.k_proj.out_features // width
    norms = None
    if hasattr(attention, "q_norm"):
        pairs = zip((attention.q_norm, attention.k_norm), heads, strict=True)
        norms = torch.cat([norm.weight.expand(count, -1) for norm, count in pairs])
    # Mistral's layers read it from the config.
    alone = attention.config.sliding_window if type(attention) is MistralAttention else None
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Block(
        number=number,
        heads=heads,
        epsilon=_epsilon(first),
        qkv=_Linear(*projections, scale=first.weight),
        turned_norm=norms,
        out=_Linear(attention.o_proj),
        gate_up=_Linear(mlp.gate_proj, mlp.up_proj, scale=second.weight),
        down=_Linear(mlp.down_proj),
        rules=Rules(attention.scaling, getattr(attention, "sliding_window", alone)),
    )
