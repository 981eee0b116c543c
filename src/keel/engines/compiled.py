"""A Llama-like backbone for decoding on a CPU: one call of compiled code a step.

A decode step has few rows, so what it costs is the number of operations and how its products read
their weights. Here all layers are one call of `kernels/decode.c`, on a copy of the weights in
panels that are read end to end: made at the start of a call of `sample` and gone at its end, when
no gradients or activations are there. A row's numbers do not depend on what rows are beside it.
Prompts attend among themselves as in training. Every other model, and every one where there is no
compiler, goes through its own modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from keel.engines.batch import Moves
from keel.engines.pages import Pool, Table, page_numbers
from keel.engines.store import Entering, Live
from keel.kernels.decode import PAGE, Arena, Layer, Panels, Step, library, pointer
from keel.models.attention import Rules
from keel.models.layout import PackedLayout
from keel.models.llama import angles, is_alike, is_listened_to, rules_of
from keel.models.lora import affine, is_affine

Ints = npt.NDArray[np.int64]


def compiled(model: PreTrainedModel, longest: int) -> CompiledPass | None:
    """The pass with the model's weights of now, for positions below `longest`; None where the model
    is built otherwise, does not work in float32 on a CPU, someone listens to one of its modules, or
    there is no compiler."""
    backbone = model.base_model
    if not is_alike(backbone) or not _plain(backbone):
        return None
    if any(map(is_listened_to, backbone.modules())):
        return None
    functions = library()
    return None if functions is None else CompiledPass(backbone, longest, functions)


def _plain(backbone: Any) -> bool:
    """Whether projections are linear layers, with adapters or without, and all layers have the same
    heads."""
    same = len({_heads(layer) for layer in backbone.layers}) == 1
    return same and all(
        is_affine(linear) for layer in backbone.layers for linear in _linears(layer)
    )


def _linears(layer: Any) -> Iterator[nn.Module]:
    a, m = layer.self_attn, layer.mlp
    yield from (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)


def _heads(layer: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the width of one."""
    attention = layer.self_attn
    width = attention.head_dim
    return (
        attention.q_proj.out_features // width,
        attention.k_proj.out_features // width,
        width,
    )


@dataclass(frozen=True, eq=False)
class _Block:
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


