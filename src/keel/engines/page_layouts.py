"""Which tokens see which, with keys and values in pages: rows of one token, and what enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.models.attention import PackedLayout, Rules, flash, flash_applies, in_one_dtype
from keel.models.paged import attend_pages, store

Pools = Sequence[tuple[Float[Tensor, "pages Hkv 64 D"], Float[Tensor, "pages Hkv 64 D"]]]
"""Keys and values of each layer."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """One new token of each of R rows, which sees the row's pages; see `keel.models.paged`."""

    pools: Pools
    page_R: Int[Tensor, "R"]
    place_R: Int[Tensor, "R"]
    pages_R: Int[Tensor, "R P"]
    length_R: Int[Tensor, "R"]
    splits: int = 1

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """See `keel.models.attention.Layout`."""
        heads = in_one_dtype(query, key, value)
        query, key, value = (x[0].transpose(0, 1) for x in heads)
        keys, values = self.pools[layer]
        store(keys, values, key, value, self.page_R, self.place_R)
        out = attend_pages(
            query, keys, values, self.pages_R, self.length_R, rules, splits=self.splits
        )
        return out.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class ContinuedLayout:
    """Tokens after known ones, entry by entry; `rows` has one row for each of them.

    `seen` are page and place of all keys that the entries see; `ends` and `most` as in `flash`.
    """

    rows: RowLayout
    seen: tuple[Int[Tensor, "K"], Int[Tensor, "K"]]
    ends: tuple[Int[Tensor, " ends"], Int[Tensor, " ends"]]
    most: tuple[int, int]

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """See `keel.models.attention.Layout`. Flash attention reads the keys once for an entry,
        rows once for each token."""
        keys, values = self.rows.pools[layer]
        if keys.dtype != query.dtype or not flash_applies(query[0].transpose(0, 1), value, rules):
            return self.rows.attend(layer, query, key, value, rules)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        store(keys, values, key, value, self.rows.page_R, self.rows.place_R)
        page, place = self.seen
        key, value = keys[page, :, place], values[page, :, place]
        return flash(query, key, value, self.ends, self.most, rules).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class EntryLayout:
    """Tokens that enter: whole beginnings end to end (`packed`), then tokens after known ones.

    Page and place of all tokens are in `page_T` and `place_T`.
    """

    packed: PackedLayout | None
    continued: ContinuedLayout | None
    pools: Pools
    page_T: Int[Tensor, "T"]
    place_T: Int[Tensor, "T"]

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """See `keel.models.attention.Layout`."""
        query, key, value = in_one_dtype(query, key, value)
        parts = []
        split = 0
        if self.packed is not None:
            split = self.packed.tokens
            q, k, v = (x[0].transpose(0, 1)[:split] for x in (query, key, value))
            keys, values = self.pools[layer]
            store(keys, values, k, v, self.page_T[:split], self.place_T[:split])
            parts.append(self.packed.attend_tokens(q, k, v, rules).unsqueeze(0))
        if self.continued is not None:
            q, k, v = (x[:, :, split:] for x in (query, key, value))
            parts.append(self.continued.attend(layer, q, k, v, rules))
        return torch.cat(parts, dim=1)


class LayerShapes:
    """Notes the heads and width of each layer's keys and values."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int, torch.dtype]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        query, key, value = in_one_dtype(query, key, value)
        self.found[layer] = key.shape[1], key.shape[-1], key.dtype
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
