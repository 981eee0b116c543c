"""How the engine runs a model: what a runner does, and the one that calls the model's modules.

The keys and values of a prompt are stored once, and those of each answer by themselves. Rows that
answer one prompt read its keys and values together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.engines.scheduler import DecodeBatch, Moves
from keel.models.attention import Attending, PackedLayout, Rules, attention_weights, in_one_dtype

Ints = npt.NDArray[np.int64]
Places = tuple[Int[Tensor, "T"], Int[Tensor, "T"]]
"""Entry of each token, and its place in it."""

_CHUNK = 32
"""Places are allocated in multiples of this."""


class ModelRunner(Protocol):
    """A backbone with the keys and values of what is being decoded.

    Entries are as in `DecodeBatch`: a row for each live answer, a slot for each of their prompts.
    """

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        """How many of each prompt's first tokens have keys and values from an earlier call. `admit`
        is called for these prompts, in this order."""
        ...

    def admit(self, entering: Prefill, ahead: int) -> None:
        """Make room for prompts; there will never be more than `ahead` slots."""
        ...

    def reserve(self, places_R: Ints, ahead: int) -> None:
        """Make room for these places of each live row; there will be at most `ahead` rows."""
        ...

    def __call__(
        self,
        tokens: Int[Tensor, "T"],
        positions: Int[Tensor, "T"],
        entering: Prefill,
        live: DecodeRows | None,
    ) -> Float[Tensor, "T H"]:
        """The hidden states of the prompt tokens that enter, then of one token of each live row."""
        ...

    def keep(self, batch: DecodeBatch, row: int) -> None:
        """Keep the keys and values of a row for a later call, before it is dropped."""
        ...

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        """Remove entries: those of `rows` and `slots` move to the places of removed ones."""
        ...


class ModuleRunner:
    """`ModelRunner` through the model's own modules, or a copy of them in `dtype`, on any device.

    It keeps nothing for a later call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        longest_prompt: int,
        longest_answer: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._backbone = model.base_model if dtype is None else cast_copy(model.base_model, dtype)
        self._device = model.device
        self._prompts, self._answers = KVStore(longest_prompt), KVStore(longest_answer)

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        return np.zeros(len(prompts), dtype=np.int64)

    def keep(self, batch: DecodeBatch, row: int) -> None:
        pass

    def admit(self, entering: Prefill, ahead: int) -> None:
        most = int(entering.lengths.max())
        self._prompts.reserve(ahead, most, entering.first)

    def reserve(self, places_R: Ints, ahead: int) -> None:
        self._answers.reserve(ahead, int(places_R.max()), len(places_R))

    def __call__(
        self, tokens: Tensor, positions: Tensor, entering: Prefill, live: DecodeRows | None
    ) -> Tensor:
        slot, place = (torch.from_numpy(x).to(self._device) for x in entering.places())
        layout = StepLayout(
            stores=(self._prompts, self._answers),
            prompts=PackedLayout(entering.lengths.tolist()) if len(entering.lengths) else None,
            prompt_places=(slot, place),
            live=live,
        )
        out = self._backbone(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            layout=Attending(layout),
        )
        states: Tensor = out.last_hidden_state[0]
        return states

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        self._answers.copy(*rows)
        self._prompts.copy(*slots)


