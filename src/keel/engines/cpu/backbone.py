"""A Llama-like backbone for decoding on a CPU: one call of compiled code a step.

A decode step has few rows, so what it costs is the number of operations and how its products read
their weights. Here all layers are one call of `kernels/decode.c`, on a copy of the weights in
panels that are read end to end: made at the start of a call of `sample` and gone at its end, when
no gradients or activations are there. A row's numbers do not depend on what rows are beside it.
Prompts attend among themselves as in training. Every other model, and every one where there is no
compiler, goes through its own modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.engines.cpu.weights import block_of, heads_of, numbers_of
from keel.engines.kv_cache import DecodeRows, Prefill
from keel.engines.prefix_cache import PrefixCache
from keel.engines.scheduler import Ended, Moves
from keel.engines.slots import PageTable, SlotMapping, joined, page_numbers
from keel.models.attention.layout import PackedLayout
from keel.models.kernels.decode import PAGE, Arena, DecodeArguments, Layer, filled, library, pointer
from keel.models.llama import angles, is_alike, is_listened_to
from keel.models.lora import is_affine

Ints = npt.NDArray[np.int64]
_NOBODY = Prefill(np.zeros(0, dtype=np.int64), 0)


def compiled(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype = torch.float32,
    beginnings: PrefixCache | None = None,
) -> CompiledPass | None:
    """The pass with the model's weights of now, for positions below `longest`, weights, keys and
    values stored as `dtype`; None where the model is built otherwise, does not work in float32 on a
    CPU, someone listens to one of its modules, or there is no compiler."""
    backbone = model.base_model
    if not is_alike(backbone) or not _plain(backbone):
        return None
    if any(map(is_listened_to, backbone.modules())):
        return None
    functions = library(dtype)
    if functions is None:
        return None
    return CompiledPass(backbone, longest, functions, dtype, beginnings or PrefixCache())


def _plain(backbone: Any) -> bool:
    """Whether projections are linear layers, with adapters or without, and all layers have the same
    heads."""
    same = len({heads_of(layer) for layer in backbone.layers}) == 1
    return same and all(
        is_affine(linear) for layer in backbone.layers for linear in _linears(layer)
    )


def _linears(layer: Any) -> Iterator[nn.Module]:
    a, m = layer.self_attn, layer.mlp
    yield from (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)


class CompiledPass:
    """`engines.model_runner.Pass` of a backbone built like Llama's."""

    def __init__(
        self,
        backbone: Any,
        longest: int,
        functions: Any,
        dtype: torch.dtype,
        beginnings: PrefixCache,
    ) -> None:
        self._functions = functions
        self._embed: Tensor = backbone.embed_tokens.weight.detach()
        self._norm = backbone.norm.weight.contiguous(), backbone.norm.variance_epsilon
        self._cos, self._sin = angles(backbone, torch.arange(longest))
        self._like: Tensor = self._embed.new_empty(0, dtype=dtype)
        arena = Arena(sum(numbers_of(layer, dtype) for layer in backbone.layers), self._like)
        self._blocks = [block_of(n, layer, arena) for n, layer in enumerate(backbone.layers)]
        self._heads = heads_of(backbone.layers[0])
        self._layers = (Layer * len(self._blocks))(*(b.pointers() for b in self._blocks))
        self._beginnings = beginnings
        self._recalled: deque[list[int]] = deque()
        numbers = page_numbers(len(self._blocks), *self._heads[1:])
        self._pool = beginnings.pool(numbers, self._like)
        self._prompts, self._answers = PageTable(self._pool), PageTable(self._pool)
        self._work: _Scratch | None = None
        self._step = self._fixed()
        self._arrays: dict[str, Ints] = {}
        self._order = _Order()

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        known, pages = self._beginnings.take(prompts)
        self._recalled.extend(pages)
        return known

    def admit(self, entering: Prefill, ahead: int) -> None:
        for number in np.flatnonzero(entering.before).tolist():
            self._prompts.adopt(entering.first + number, self._recalled.popleft())
        self._prompts.reserve(entering.lengths, entering.first)

    def reserve(self, places_R: Ints, ahead: int) -> None:
        self._answers.reserve(places_R)

    def keep(self, ended: Ended) -> None:
        """The prompt's places with the row's own behind them, in pages of their own."""
        if self._beginnings.full:
            return
        kept, places = PageTable(self._pool), np.arange(ended.prompt + ended.own)
        behind = places[ended.prompt :]
        source = self._answers.homes(np.full(ended.own, ended.row), behind - ended.prompt)
        if ended.alone:  # nobody else will read the prompt's
            kept.adopt(0, self._prompts.release(ended.slot))
            places = behind
        else:
            before = places[: ended.prompt]
            slots = np.full(ended.prompt, ended.slot)
            source = joined(self._prompts.homes(slots, before), source)
        kept.reserve(np.array([ended.prompt + ended.own]))
        self._copy(source, kept.homes(np.zeros_like(places), places))
        self._beginnings.hold(ended.sequence, kept.release(0))

    def _copy(self, source: SlotMapping, target: SlotMapping) -> None:
        arrays = (source.page, source.place, target.page, target.place)
        shape = (len(self._blocks), *self._heads[1:], len(source.page))
        self._functions.keel_copy(*shape, *(values.ctypes.data for values in arrays))

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        self._answers.close(rows, rows_left)
        self._prompts.close(slots, slots_left)

    def __call__(
        self, tokens: Tensor, positions: Tensor, entering: Prefill, live: DecodeRows | None
    ) -> Tensor:
        x = self._embed.index_select(0, tokens)
        rows = _Rows(entering, live, self._order)
        work = self._room(len(tokens), rows)
        # The step is valid as long as what it is set to.
        homes, own = self._homes(entering, rows), self._own_pages(rows)
        self._set(x, positions, homes, own, rows)
        step = addressof(self._step)
        if len(entering.lengths) and len(entering.whole):
            self._layer_by_layer(work, entering)
        else:
            self._functions.keel_decode(addressof(self._layers), len(self._layers), step)
        weight, epsilon = self._norm
        self._functions.keel_norm(pointer(weight), epsilon, step)
        return x

    def lay(self, positions: Tensor, live: DecodeRows, steps: int) -> Laid:
        """The step set to one token of each live row, to be done so many times in a row."""
        rows = _Rows(_NOBODY, live, self._order)
        rows.places += steps - 1
        self._room(len(positions), rows)
        x = self._embed.new_empty(len(positions), self._embed.shape[1])
        homes = SlotMapping(np.empty_like(rows.end), np.empty_like(rows.end))
        self._set(x, positions, homes, self._answers.pages, rows)
        return Laid(x, positions, rows.end, homes, self._answers.pages)

    @property
    def fixed(self) -> Fixed:
        """What is the same for every step."""
        return Fixed(self, self._functions, self._layers, self._step, self._embed, self._norm)

    def _layer_by_layer(self, work: _Scratch, entering: Prefill) -> None:
        """What enters whole attends among itself as in training."""
        layout = PackedLayout(entering.whole.tolist())
        split = layout.tokens
        queries, keys, _ = self._heads
        for block in self._blocks:
            layer, step = addressof(self._layers[block.number]), addressof(self._step)
            self._functions.keel_enter(layer, step)
            if split:
                query, key, value = work.qkv[:split].split_with_sizes((queries, keys, keys), dim=1)
                work.seen[:split] = layout.attend_tokens(query, key, value, block.rules)
            self._functions.keel_leave(layer, step)

    def _room(self, tokens: int, rows: _Rows) -> _Scratch:
        """What the step works on: the last one's, unless that is too small or much too large."""
        room = PAGE * (-(-rows.width // PAGE) + -(-rows.places // PAGE))
        work = self._work
        if work is None or not tokens <= len(work.qkv) <= 2 * tokens or room > work.scores.shape[1]:
            self._work = work = self._new_room(tokens, 2 * room)
            for name, tensor in vars(work).items():
                setattr(self._step, name, pointer(tensor))
            self._step.threads, self._step.score_room = work.scores.shape
        return work

    def _new_room(self, tokens: int, room: int) -> _Scratch:
        queries, keys, width = self._heads
        new = self._embed.new_empty
        return _Scratch(
            qkv=new(tokens, queries + 2 * keys, width),
            seen=new(tokens, queries, width),
            mid=new(tokens, self._blocks[0].down.shape[1]),
            scores=new(torch.get_num_threads(), room),
            taken=self._taken(tokens),
        )

    def _taken(self, tokens: int) -> Tensor:
        """Room for the inputs of any product, where they are rounded."""
        if self._like.dtype == self._embed.dtype:
            return self._like
        block = self._blocks[0]
        most = max(part.shape[1] for part in (block.qkv, block.out, block.down))
        return self._like.new_empty(tokens, filled(most, self._like.dtype))

    def _homes(self, entering: Prefill, rows: _Rows) -> SlotMapping:
        """Where each token's keys and values go."""
        end = rows.end[len(rows.behind) :]
        own = self._answers.homes(np.arange(len(end)), end)
        if not len(entering.lengths):
            return own
        return joined(self._prompts.homes(*entering.places()), own)

    def _own_pages(self, rows: _Rows) -> Ints:
        """What each row has of its own: what enters behind a beginning, its prompt's."""
        answers = self._answers.pages
        if not len(rows.behind):
            return answers
        first, rest = self._prompts.pages[rows.behind], answers[: len(rows.end) - len(rows.behind)]
        pages = np.zeros((len(rows.end), max(first.shape[1], rest.shape[1])), dtype=np.int64)
        pages[: len(first), : first.shape[1]] = first
        pages[len(first) :, : rest.shape[1]] = rest
        return pages

    def _fixed(self) -> DecodeArguments:
        """What is the same for every step."""
        queries, keys, width = self._heads
        sizes = {"heads": queries, "shared_heads": keys, "width": width}
        tables = {"cos": pointer(self._cos), "sin": pointer(self._sin)}
        return DecodeArguments(hidden=self._embed.shape[1], **sizes, **tables)

    def _set(
        self, x: Tensor, positions: Tensor, homes: SlotMapping, own: Ints, rows: _Rows
    ) -> None:
        """What is this step's own."""
        step, prompts = self._step, self._prompts.pages
        step.tokens = len(positions)
        step.prompt_tokens = len(positions) - len(rows.end)
        step.prompt_most, step.answer_most = prompts.shape[1], own.shape[1]
        step.x, step.position = pointer(x), pointer(positions)
        for name, array in (
            *(("page", homes.page), ("place", homes.place), ("slot", rows.slot)),
            *(("end", rows.end), ("length", rows.length), ("order", rows.order)),
            *(("prompt_pages", prompts), ("answer_pages", own)),
        ):
            # Most are the last step's: where an array lies is slow to ask.
            if self._arrays.get(name) is not array:
                self._arrays[name] = array
                setattr(step, name, array.ctypes.data)


@dataclass(frozen=True, eq=False)
class Laid:
    """What moves on with the rows of a step: where it lies is what the step is set to."""

    x: Float[Tensor, "R H"]
    positions: Int[Tensor, "R"]
    end: Ints
    homes: SlotMapping
    pages: Ints


@dataclass(frozen=True, eq=False)
class Fixed:
    """What compiled code is called with."""

    forward: CompiledPass
    functions: Any
    layers: Any
    step: DecodeArguments
    embed: Float[Tensor, "V H"]
    norm: tuple[Float[Tensor, "H"], float]


@dataclass(frozen=True, eq=False)
class _Scratch:
    """What a step works on."""

    qkv: Float[Tensor, "T A D"]
    """Query heads, key heads, value heads."""
    seen: Float[Tensor, "T Hq D"]
    mid: Float[Tensor, "T I"]
    scores: Float[Tensor, "threads S"]
    taken: Float[Tensor, "..."]
    """What a product takes in, rounded."""


class _Order:
    """Rows of one prompt behind each other: its keys stay in the processor's cache."""

    def __init__(self) -> None:
        self._slot: Ints | None = None
        self._order: Ints = np.zeros(0, dtype=np.int64)

    def __call__(self, slot: Ints) -> Ints:
        """The order of these rows' slots: an array that was given last has the same numbers."""
        if slot is not self._slot:
            self._slot, self._order = slot, np.argsort(slot, kind="stable")
        return self._order


class _Rows:
    """What enters behind a known beginning, and then `DecodeRows`, as the compiled code reads them.

    A token of the former is a row whose own places are its prompt's, behind a prompt without any.
    """

    def __init__(self, entering: Prefill, live: DecodeRows | None, order: _Order) -> None:
        none = np.zeros(0, dtype=np.int64)
        self.slot, self.end, self.length = (
            (none, none, none) if live is None else (live.slot_R, live.end_R, live.length_G)
        )
        self.width, self.places = (0, 0) if live is None else (live.width, live.places)
        self.behind: Ints = none
        """The slot of each token that enters so."""
        if len(entering.lengths) and entering.before.any():
            slots, places = (x[entering.whole.sum() :] for x in entering.places())
            self.behind = slots
            self.slot = np.concatenate([np.full_like(slots, len(self.length)), self.slot])
            self.end = np.concatenate([places, self.end])
            self.length = np.append(self.length, 0)
            self.places = max(self.places, int(places.max()) + 1)
        self.order: Ints = order(self.slot)
