"""The layout of training and scoring: which kernel attends over pieces that lie end to end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from keel.models.attention import compiled as causal
from keel.models.attention import shared_prefix as branching
from keel.models.attention.functions import Rules, explicit, in_one_dtype
from keel.models.attention.segments import Pieces, alike
from keel.models.kernels.causal import CausalPlan

try:
    from torch.nn.attention import varlen
except ImportError:  # a build of torch without it: packed attention falls back to SDPA
    _VARLEN: Callable[..., Any] | None = None
else:
    _VARLEN = varlen.varlen_attn

_VARLEN_ARGUMENTS = {"scale", "window_size", "enable_gqa"}
_VARLEN_READY = _VARLEN is not None and set(inspect.signature(_VARLEN).parameters).issuperset(
    _VARLEN_ARGUMENTS
)


class PackedLayout:
    """Pieces end to end: each token sees its own piece's earlier tokens, itself, and the piece that
    its own follows.

    `lengths` and `follows` as in `Pieces`. Plain attention on a CPU reads a shared prompt in place
    (`branching`); on CUDA in half precision one variable-length flash-attention call does all,
    where its rules allow it; what is left goes run by run of equal lengths. The same layout serves
    all layers and may be used for forward and backward.
    """

    def __init__(self, lengths: Sequence[int], follows: Sequence[int] = ()) -> None:
        self.pieces = Pieces(tuple(int(length) for length in lengths), tuple(follows))
        # Plans, index tensors and masks, made at the first layer and shared by the others.
        self._made: dict[Any, Any] = {}

    @property
    def tokens(self) -> int:
        """T."""
        return self.pieces.tokens

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """Causal attention within each sequence; see `Layout.attend`."""
        if query.shape[0] != 1 or query.shape[2] != self.tokens:
            raise ValueError(
                f"the layout has {self.tokens} tokens, the model was given {tuple(query.shape)}"
            )
        query, key, value = in_one_dtype(query, key, value)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend_tokens(query, key, value, rules).unsqueeze(0)

    def attend_tokens(
        self,
        query: Float[Tensor, "T H D"],
        key: Float[Tensor, "T Hkv D"],
        value: Float[Tensor, "T Hkv D"],
        rules: Rules,
    ) -> Float[Tensor, "T H D"]:
        """`attend`, token by token. Raises ValueError for more or fewer than the pieces have."""
        if len(query) != self.tokens:
            raise ValueError(f"{len(query)} tokens, but the pieces have {self.tokens}")
        if _flash_applies(query, value, rules):
            return self._flash(query, key, value, rules)
        if causal.applies(query, key, value, rules):
            return causal.attend(query, key, value, self._once("causal", self._causal), rules)
        if self._plain(rules) and branching.applies(query, key, value):
            plan = self._once("plan", lambda: branching.plan(self.pieces))
            return branching.attend(query, key, value, plan, rules.scaling)
        return self._in_runs(query, key, value, rules)

    def _causal(self) -> CausalPlan:
        return CausalPlan(self.pieces.lengths, self.pieces.follows)

    def _plain(self, rules: Rules) -> bool:
        """Whether the rules say no more than causality does."""
        windowed = rules.window is not None and rules.window < self.pieces.longest
        return not windowed and rules.softcap is None and rules.sinks is None

    def _in_runs(
        self, query: Tensor, key: Tensor, value: Tensor, rules: Rules
    ) -> Float[Tensor, "T H D"]:
        """Pieces of one length and as much before them together; what they follow is repeated."""
        device = query.device
        order, counts, asks, sees, back = self._once(("runs", device), lambda: self._runs(device))
        if back is not None:
            query = query.index_select(0, asks)
        if sees is not None:
            key, value = key.index_select(0, sees), value.index_select(0, sees)
        parts = []
        first = start = stop = 0
        for count in counts:
            length, before = self.pieces.lengths[order[first]], self.pieces.before[order[first]]
            first += count
            q = query[start : start + count * length].view(count, length, *query.shape[1:])
            seen = count * (before + length)
            k, v = (
                x[stop : stop + seen].view(count, before + length, *x.shape[1:])
                for x in (key, value)
            )
            start, stop = start + count * length, stop + seen
            mask = self._mask(length, before, rules, device)
            part = _causal(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rules, mask)
            parts.append(part.transpose(1, 2).flatten(0, 1))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if back is None else out.index_select(0, back)

    def _runs(
        self, device: torch.device
    ) -> tuple[tuple[int, ...], tuple[int, ...], Tensor | None, Tensor | None, Tensor | None]:
        """Pieces in order of their runs, the runs' sizes, the tokens that ask in this order and
        that are seen (None: as they lie), and the way back."""
        pieces = self.pieces
        order, counts = alike(list(zip(pieces.lengths, pieces.before, strict=True)))
        asks = back = sees = None
        if order != tuple(range(len(order))):
            spans = [torch.arange(pieces.lengths[p]) + pieces.starts[p] for p in order]
            asks = torch.cat(spans).to(device)
            back = asks.argsort()
        if asks is not None or pieces.follows:
            sees = pieces.visible(order).to(device)
        return order, counts, asks, sees, back

    def _mask(
        self, length: int, before: int, rules: Rules, device: torch.device
    ) -> Bool[Tensor, "L K"] | None:
        """Which of the tokens before a piece and in it each of its tokens sees; None where plain
        causality says the same."""
        needed = rules.softcap is not None or rules.sinks is not None or before > 0
        seen = before + length
        windowed = rules.window is not None and rules.window < seen
        if not needed and not windowed:
            return None

        def make() -> Tensor:
            mask = torch.ones(length, seen, dtype=torch.bool, device=device).tril(before)
            if windowed and rules.window is not None:
                mask = mask.triu(before + 1 - rules.window)
            return mask

        window = rules.window if windowed else None
        mask: Tensor = self._once(("mask", length, before, window, device), make)
        return mask

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """All pieces in one variable-length flash-attention call. (T, heads, D) → (T, H, D).

        Causality is aligned to the last key, so a piece's queries see all that it follows.
        """
        device, pieces = query.device, self.pieces
        asks, sees = self._once(("bounds", device), lambda: self._bounds(device))
        if pieces.follows:
            every = range(len(pieces.lengths))
            index = self._once(("sees", device), lambda: pieces.visible(every).to(device))
            key, value = key.index_select(0, index), value.index_select(0, index)
        # Flash attention counts the keys to the left of a query, a window counts the query too.
        left = -1 if rules.window is None else rules.window - 1
        assert _VARLEN is not None
        out: Tensor = _VARLEN(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            asks,
            sees,
            max(pieces.lengths),
            pieces.longest,
            scale=rules.scaling,
            window_size=(left, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out

    def _bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each piece's queries begin and end, and the keys that it sees."""
        lengths = torch.tensor((0, *self.pieces.lengths), dtype=torch.int32)
        before = torch.tensor((0, *self.pieces.before), dtype=torch.int32)
        asks, sees = lengths.cumsum(0), (lengths + before).cumsum(0)
        return asks.to(device, torch.int32), sees.to(device, torch.int32)

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def _flash_applies(query: Tensor, value: Tensor, rules: Rules) -> bool:
    """Whether variable-length flash attention can do it: what it needs of card, dtype and rules."""
    width = query.shape[-1]
    return (
        _VARLEN_READY
        and query.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and rules.softcap is None
        and rules.sinks is None
        and width == value.shape[-1]
        and width % 8 == 0
        and width <= 256
    )


def _causal(
    query: Float[Tensor, "S H L D"],
    key: Float[Tensor, "S Hkv K D"],
    value: Float[Tensor, "S Hkv K D"],
    rules: Rules,
    mask: Bool[Tensor, "L K"] | None,
) -> Float[Tensor, "S H L D"]:
    """Causal attention of S pieces of one length; `mask` None means plainly causal, K = L."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if rules.softcap is not None or rules.sinks is not None:
        assert mask is not None
        count, _, length, width = query.shape
        grouped = query.reshape(count, kv_heads, heads // kv_heads, length, width)
        sinks = None if rules.sinks is None else rules.sinks.view(1, kv_heads, -1, 1, 1)
        out = explicit(grouped, key.unsqueeze(2), value.unsqueeze(2), rules, mask, sinks)
        return out.flatten(1, 2)
    # Off the CPU only the flash kernel shares key-value heads; the others would go the slow way.
    share = heads != kv_heads and query.device.type == "cpu"
    if heads != kv_heads and not share:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=rules.scaling,
        enable_gqa=share,
    )