def cast_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with its weights and adapters in `dtype`; the module itself if it has that type.

    Weights that two modules share stay shared, and those that have the type are not copied. Buffers
    keep their type: the frequencies of rotary embeddings must not be rounded."""
    parameters = list(module.parameters())
    if all(p.dtype == dtype for p in parameters if p.is_floating_point()):
        return module
    # A memo for deepcopy, so that no copy in the old type exists.
    made: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(dtype) if p.is_floating_point() else p.detach(), False)
        for p in parameters
    }
    return copy.deepcopy(module, made)


class KVStore:
    """Keys and values by layer: two tensors (entries, heads, capacity, width) a layer.

    Places that were not written are zero or hold an older value; a mask hides them (it could not
    hide a NaN). Tensors are created when a layer first writes. No entry needs more than `longest`
    places.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._entries = self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, entries: int, places: int, live: int) -> None:
        """Make room for these numbers of entries and places; the first `live` entries are kept."""
        if places > self._capacity:
            room = max(places + _CHUNK, self._capacity * 3 // 2)
            self._capacity = min(-(-room // _CHUNK) * _CHUNK, self._longest)
            self._entries = entries
        elif entries > self._entries:
            self._entries = max(entries, self._entries * 3 // 2)
        else:
            return
        for layer, (keys, values) in self._layers.items():
            # One after the other, so that only one exists twice.
            keys = self._moved(keys, live)
            self._layers[layer] = keys, values
            self._layers[layer] = keys, self._moved(values, live)

    def write(
        self,
        layer: int,
        places: Places,
        key: Float[Tensor, "T Hkv D"],
        value: Float[Tensor, "T Hkv D"],
    ) -> None:
        """Store the keys and values of T tokens at these places."""
        if layer not in self._layers:
            self._layers[layer] = self._empty(key), self._empty(value)
        for stored, new in zip(self._layers[layer], (key, value), strict=True):
            stored[places[0], :, places[1]] = new.to(stored.dtype)

    def read(self, layer: int, entries: int, places: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first entries and places, (entries·heads, places, width) each."""
        keys, values = self._layers[layer]
        return _first(keys, entries, places), _first(values, entries, places)

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy entries `source` to entries `target`."""
        if not len(source):
            return
        for pair in self._layers.values():
            for stored in pair:
                old, new = (torch.from_numpy(x).to(stored.device) for x in (source, target))
                stored[new] = stored[old]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._entries, like.shape[1], self._capacity, like.shape[-1])

    def _moved(self, old: Tensor, live: int) -> Tensor:
        new = self._empty(old)
        new[:live, :, : old.shape[2]] = old[:live]
        return new


def _first(stored: Tensor, entries: int, places: int) -> Float[Tensor, "EH P D"]:
    entries = min(entries, stored.shape[0])
    return stored.flatten(0, 1).narrow(0, 0, entries * stored.shape[1])[:, :places]


@dataclass(frozen=True, eq=False)
class Prefill:
    """Prompts that enter at a step: the tokens of each, and the slot of the first.

    The first `known` tokens of a prompt have their keys and values already (None: of no prompt).
    Prompts without known tokens enter first, end to end, then the new tokens of the others.
    """

    lengths: Ints
    first: int
    known: Ints | None = None

    @property
    def tokens(self) -> int:
        """How many enter."""
        return int(self._counts().sum())

    @property
    def whole(self) -> Ints:
        """Lengths of the prompts without known tokens."""
        return self.lengths if self.known is None else self.lengths[self.known == 0]

    def order(self) -> Ints:
        """The prompts in the order in which they enter, counted from the first slot."""
        return np.argsort(self.before > 0, kind="stable")

    def places(self) -> tuple[Ints, Ints]:
        """Slot, and place within the prompt, of each token that enters."""
        order = self.order()
        counts = self._counts()[order]
        starts = counts.cumsum() - counts - self.before[order]
        return self.first + np.repeat(order, counts), np.arange(self.tokens) - np.repeat(
            starts, counts
        )

    def last(self) -> Ints:
        """The index of each prompt's last token among those that enter."""
        order, last = self.order(), np.empty_like(self.lengths)
        last[order] = self._counts()[order].cumsum() - 1
        return last

    @property
    def before(self) -> Ints:
        """Known tokens of each prompt."""
        return np.zeros_like(self.lengths) if self.known is None else self.known

    def _counts(self) -> Ints:
        return self.lengths - self.before


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The R rows that are decoded at a step, and the G prompts that they answer.

    Row r answers prompt `slot_R[r]` and has its new token at `end_R[r]` of its own; prompt g has
    `length_G[g]` tokens. Both are the first entries of their stores.
    """

    slot_R: Ints
    end_R: Ints
    length_G: Ints
    device: torch.device
    _cache: dict[object, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.slot_R)

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.length_G.max())

    @property
    def places(self) -> int:
        """Own tokens of the longest row, with its new one."""
        return int(self.end_R.max()) + 1

    def once(self, name: object, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed once for all layers."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def written(self) -> Places:
        """Entry and place of the rows' new tokens."""
        return torch.arange(self.rows, device=self.device), self._tensor(self.end_R)

    def by_prompt(self, heads: int) -> tuple[Int[Tensor, "G H K"], Int[Tensor, "RH"]]:
        """The rows of each prompt, K at most, and the index of each row among these, per head.

        Row r's head h counts as row r·H + h. Where a prompt has fewer rows, row 0 fills up; its
        results there are not read.
        """
        order = np.argsort(self.slot_R, kind="stable")
        counts = np.bincount(self.slot_R, minlength=len(self.length_G))
        starts = counts.cumsum() - counts
        rank = np.empty(self.rows, dtype=np.int64)
        rank[order] = np.arange(self.rows) - np.repeat(starts, counts)
        most = int(counts.max())
        rows = np.zeros((len(self.length_G), most), dtype=np.int64)
        rows[self.slot_R, rank] = np.arange(self.rows)
        head = np.arange(heads)
        rows = rows[:, None] * heads + head[:, None]
        back = (self.slot_R[:, None] * heads + head) * most + rank[:, None]
        return self._tensor(rows), self._tensor(back.ravel())

    def visible(self, window: int | None) -> Tensor:
        """Which places each row sees, of its prompt and then its own. (R, 1, 1, W + C)"""
        before = self._tensor(self.length_G[self.slot_R])[:, None]
        end = self._tensor(self.end_R)[:, None]
        prompt = torch.arange(self.width, device=self.device)
        own = torch.arange(self.places, device=self.device)
        seen = torch.cat([prompt < before, own <= end], dim=1)
        if window is not None:
            places = torch.cat([prompt.expand(self.rows, -1), before + own], dim=1)
            seen &= places > before + end - window
        return seen[:, None, None]

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)


@dataclass(frozen=True, eq=False)
class StepLayout:
    """One step: the prompts that enter, end to end, then one token of each live row.

    `stores` have an entry for each prompt, and one for each answer. `prompt_places` are entry and
    place of the prompts' tokens; `live` is None if no row is decoded yet.
    """

    stores: tuple[KVStore, KVStore]
    prompts: PackedLayout | None
    prompt_places: Places
    live: DecodeRows | None

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """Each prompt attends to itself, each live row to its prompt and its own tokens."""
        query, key, value = in_one_dtype(query, key, value)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        parts = []
        split = 0
        if self.prompts is not None:
            split = self.prompts.tokens
            self.stores[0].write(layer, self.prompt_places, key[:split], value[:split])
            own = (query[:split], key[:split], value[:split])
            parts.append(self.prompts.attend_tokens(*own, rules))
        if self.live is not None:
            places = self.live.once("written", self.live.written)
            self.stores[1].write(layer, places, key[split:], value[split:])
            parts.append(self._rows(layer, query[split:], rules, self.live))
        return torch.cat(parts).unsqueeze(0)

    def _rows(
        self, layer: int, query: Float[Tensor, "R H D"], rules: Rules, live: DecodeRows
    ) -> Float[Tensor, "R H D"]:
        """One softmax over both parts; the queries of all rows of a prompt in one product."""
        prompt = self.stores[0].read(layer, len(live.length_G), live.width)
        own = self.stores[1].read(layer, live.rows, live.places)
        heads = own[0].shape[0] // live.rows
        rows, back = live.once(("rows", heads), lambda: live.by_prompt(heads))

        def by_prompt(left: Tensor, right: Tensor) -> Tensor:
            """(R·Hkv, Q, X) and a prompt's (G·Hkv, X, Y) to (R·Hkv, Q, Y)."""
            grouped = left.index_select(0, rows.flatten())
            out = torch.bmm(grouped.view(len(right), -1, left.shape[-1]), right)
            return out.view(-1, left.shape[1], right.shape[-1]).index_select(0, back)

        # The query heads of one key-value head are its queries, so that no key is repeated.
        queries = query.reshape(live.rows * heads, -1, query.shape[-1])
        scores = torch.cat(
            [
                by_prompt(queries, prompt[0].transpose(1, 2)),
                torch.bmm(queries, own[0].transpose(1, 2)),
            ],
            dim=-1,
        ).view(live.rows, heads, queries.shape[1], -1)
        sinks = None if rules.sinks is None else rules.sinks.view(1, heads, -1, 1)
        visible = live.once(("visible", rules.window), lambda: live.visible(rules.window))
        weights = attention_weights(scores, rules, visible, sinks).flatten(0, 1).to(query.dtype)
        out = by_prompt(weights[..., : live.width], prompt[1])
        return torch.baddbmm(out, weights[..., live.width :], own[1]).view(query.shape)
