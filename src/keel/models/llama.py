"""Backbones built like Llama's, in fewer operations: on a CPU, in float32.

A layer's products stay its own modules, whatever was put into them; what lies between them is one
pass over memory each. The engine's compiled steps know the same backbones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from keel.models.attention.functions import Rules
from keel.models.attention.layout import PackedLayout
from keel.models.kernels import pointwise as compiled
from keel.models.pointwise import added_norm, gated, rms_norm, turned

ALIKE = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""Backbones of one build: norm, attention with rotary embeddings, norm, gated SiLU, both added."""
STILL = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies are fixed."""


def is_alike(backbone: Any) -> bool:
    """Whether a backbone is of this build, with its usual activation, rotations that do not depend
    on what else enters, and weights in float32 on a CPU."""
    return (
        type(backbone) in ALIKE
        and getattr(backbone.rotary_emb, "rope_type", "") in STILL
        and backbone.config.hidden_act == "silu"
        and 2 * backbone.rotary_emb.inv_freq.numel() == backbone.layers[0].self_attn.head_dim
        and {(p.device.type, p.dtype) for p in backbone.parameters()} == {("cpu", torch.float32)}
    )


def rules_of(layer: Any) -> Rules:
    """How a layer attends."""
    attention = layer.self_attn
    # Mistral's layers read it from the config.
    alone = attention.config.sliding_window if type(attention) is MistralAttention else None
    return Rules(attention.scaling, getattr(attention, "sliding_window", alone))


def angles(
    backbone: Any, positions: Int[Tensor, "T"]
) -> tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]:
    """Cosines and sines of each position, as the rotary module has them."""
    cos, sin = (table[0] for table in backbone.rotary_emb(backbone.norm.weight, positions[None]))
    half = cos.shape[-1] // 2
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()


def applies(backbone: Any) -> bool:
    """Whether `states` says what the backbone's own forward says: activations are not to be
    recomputed, nobody listens to modules that it passes over, and there is a compiler."""
    return (
        is_alike(backbone)
        and not _recomputes(backbone)
        and not any(map(is_listened_to, _passed_over(backbone)))
        and not torch.is_autocast_enabled("cpu")
        and compiled.library() is not None
    )


def _recomputes(backbone: Any) -> bool:
    asked = (getattr(m, "gradient_checkpointing", False) for m in (backbone, *backbone.layers))
    return backbone.training and any(asked)


def _passed_over(backbone: Any) -> Iterator[nn.Module]:
    yield from (backbone, backbone.norm)
    for layer in backbone.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (layer, attention, mlp, mlp.act_fn)
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
        yield from (getattr(attention, n) for n in ("q_norm", "k_norm") if hasattr(attention, n))


def is_listened_to(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward of its own put over its class's."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks) or "forward" in vars(module)


def states(
    backbone: Any, tokens: Int[Tensor, "T"], positions: Int[Tensor, "T"], layout: PackedLayout
) -> Float[Tensor, "T H"]:
    """The last hidden state of each token."""
    # Modules are given a batch of one, as the backbone itself would.
    x: Tensor = backbone.embed_tokens(tokens[None])
    turns = angles(backbone, positions)
    # An update is added together with the norm behind it: for a layer's last, that of the next.
    first, *behind = (*(layer.input_layernorm for layer in backbone.layers), backbone.norm)
    normed = _normed(first, x)
    for layer, norm in zip(backbone.layers, behind, strict=True):
        update = _attention(layer, normed, turns, layout)
        x, normed = _added(layer.post_attention_layernorm, x, update)
        x, normed = _added(norm, x, _mlp(layer.mlp, normed))
    return normed[0]


def _normed(norm: Any, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def _added(norm: Any, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    return added_norm(x, update, norm.weight, norm.variance_epsilon)


def _attention(layer: Any, x: Tensor, turns: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
    own = layer.self_attn
    query, key, value = (
        module(x).view(x.shape[1], -1, own.head_dim)
        for module in (own.q_proj, own.k_proj, own.v_proj)
    )
    if hasattr(own, "q_norm"):
        query, key = _normed(own.q_norm, query), _normed(own.k_norm, key)
    query, key = turned(query, *turns), turned(key, *turns)
    seen = layout.attend_tokens(query, key, value, rules_of(layer))
    out: Tensor = own.o_proj(seen.flatten(1)[None])
    return out


def _mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))  # type: ignore[operator]
    return out
