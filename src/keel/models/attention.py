"""Attention over sequences that lie end to end, without padding and without rewriting a model.

One attention function is registered with transformers under the name "keel". It knows nothing of
sequences: it hands each layer's query, key and value to the `Layout` that the caller passed to the
model as `layout=`, and the layout decides which tokens see which. `PackedLayout` is the layout of
training and scoring; the native engine brings its own, which reads a key-value store.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from keel.types import KeelError

try:
    from torch.nn.attention import varlen
except ImportError:  # a build of torch without it: packed attention falls back to SDPA
    _VARLEN: Callable[..., Any] | None = None
else:
    _VARLEN = varlen.varlen_attn

ATTENTION = "keel"
"""The name of the attention function within transformers."""

_VARLEN_ARGUMENTS = {"scale", "window_size", "enable_gqa"}
_VARLEN_READY = _VARLEN is not None and set(inspect.signature(_VARLEN).parameters).issuperset(
    _VARLEN_ARGUMENTS
)


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """How one layer attends: softmax(cap(scaling · q·k)) over the visible keys.

    `window`: a token sees itself and the `window − 1` tokens before it. `softcap` c squashes scores
    to c·tanh(score / c) (Gemma 2). `sinks (H,)` adds to each head's softmax one score that has no
    value (gpt-oss). Attention is always causal; dropout is always off.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@runtime_checkable
class Layout(Protocol):
    """Which token sees which."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """The attention output of one layer for the tokens of this call."""
        ...


def install(model: PreTrainedModel) -> None:
    """Make `model` attend through the `layout=` that it is called with.

    From then on the model is called as `model(input_ids=(1, T), position_ids=(1, T),
    use_cache=False, layout=layout)`, with position ids that restart at each sequence. No mask
    function is registered under the name, so transformers builds no mask.

    Raises KeelError where the architecture does not go through transformers' attention interface.
    """
    name = type(model).__name__
    # transformers' own check reads the source for this call and only warns where it is missing.
    if not model._can_set_attn_implementation():
        raise KeelError(
            f"{name} does not use transformers' attention interface, so sequences cannot be "
            "packed; choose a model of a supported family (Llama, Qwen, Mistral, Gemma, ...)"
        )
    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    if model.config._attn_implementation != ATTENTION:
        raise KeelError(
            f"{name} kept the attention '{model.config._attn_implementation}' instead of "
            f"'{ATTENTION}', so sequences cannot be packed; choose a model of a supported family"
        )


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: translate the arguments and ask the layout."""
    name = type(module).__name__
    if layout is None:
        raise ValueError(f"{name} attends by '{ATTENTION}' and needs layout=, got none")
    if attention_mask is not None or position_bias is not None:
        raise ValueError(f"{name} passed a mask or a position bias, which a layout cannot honour")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"{name} asks for bidirectional attention, which is not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules = Rules(scaling, sliding_window, softcap, s_aux)
    return layout.attend(int(module.layer_idx), query, key, value, rules), None  # type: ignore[arg-type]


