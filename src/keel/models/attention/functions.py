"""Attention over sequences that lie end to end, without padding and without rewriting a model.

One attention function is registered with transformers under the name "keel". It knows nothing of
sequences: it hands each layer's query, key and value to the `Layout` that the caller passed to the
model as `layout=`, and the layout decides which tokens see which. `layout.PackedLayout` is that of
training and scoring; the native engine brings its own, which reads a key-value store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from keel.types import KeelError

ATTENTION = "keel"
"""The name of the attention function within transformers."""


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


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embeddings and norms leave query and key in float32 under autocast: undo that."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Rules,
    visible: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(softcap(scaling · q·k) over visible keys and the sink) · v, written out.

    (…, Q, D), (…, K, D) and a mask that broadcasts to (…, Q, K); `sinks` broadcasts to (…, Q, 1).
    """
    scores = torch.matmul(query, key.transpose(-1, -2)) * rules.scaling
    weights = attention_weights(scores, rules, visible, sinks)
    return torch.matmul(weights.to(value.dtype), value)


def attention_weights(
    scores: Float[Tensor, "... Q K"], rules: Rules, visible: Tensor | None, sinks: Tensor | None
) -> Float[Tensor, "... Q K"]:
    """What each query gives to each key, from scaling · q·k; `visible` None lets all be seen.

    The softmax is taken in float32 at least. Sources: Gemma 2 (arXiv:2408.00118, section 2) for the
    soft cap; gpt-oss (arXiv:2508.10925, section 2.3) for the sink.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
