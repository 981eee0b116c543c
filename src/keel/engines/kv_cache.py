"""The keys and values of what is being decoded: each prompt's once, and each answer's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

Ints = npt.NDArray[np.int64]

_CHUNK = 32
"""Places by which a shelf grows at least."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where on a shelf a run of tokens goes: entry and place within it, one pair a token.

    `column` says that they are the first entries in order, all at this one place.
    """

    entry_T: Int[Tensor, "T"]
    place_T: Int[Tensor, "T"]
    column: int | None = None
    _flat: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def flat(self, heads: int, capacity: int) -> Int[Tensor, "T_heads"]:
        """Indices into an (entries, heads, capacity) tensor laid flat, token by token."""
        shape = (heads, capacity)
        if shape not in self._flat:
            head = torch.arange(heads, device=self.entry_T.device)
            index = (self.entry_T[:, None] * heads + head) * capacity + self.place_T[:, None]
            self._flat[shape] = index.flatten()
        return self._flat[shape]


class Shelf:
    """Keys and values by layer: two tensors (entries, heads, capacity, width) a layer.

    What is read beyond an entry's end is hidden by a mask, and is zero or of an earlier one: a NaN
    there would not stay hidden. Zeros are written as places come into use, so that memory which
    nobody needs yet is not touched. Tensors are made when a layer first writes, so nothing is
    assumed of its heads. No entry ever needs more than `longest` places.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._entries = self._capacity = self._clean = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, entries: int, places: int, live: int) -> None:
        """Make room for so many entries of so many places; the first `live` are kept.

        Where it grows in places it shrinks to the entries: what is dead is left behind.
        """
        if places > self._capacity:
            room = max(places + _CHUNK, self._capacity * 3 // 2)
            self._capacity = min(-(-room // _CHUNK) * _CHUNK, self._longest)
            self._entries = entries
        elif entries > self._entries:
            self._entries = max(entries, self._entries * 3 // 2)
        else:
            self._clear(places)
            return
        for layer, (keys, values) in list(self._layers.items()):
            # One after the other, so that at most one is there twice.
            keys = self._moved(keys, live)
            self._layers[layer] = keys, values
            self._layers[layer] = keys, self._moved(values, live)
        self._clear(places)

    def _clear(self, places: int) -> None:
        """Zeros in all places that are used now."""
        if places <= self._clean:
            return
        before, self._clean = self._clean, min(-(-places // _CHUNK) * _CHUNK, self._capacity)
        for pair in self._layers.values():
            for stored in pair:
                stored[:, :, before : self._clean].zero_()

    def write(
        self,
        layer: int,
        places: Places,
        key: Float[Tensor, "T Hkv D"],
        value: Float[Tensor, "T Hkv D"],
    ) -> None:
        """Put the keys and values of T tokens in their places."""
        if layer not in self._layers:
            self._layers[layer] = self._empty(key), self._empty(value)
        for stored, new in zip(self._layers[layer], (key, value), strict=True):
            if places.column is not None:
                stored.narrow(0, 0, len(new)).select(2, places.column).copy_(new)
                continue
            flat = places.flat(new.shape[1], self._capacity)
            new = new.to(stored.dtype).reshape(-1, new.shape[-1])
            stored.view(-1, new.shape[-1])[flat] = new

    def read(self, layer: int, entries: int, places: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first entries and places, (entries·heads, places, width) each."""
        keys, values = self._layers[layer]
        return _first(keys, entries, places), _first(values, entries, places)

    def copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        """Copy entries `source` to entries `target`, which share none."""
        if not len(source):
            return
        for pair in self._layers.values():
            for stored in pair:
                device = stored.device
                whence, where = (torch.from_numpy(x).to(device) for x in (source, target))
                stored[where, :, : self._clean] = stored[whence, :, : self._clean]

    def _empty(self, like: Tensor) -> Tensor:
        new = like.new_empty(self._entries, like.shape[1], self._capacity, like.shape[2])
        new[:, :, : self._clean].zero_()
        return new

    def _moved(self, old: Tensor, live: int) -> Tensor:
        new = old.new_empty(self._entries, old.shape[1], self._capacity, old.shape[3])
        new[:live, :, : self._clean] = old[:live, :, : self._clean]
        new[live:, :, : self._clean].zero_()
        return new


def _first(stored: Tensor, entries: int, places: int) -> Float[Tensor, "EH P D"]:
    entries = min(entries, stored.shape[0])
    return stored.flatten(0, 1).narrow(0, 0, entries * stored.shape[1])[:, :places]


class KVCache:
    """Two shelves: prompts, of which each is one entry, and what was written in answer to them."""

    def __init__(self, longest_prompt: int, longest_answer: int) -> None:
        self.prompts = Shelf(longest_prompt)
        self.answers = Shelf(longest_answer)


@dataclass(frozen=True, eq=False)
class Prefill:
    """Prompts that enter at a step: their tokens each, and the slot of the first.

    Prompts of which nothing is `known` enter whole, end to end; behind them what is left of the
    others, whose first `known` tokens have their keys and values already (None: of all nothing).
    """

    lengths: Ints
    first: int
    known: Ints | None = None

    @property
    def tokens(self) -> int:
        """Those that enter."""
        return int(self._counts().sum())

    @property
    def whole(self) -> Ints:
        """Lengths of the prompts of which nothing is known."""
        return self.lengths if self.known is None else self.lengths[self.known == 0]

    def order(self) -> Ints:
        """Which prompt enters first, and so on, counted from that of the first slot."""
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
        """Where each prompt's last token is among those that enter."""
        order, last = self.order(), np.empty_like(self.lengths)
        last[order] = self._counts()[order].cumsum() - 1
        return last

    @property
    def before(self) -> Ints:
        """Tokens of each that are known."""
        return np.zeros_like(self.lengths) if self.known is None else self.known

    def _counts(self) -> Ints:
        return self.lengths - self.before


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The R rows that are decoded at a step, and the G prompts that they answer.

    Row r answers prompt `slot_R[r]` and has its new token at `end_R[r]` of its own; prompt g has
    `length_G[g]` tokens. Both are the first entries of their shelves.
    """

    slot_R: npt.NDArray[np.int64]
    end_R: npt.NDArray[np.int64]
    length_G: npt.NDArray[np.int64]
    device: torch.device
    _made: dict[object, Tensor | None] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.slot_R)

    @property
    def prompts(self) -> int:
        return len(self.length_G)

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.length_G.max())

    @property
    def places(self) -> int:
        """Own tokens of the longest row, its new one among them."""
        return int(self.end_R.max()) + 1

    @property
    def longest(self) -> int:
        """Tokens of the longest row with its prompt."""
        return int((self.length_G[self.slot_R] + self.end_R).max()) + 1

    def written(self) -> Places:
        """Where the rows' new tokens go."""
        same = bool((self.end_R == self.end_R[0]).all())
        rows = torch.arange(self.rows, device=self.device)
        return Places(rows, self.tensor(self.end_R), int(self.end_R[0]) if same else None)

    def by_prompt(self, heads: int) -> tuple[Int[Tensor, "G H K"], Int[Tensor, "RH"]]:
        """The rows of each prompt, K at most, and where each row is among these; head by head.

        Row r's head h counts as row r·H + h. Where a prompt has fewer, row 0 stands; nothing reads
        what comes of it.
        """
        order = np.argsort(self.slot_R, kind="stable")
        counts = np.bincount(self.slot_R, minlength=self.prompts)
        starts = counts.cumsum() - counts
        rank = np.empty(self.rows, dtype=np.int64)
        rank[order] = np.arange(self.rows) - np.repeat(starts, counts)
        most = int(counts.max())
        asks = np.zeros((self.prompts, most), dtype=np.int64)
        asks[self.slot_R, rank] = np.arange(self.rows)
        head = np.arange(heads)
        asks = asks[:, None] * heads + head[:, None]
        back = (self.slot_R[:, None] * heads + head) * most + rank[:, None]
        return self.tensor(asks), self.tensor(back.ravel())

    def once(self, name: object, make: Callable[[], Tensor | None]) -> Tensor | None:
        """What `make` gives, the same for all layers."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device)