class PackedLayout:
    """Sequences end to end: each token sees itself and its own sequence's earlier tokens.

    `lengths` are the sequences' lengths in model-input tokens; they add up to T. On a CPU,
    sequences of equal length share one SDPA call (exact and free of padding); on CUDA in half
    precision one variable-length flash-attention call does all, where its rules allow it.
    The same layout serves all layers and may be used for forward and backward.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if any(length < 1 for length in lengths):
            raise ValueError("every sequence needs at least one token")
        self.lengths = tuple(int(length) for length in lengths)
        self.tokens = sum(self.lengths)
        self._runs, self._order = _equal_length_runs(self.lengths)
        # Index tensors and masks by device, made at the first layer and shared by the others.
        self._made: dict[Any, Any] = {}

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
        flash = _flash_applies(query, value, rules)
        device = query.device
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
        if flash:
            return self._flash(query, key, value, rules).unsqueeze(0)
        order, inverse = self._reordering(device)
        if order is not None:
            query, key, value = (x.index_select(0, order) for x in (query, key, value))
        parts = []
        start = 0
        for count, length in self._runs:
            stop = start + count * length
            q, k, v = (
                x[start:stop].view(count, length, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            )
            part = _causal(q, k, v, rules, self._window_mask(length, rules, device))
            parts.append(part.transpose(1, 2).flatten(0, 1))
            start = stop
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = out if inverse is None else out.index_select(0, inverse)
        return out.unsqueeze(0)

    def _reordering(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The tokens' order by runs of equal length, and the way back; None where it is theirs."""
        if self._order is None:
            return None, None
        if ("order", device) not in self._made:
            starts = torch.tensor((0, *self.lengths)).cumsum(0)
            chunks = [torch.arange(int(starts[s]), int(starts[s + 1])) for s in self._order]
            order = torch.cat(chunks)
            self._made["order", device] = order.to(device), order.argsort().to(device)
        pair: tuple[Tensor, Tensor] = self._made["order", device]
        return pair

    def _window_mask(
        self, length: int, rules: Rules, device: torch.device
    ) -> Bool[Tensor, "L L"] | None:
        """The causal mask cut to the window; None where plain causality says the same."""
        needed = rules.softcap is not None or rules.sinks is not None
        windowed = rules.window is not None and rules.window < length
        if not needed and not windowed:
            return None
        name = ("mask", length, rules.window if windowed else None, device)
        if name not in self._made:
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            if windowed and rules.window is not None:
                mask = mask.triu(1 - rules.window)
            self._made[name] = mask
        made: Tensor = self._made[name]
        return made

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """All sequences in one variable-length flash-attention call. (T, heads, D) → (T, H, D)."""
        device = query.device
        if ("bounds", device) not in self._made:
            bounds = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0)
            self._made["bounds", device] = bounds.to(device, torch.int32)
        bounds, longest = self._made["bounds", device], max(self.lengths)
        # Flash attention counts the keys to the left of a query, a window counts the query too.
        left = -1 if rules.window is None else rules.window - 1
        assert _VARLEN is not None
        out: Tensor = _VARLEN(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            bounds,
            bounds,
            longest,
            longest,
            scale=rules.scaling,
            window_size=(left, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out


def attend_rows(
    query: Float[Tensor, "R H D"],
    key: Float[Tensor, "R Hkv C D"],
    value: Float[Tensor, "R Hkv C D"],
    bias: Float[Tensor, "R C"],
    rules: Rules,
) -> Float[Tensor, "R H D"]:
    """One query token a row against the row's own stored keys, for decoding.

    `bias` is 0 where a key is visible and -inf where not (beyond the row's end, or outside the
    window); at least one key must be visible to each row. There is no causality to add.
    """
    rows, heads, width = query.shape
    kv_heads = key.shape[1]
    # The query heads of one key-value head become its queries, so that no key is repeated.
    query = query.reshape(rows, kv_heads, heads // kv_heads, width)
    bias = bias[:, None, None]
    if rules.softcap is None and rules.sinks is None:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias.to(query.dtype), scale=rules.scaling
        )
    else:
        sinks = None if rules.sinks is None else rules.sinks.view(1, kv_heads, -1, 1)
        out = _explicit(query, key, value, rules, bias == 0, sinks)
    return out.reshape(rows, heads, value.shape[-1])


def _equal_length_runs(
    lengths: tuple[int, ...],
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...] | None]:
    """Runs (count, length) of sequences to attend together, and the sequences' order by run.

    The order is None where the sequences already lie so.
    """
    counts = Counter(lengths)
    order = tuple(sorted(range(len(lengths)), key=lambda s: lengths[s]))
    if len(counts) == len(lengths):  # nothing to share: no reason to move a token
        return tuple((1, length) for length in lengths), None
    runs = tuple((counts[length], length) for length in sorted(counts))
    return runs, None if order == tuple(range(len(lengths))) else order


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embeddings and norms leave query and key in float32 under autocast: undo that."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


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
    key: Float[Tensor, "S Hkv L D"],
    value: Float[Tensor, "S Hkv L D"],
    rules: Rules,
    mask: Bool[Tensor, "L L"] | None,
) -> Float[Tensor, "S H L D"]:
    """Causal attention of S sequences of one length; `mask` None means plainly causal."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if rules.softcap is not None or rules.sinks is not None:
        assert mask is not None
        count, _, length, width = query.shape
        grouped = query.reshape(count, kv_heads, heads // kv_heads, length, width)
        sinks = None if rules.sinks is None else rules.sinks.view(1, kv_heads, -1, 1, 1)
        out = _explicit(grouped, key.unsqueeze(2), value.unsqueeze(2), rules, mask, sinks)
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


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Rules,
    visible: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(softcap(scaling · q·k) over visible keys and the sink) · v, written out.

    (…, Q, D), (…, K, D) and a mask that broadcasts to (…, Q, K); `sinks` broadcasts to (…, Q, 1).
    The softmax is taken in float32 at least. Sources: Gemma 2 (arXiv:2408.00118, section 2) for the
    soft cap; gpt-oss (arXiv:2508.10925, section 2.3) for the sink.
    """
    scores = torch.matmul(query, key.transpose(-1, -2)) * rules.scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)
