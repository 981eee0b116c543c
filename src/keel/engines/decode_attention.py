"""Attention of a step of the engine: prompts among themselves, rows to their prompt and their own.

Rows that answer one prompt read its keys and values together, where they lie once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.engines.kv_cache import DecodeRows, KVCache, Places
from keel.models.attention import shared_prefix as branching
from keel.models.attention.functions import Rules, attention_weights, in_one_dtype
from keel.models.attention.layout import PackedLayout

_ROUNDED = (torch.bfloat16, torch.float16)
"""Written out, scores of these would be rounded before the softmax."""


@dataclass(frozen=True, eq=False)
class StepLayout:
    """One step: prompts that enter, end to end, then one token of each live row.

    `prompt_places` says where the prompts' tokens go on their shelf; `live` is None where no row
    is decoded yet.
    """

    store: KVCache
    prompts: PackedLayout | None
    prompt_places: Places
    live: DecodeRows | None
    _made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

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
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend_tokens(layer, query, key, value, rules).unsqueeze(0)

    def attend_tokens(
        self,
        layer: int,
        query: Float[Tensor, "T H D"],
        key: Float[Tensor, "T Hkv D"],
        value: Float[Tensor, "T Hkv D"],
        rules: Rules,
    ) -> Float[Tensor, "T H D"]:
        """`attend`, token by token."""
        if self.prompts is None:
            self.store.answers.write(layer, self._row_places, key, value)
            return self._rows(layer, query, rules)
        split = self.prompts.tokens
        self.store.prompts.write(layer, self.prompt_places, key[:split], value[:split])
        out = self.prompts.attend_tokens(query[:split], key[:split], value[:split], rules)
        if self.live is None:
            return out
        self.store.answers.write(layer, self._row_places, key[split:], value[split:])
        return torch.cat([out, self._rows(layer, query[split:], rules)])

    def _rows(
        self, layer: int, query: Float[Tensor, "R H D"], rules: Rules
    ) -> Float[Tensor, "R H D"]:
        live = self.live
        assert live is not None
        own = self.store.answers.read(layer, live.rows, live.places)
        first = self.store.prompts.read(layer, live.prompts, live.width)
        windowed = rules.window is not None and rules.window < live.longest
        plain = not windowed and rules.softcap is None and rules.sinks is None
        # The query heads of one key-value head become its queries, so that no key is repeated.
        heads = own[0].shape[0] // live.rows
        rows = query.reshape(live.rows * heads, -1, query.shape[-1])
        if plain and query.dtype in _ROUNDED and branching.applies(rows, *own):
            return self._joined(rows, first, own, rules.scaling).view(query.shape)
        return self._written_out(rows, first, own, rules, plain).view(query.shape)

    def _joined(
        self,
        query: Float[Tensor, "RHkv Q D"],
        first: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        scaling: float,
    ) -> Float[Tensor, "RHkv Q D"]:
        """Two parts by the processor's own kernel, joined as in `branching`."""
        kept, before = self._hidden(query)
        asks, back = self._by_prompt(query)
        out, norm = branching.part(query, *own, scaling, kept)
        other, other_norm = branching.part(_grouped(query, asks), *first, scaling, before)
        other = _apart(other, query).index_select(0, back)
        other_norm = _apart(other_norm.unsqueeze(-1), query).index_select(0, back)
        # e^(l₂−l) with l = log(e^l₁ + e^l₂).
        return torch.lerp(out, other, (other_norm - norm.unsqueeze(-1)).sigmoid_().to(out.dtype))

    def _written_out(
        self,
        query: Float[Tensor, "RHkv Q D"],
        first: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        rules: Rules,
        plain: bool,
    ) -> Float[Tensor, "RHkv Q D"]:
        """Any rules, on any device: one softmax over both parts.

        `plain` ones need no more than that what lies beyond an end is hidden.
        """
        kept, before = self._hidden(query) if plain else (None, None)
        asks, back = self._by_prompt(query)
        theirs = _product(_grouped(query, asks), first[0], rules.scaling, before)
        theirs = _apart(theirs, query).index_select(0, back)
        scores = torch.cat([theirs, _product(query, own[0], rules.scaling, kept)], dim=-1)
        if plain:
            weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        else:
            weights = self._weights(scores, rules)
        weights = weights.to(query.dtype)
        width = first[0].shape[1]
        other = torch.bmm(_grouped(weights[..., :width], asks), first[1])
        other = _apart(other, query).index_select(0, back)
        return torch.baddbmm(other, weights[..., width:], own[1])

    def _weights(
        self, scores: Float[Tensor, "RHkv Q K"], rules: Rules
    ) -> Float[Tensor, "RHkv Q K"]:
        assert self.live is not None
        apart = scores.view(self.live.rows, -1, *scores.shape[1:])
        sinks = None if rules.sinks is None else rules.sinks.view(1, apart.shape[1], -1, 1)
        return attention_weights(apart, rules, self._visible(rules.window), sinks).flatten(0, 1)

    def _hidden(self, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """For a row's own places and for its prompt's: 0 where there is a token, -inf beyond; None
        where all are alike. (R·Hkv, 1, C), (G·Hkv, 1, W)"""
        live, dtype = self.live, query.dtype
        assert live is not None
        heads = len(query) // live.rows
        own = live.once(
            ("own", heads, dtype), lambda: _beyond(live, live.end_R + 1, live.places, heads, dtype)
        )
        first = live.once(
            ("first", heads, dtype), lambda: _beyond(live, live.length_G, live.width, heads, dtype)
        )
        return own, first

    def _by_prompt(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """`DecodeRows.by_prompt`, head by head."""
        assert self.live is not None
        heads = len(query) // self.live.rows
        if heads not in self._made:
            self._made[heads] = self.live.by_prompt(heads)
        return self._made[heads]

    @cached_property
    def _row_places(self) -> Places:
        assert self.live is not None
        return self.live.written()

    def _visible(self, window: int | None) -> Tensor | None:
        """Which places each row sees, first of its prompt and then of its own. (R, 1, 1, W + C)"""
        live = self.live
        assert live is not None
        return live.once(("visible", window), lambda: _seen(live, window))


def _beyond(
    live: DecodeRows, lengths: np.ndarray, places: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    if bool((lengths == places).all()):
        return None
    hidden = torch.arange(places, device=live.device) >= live.tensor(lengths)[:, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=live.device)
    bias.masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(heads, dim=0).unsqueeze(1)


def _seen(live: DecodeRows, window: int | None) -> Tensor:
    before = live.tensor(live.length_G[live.slot_R])[:, None]
    end = live.tensor(live.end_R)[:, None]
    first = torch.arange(live.width, device=live.device)
    own = torch.arange(live.places, device=live.device)
    seen = torch.cat([first < before, own <= end], dim=1)
    if window is not None:
        places = torch.cat([first.expand(live.rows, -1), before + own], dim=1)
        seen &= places > before + end - window
    return seen[:, None, None]


def _product(
    query: Float[Tensor, "S Q D"],
    key: Float[Tensor, "S K D"],
    scaling: float,
    bias: Float[Tensor, "S 1 K"] | None,
) -> Float[Tensor, "S Q K"]:
    """scaling · q·k + bias"""
    keys = key.transpose(1, 2)
    if bias is None:
        # What is multiplied by 0 is not read.
        return torch.baddbmm(query.new_empty(()), query, keys, beta=0, alpha=scaling)
    return torch.baddbmm(bias, query, keys, alpha=scaling)


def _grouped(
    rows: Float[Tensor, "RHkv Q X"], asks: Int[Tensor, "G Hkv K"]
) -> Float[Tensor, "GHkv KQ X"]:
    """The rows of each prompt as its queries, head by head."""
    chosen = rows.index_select(0, asks.flatten())
    return chosen.view(asks.shape[0] * asks.shape[1], -1, rows.shape[-1])


def _apart(
    grouped: Float[Tensor, "GHkv KQ X"], query: Float[Tensor, "RHkv Q D"]
) -> Float[Tensor, "GHkvK Q X"]:
    """`_grouped` undone, before the rows are put in order."""
    return grouped.reshape(-1, query.shape[1], grouped.shape[-1])