class CompiledPass:
    """`engines.passes.Pass` of a backbone built like Llama's."""

    def __init__(self, backbone: Any, longest: int, functions: Any) -> None:
        self._functions = functions
        self._embed = backbone.embed_tokens.weight
        self._norm = backbone.norm.weight.contiguous(), backbone.norm.variance_epsilon
        self._cos, self._sin = angles(backbone, torch.arange(longest))
        arena = Arena(sum(map(_numbers, backbone.layers)), self._embed)
        self._blocks = [_block(n, layer, arena) for n, layer in enumerate(backbone.layers)]
        self._heads = _heads(backbone.layers[0])
        # A dry run has no memory to compute on: shapes alone.
        self._dry = isinstance(self._embed, FakeTensor)
        if not self._dry:
            self._layers = (Layer * len(self._blocks))(*(b.pointers() for b in self._blocks))
        pool = Pool(page_numbers(len(self._blocks), *self._heads[1:]), self._embed)
        self._prompts, self._answers = Table(pool), Table(pool)

    def admit(self, entering: Entering, ahead: int) -> None:
        self._prompts.reserve(entering.lengths, entering.first)

    def reserve(self, places_R: Ints, ahead: int) -> None:
        self._answers.reserve(places_R)

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        self._answers.close(rows, rows_left)
        self._prompts.close(slots, slots_left)

    def __call__(
        self, tokens: Tensor, positions: Tensor, entering: Entering, live: Live | None
    ) -> Tensor:
        x: Tensor = F.embedding(tokens, self._embed)
        rows = _Rows(live)
        work = self._work(x, rows)
        if self._dry:
            self._layer_by_layer(work, Step(), entering)
            return x
        homes = self._homes(entering, rows)
        step = self._step(work, positions, homes, entering, rows)
        if entering.tokens:
            self._layer_by_layer(work, step, entering)
        else:
            self._functions.keel_decode(addressof(self._layers), len(self._layers), addressof(step))
        weight, epsilon = self._norm
        self._functions.keel_norm(pointer(weight), epsilon, addressof(step))
        return x

    def _layer_by_layer(self, work: _Work, step: Step, entering: Entering) -> None:
        """What enters attends among itself as in training."""
        layout, split = PackedLayout(entering.lengths.tolist()), entering.tokens
        queries, keys, _ = self._heads
        for block in self._blocks:
            if not self._dry:
                layer = addressof(self._layers[block.number])
                self._functions.keel_enter(layer, addressof(step))
            if split:
                query, key, value = work.qkv[:split].split_with_sizes((queries, keys, keys), dim=1)
                work.seen[:split] = layout.attend_tokens(query, key, value, block.rules)
            if not self._dry:
                self._functions.keel_leave(layer, addressof(step))

    def _work(self, x: Tensor, rows: _Rows) -> _Work:
        queries, keys, width = self._heads
        room = PAGE * (-(-rows.width // PAGE) + -(-rows.places // PAGE))
        return _Work(
            x=x,
            qkv=x.new_empty(len(x), queries + 2 * keys, width),
            seen=x.new_empty(len(x), queries, width),
            mid=x.new_empty(len(x), self._blocks[0].down.shape[1]),
            scores=x.new_empty(torch.get_num_threads(), room),
        )

    def _homes(self, entering: Entering, rows: _Rows) -> Ints:
        """Where each token's keys and values go."""
        width = self._heads[2]
        own = self._answers.homes(np.arange(len(rows.end)), rows.end, width)
        if not entering.tokens:
            return own
        return np.concatenate([self._prompts.homes(*entering.places(), width), own])

    def _step(
        self, work: _Work, positions: Tensor, homes: Ints, entering: Entering, rows: _Rows
    ) -> Step:
        """Valid as long as its arguments and this."""
        queries, keys, width = self._heads
        tensors = vars(work) | {"position": positions, "cos": self._cos, "sin": self._sin}
        arrays = {
            "home": homes,
            "slot": rows.slot,
            "end": rows.end,
            "length": rows.length,
            "order": rows.order,
            "prompt_pages": self._prompts.pages,
            "answer_pages": self._answers.pages,
        }
        return Step(
            hidden=work.x.shape[1],
            heads=queries,
            shared_heads=keys,
            width=width,
            tokens=len(work.x),
            prompt_tokens=entering.tokens,
            threads=len(work.scores),
            score_room=work.scores.shape[1],
            prompt_most=self._prompts.pages.shape[1],
            answer_most=self._answers.pages.shape[1],
            **{name: pointer(tensor) for name, tensor in tensors.items()},
            **{name: values.ctypes.data for name, values in arrays.items()},
        )


@dataclass(frozen=True, eq=False)
class _Work:
    """What a step works on."""

    x: Float[Tensor, "T H"]
    qkv: Float[Tensor, "T A D"]
    """Query heads, key heads, value heads."""
    seen: Float[Tensor, "T Hq D"]
    mid: Float[Tensor, "T I"]
    scores: Float[Tensor, "threads S"]


class _Rows:
    """`Live` as the compiled code reads it; without a row where there is none."""

    def __init__(self, live: Live | None) -> None:
        none = np.zeros(0, dtype=np.int64)
        self.slot, self.end, self.length = (
            (none, none, none) if live is None else (live.slot_R, live.end_R, live.length_G)
        )
        self.order: Ints = np.argsort(self.slot, kind="stable")
        """Rows of one prompt behind each other: its keys stay in the processor's cache."""
        self.width, self.places = (0, 0) if live is None else (live.width, live.places)


def _numbers(layer: Any) -> int:
    """Of a layer's panels."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        Panels.numbers(attention.q_proj, attention.k_proj, attention.v_proj)
        + Panels.numbers(attention.o_proj)
        + Panels.numbers(mlp.gate_proj, mlp.up_proj, gated=True)
        + Panels.numbers(mlp.down_proj)
    )


def _block(number: int, layer: Any, arena: Arena) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Block(
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
