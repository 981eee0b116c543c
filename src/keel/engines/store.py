"""The keys and values of the rows being decoded, and the attention layout that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.models.attention import Rules, attend_rows, in_one_dtype
from keel.models.layout import PackedLayout

_CHUNK = 32
"""Places by which the store grows at least."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where in the store a run of tokens goes: row and place within the row, one pair a token."""

    row_T: Int[Tensor, "T"]
    place_T: Int[Tensor, "T"]
    _flat: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def flat(self, heads: int, capacity: int) -> Int[Tensor, "T_heads"]:
        """Indices into a (rows, heads, capacity) tensor laid flat, token by token."""
        shape = (heads, capacity)
        if shape not in self._flat:
            head = torch.arange(heads, device=self.row_T.device)
            index = (self.row_T[:, None] * heads + head) * capacity + self.place_T[:, None]
            self._flat[shape] = index.flatten()
        return self._flat[shape]


class Store:
    """Keys and values by layer, row, head and place: two (rows, heads, capacity, width) a layer.

    A row holds one sequence from its first token on. What lies beyond its end is hidden by a mask,
    and is zero or of an earlier sequence: a NaN there would not stay hidden. The capacity grows in
    chunks up to `longest`, what the longest sequence can need. Tensors are made when a layer first
    writes, so nothing is assumed of its heads.
    """

    def __init__(self, rows: int, longest: int) -> None:
        self._rows = rows
        self._longest = longest
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, places: int) -> None:
        """Make every row hold at least `places` tokens."""
        if places <= self._capacity:
            return
        room = max(places + _CHUNK, self._capacity * 3 // 2)
        self._capacity = min(-(-room // _CHUNK) * _CHUNK, self._longest)
        for layer, pair in self._layers.items():
            keys, values = (self._grown(old) for old in pair)
            self._layers[layer] = keys, values

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
            flat = places.flat(new.shape[1], self._capacity)
            new = new.to(stored.dtype).reshape(-1, new.shape[-1])
            stored.view(-1, new.shape[-1])[flat] = new

    def read(self, layer: int, rows: int, places: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows and places, (rows, heads, places, width) each."""
        keys, values = self._layers[layer]
        return keys[:rows, :, :places], values[:rows, :, :places]

    def copy(
        self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], places: int
    ) -> None:
        """Copy the first places of rows `source` to rows `target`, which share no row."""
        for pair in self._layers.values():
            for stored in pair:
                device = stored.device
                rows = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
                stored[rows[1], :, :places] = stored[rows[0], :, :places]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._capacity, like.shape[2])

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(old.shape[0], old.shape[1], self._capacity, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new


@dataclass(frozen=True, eq=False)
class StepLayout:
    """One step of the engine: prompts that enter, end to end, then one token of each live row.

    `source_T` repeats each prompt's tokens once for every row of its group, and `prompt_places`
    says where they go: a prompt is computed once and stored n times. The R live rows are the first
    of the store; `place_R` is where the new token of each goes, and how many tokens lie before it.
    """

    store: Store
    prompts: PackedLayout | None
    source_T: Int[Tensor, "T"]
    prompt_places: Places
    row_places: Places
    width: int
    """Places of the longest live row, its new token among them."""
    _bias: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """Prompts attend among themselves, live rows to what is stored of them."""
        query, key, value = in_one_dtype(query, key, value)
        split = 0 if self.prompts is None else self.prompts.tokens
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # (T, Hkv, D)
        parts = []
        if self.prompts is not None:
            q, k, v = (x[:, :, :split] for x in (query, key, value))
            parts.append(self.prompts.attend(layer, q, k, v, rules)[0])
            k, v = (x.index_select(0, self.source_T) for x in (keys, values))
            self.store.write(layer, self.prompt_places, k, v)
        if query.shape[2] > split:
            self.store.write(layer, self.row_places, keys[split:], values[split:])
            q = query[0, :, split:].transpose(0, 1)
            k, v = self.store.read(layer, len(q), self.width)
            parts.append(attend_rows(q, k, v, self._visible(rules.window, q.dtype), rules))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def _visible(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "R C"]:
        """0 at a row's own places up to its new token and within the window, -inf elsewhere."""
        if window not in self._bias:
            end = self.row_places.place_T[:, None]
            places = torch.arange(self.width, device=end.device)
            hidden = places > end
            if window is not None:
                hidden |= places <= end - window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=end.device)
            self._bias[window] = bias.masked_fill_(hidden, float("-inf"))
        return self._bias[window]
