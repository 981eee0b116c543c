"""The layers of a Llama-like backbone as compiled code reads them: weights in panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keel.models.attention.functions import Rules
from keel.models.kernels.decode import Arena, Layer, Panels, pointer
from keel.models.llama import rules_of
from keel.models.lora import affine


def heads_of(layer: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the width of one."""
    attention = layer.self_attn
    width = attention.head_dim
    return (
        attention.q_proj.out_features // width,
        attention.k_proj.out_features // width,
        width,
    )


@dataclass(frozen=True, eq=False)
class Block:
    """One layer's weights."""

    number: int
    epsilon: float
    qkv: Panels
    norms: tuple[Tensor | None, Tensor | None]
    """Of each query head and each key head."""
    out: Panels
    gate_up: Panels
    down: Panels
    rules: Rules

    def pointers(self) -> Layer:
        """Valid as long as this is."""
        return Layer(
            qkv=self.qkv.pointers,
            out=self.out.pointers,
            gate_up=self.gate_up.pointers,
            down=self.down.pointers,
            query_norm=pointer(self.norms[0]),
            key_norm=pointer(self.norms[1]),
            number=self.number,
            window=self.rules.window or 0,
            epsilon=self.epsilon,
            scaling=self.rules.scaling,
        )


def numbers_of(layer: Any, dtype: torch.dtype) -> int:
    """Of a layer's panels."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        Panels.numbers(attention.q_proj, attention.k_proj, attention.v_proj, dtype=dtype)
        + Panels.numbers(attention.o_proj, dtype=dtype)
        + Panels.numbers(mlp.gate_proj, mlp.up_proj, dtype=dtype, gated=True)
        + Panels.numbers(mlp.down_proj, dtype=dtype)
    )


def block_of(number: int, layer: Any, arena: Arena) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Block(
        number=number,
        epsilon=first.variance_epsilon,
        qkv=Panels(arena, *map(affine, qkv), scale=first.weight),
        norms=(_weight(norms[0]), _weight(norms[1])),
        out=Panels(arena, affine(attention.o_proj)),
        gate_up=Panels(
            arena,
            affine(mlp.gate_proj),
            affine(mlp.up_proj),
            scale=second.weight,
            gated=True,
        ),
        down=Panels(arena, affine(mlp.down_proj)),
        rules=rules_of(layer),
    )


def _weight(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.contiguous()
