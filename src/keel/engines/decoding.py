"""Attention of a step of the engine: prompts among themselves, rows to their prompt and their own.

Rows that answer one prompt read its keys and values together, where they lie once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from keel.engines.store import Live, Places, Store
from keel.models import branching
from keel.models.attention import Rules, attention_weights, in_one_dtype
from keel.models.layout import PackedLayout


@dataclass(frozen=True, eq=False)
class StepLayout:
    """One step: prompts that enter, end to end, then one token of each live row.

    `prompt_places` says where the prompts' tokens go on their shelf; `live` is None where no row
    is decoded yet.
    """

    store: Store
    prompts: PackedLayout | None
    prompt_places: Places
    live: Live | None

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
        heads = own[0].shape[1]
        # The query heads of one key-value head become its queries, so that no key is repeated.
        query = query.reshape(live.rows, heads, -1, query.shape[-1])
        windowed = rules.window is not None and rules.window < live.longest
        plain = not windowed and rules.softcap is None and rules.sinks is None
        if plain and branching.applies(query, *own):
            return self._joined(query, first, own, rules.scaling).flatten(1, 2)
        return self._written_out(query, first, own, rules).flatten(1, 2)

    def _joined(
        self,
        query: Float[Tensor, "R Hkv Q D"],
        first: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        scaling: float,
    ) -> Float[Tensor, "R Hkv Q D"]:
        """Two parts by the processor's own kernel, joined as in `branching`."""
        out, norm = branching.part(query, *own, scaling, self._own_bias(query.dtype))
        asks, back = self._by_prompt
        grouped = _grouped(query, asks)
        other, other_norm = branching.part(grouped, *first, scaling, self._first_bias(query.dtype))
        share = query.shape[2]
        other = _apart(other, share).index_select(0, back)
        other_norm = _apart(other_norm.unsqueeze(-1), share).index_select(0, back)
        # e^(l₂−l) with l = log(e^l₁ + e^l₂).
        return torch.lerp(out, other, (other_norm - norm.unsqueeze(-1)).sigmoid_().to(out.dtype))

    def _written_out(
        self,
        query: Float[Tensor, "R Hkv Q D"],
        first: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        rules: Rules,
    ) -> Float[Tensor, "R Hkv Q D"]:
        """Any rules, on any device: one softmax over both parts."""
        asks, back = self._by_prompt
        width, share = first[0].shape[2], query.shape[2]
        before = torch.matmul(_grouped(query, asks), first[0].transpose(-1, -2))
        before = _apart(before, share).index_select(0, back)
        scores = torch.cat([before, torch.matmul(query, own[0].transpose(-1, -2))], dim=-1)
        sinks = None if rules.sinks is None else rules.sinks.view(1, query.shape[1], -1, 1)
        weights = attention_weights(scores, rules, self._visible(rules.window), sinks)
        weights = weights.to(query.dtype)
        out = torch.matmul(weights[..., width:], own[1])
        other = torch.matmul(_grouped(weights[..., :width], asks), first[1])
        return out + _apart(other, share).index_select(0, back)

    @cached_property
    def _row_places(self) -> Places:
        assert self.live is not None
        return self.live.written()

    @cached_property
    def _by_prompt(self) -> tuple[Tensor, Tensor]:
        assert self.live is not None
        return self.live.by_prompt()

    def _own_bias(self, dtype: torch.dtype) -> Float[Tensor, "R 1 1 C"] | None:
        """0 at a row's own places up to its new token, -inf beyond; None where all are alike."""
        live = self.live
        assert live is not None
        return live.once(("own", dtype), lambda: _beyond(live, live.end_R + 1, live.places, dtype))

    def _first_bias(self, dtype: torch.dtype) -> Float[Tensor, "G 1 1 W"] | None:
        """0 at a prompt's places, -inf beyond; None where all are alike."""
        live = self.live
        assert live is not None
        return live.once(("first", dtype), lambda: _beyond(live, live.length_G, live.width, dtype))

    def _visible(self, window: int | None) -> Tensor | None:
        """Which places each row sees, first of its prompt and then of its own. (R, 1, 1, W + C)"""
        live = self.live
        assert live is not None
        return live.once(("visible", window), lambda: _seen(live, window))


def _beyond(live: Live, lengths: np.ndarray, places: int, dtype: torch.dtype) -> Tensor | None:
    if bool((lengths == places).all()):
        return None
    hidden = torch.arange(places, device=live.device) >= live.tensor(lengths)[:, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=live.device)
    return bias.masked_fill_(hidden, float("-inf"))[:, None, None]


def _seen(live: Live, window: int | None) -> Tensor:
    before = live.tensor(live.length_G[live.slot_R])[:, None]
    end = live.tensor(live.end_R)[:, None]
    first = torch.arange(live.width, device=live.device)
    own = torch.arange(live.places, device=live.device)
    seen = torch.cat([first < before, own <= end], dim=1)
    if window is not None:
        places = torch.cat([first.expand(live.rows, -1), before + own], dim=1)
        seen &= places > before + end - window
    return seen[:, None, None]


def _grouped(rows: Float[Tensor, "R Hkv Q X"], asks: Tensor) -> Float[Tensor, "G Hkv KQ X"]:
    """The rows of each prompt as its queries."""
    chosen = rows.index_select(0, asks.flatten())
    return chosen.view(*asks.shape, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)


def _apart(grouped: Float[Tensor, "G Hkv KQ X"], share: int) -> Float[Tensor, "GK Hkv Q X"]:
    """`_grouped` undone, before the rows are put in order."""
    prompts, heads, queries, width = grouped.shape
    parts = grouped.reshape(prompts, heads, queries // share, share, width)
    return parts.transpose(1, 2).flatten(0, 1)
