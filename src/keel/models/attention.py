"""Attention over sequences packed end to end, without padding and without rewriting a model.

One attention function is registered with transformers under the name "keel". It passes each layer's
query, key and value to the `Layout` given to the model as `layout=`, which decides which tokens see
which. `PackedLayout` is the layout of training and scoring; the native engine has its own, which
reads a key-value cache.

There is one path for each kind of device: on a CPU compiled code for float32
(`kernels.causal`), on CUDA one variable-length flash-attention call for half precision. All else
(float64, soft caps, attention sinks, no compiler) goes through `scaled_dot_product_attention`,
segments of equal lengths together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from keel.models.kernels import causal
from keel.models.packed import Segments, upload
from keel.types import KeelError

_FLASH = torch.ops.aten._flash_attention_forward
"""torch's operator below `varlen_attn`; it is given only what torch 2.11 and 2.13 both take."""

ATTENTION = "keel"
"""The name of the attention function within transformers."""
RECOMPILE_LIMIT = 16
"""Versions of a compiled layer."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Attending:
    """A layout as a model is given it: one type, so that torch compiles a layer once for all."""

    layout: Layout


def install(model: PreTrainedModel) -> None:
    """Make `model` attend through the `layout=` that it is called with.

    From then on the model is called as `model(input_ids=(1, T), position_ids=(1, T),
    use_cache=False, layout=Attending(layout))`, with position ids that restart at each sequence. No
    mask function is registered under the name, so transformers builds no mask.

    Raises KeelError where the architecture does not go through transformers' attention interface.
    """
    name = type(model).__name__
    # transformers' own check reads the source for this call and only warns where it is missing.
    if not model._can_set_attn_implementation():
        raise KeelError(
            f"{name} does not use transformers' attention interface, so sequences cannot be "
            "packed; choose a model of a supported family (Llama, Qwen, Mistral, Gemma, ...)"
        )
    if ATTENTION not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        # A look for padding among the tokens, which would wait for the device at each pass.
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _no_warning
    if model.config._attn_implementation != ATTENTION:
        raise KeelError(
            f"{name} kept the attention '{model.config._attn_implementation}' instead of "
            f"'{ATTENTION}', so sequences cannot be packed; choose a model of a supported family"
        )


def compile_layers(backbone: torch.nn.Module) -> None:
    """Let torch compile each layer of a backbone that attends through layouts; attention itself,
    which depends on the layout, stays as it is.

    The layers share compiled code. It is made at their first call, for any number of tokens but
    one, which has code of its own.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]
    # It advises against float32, which a recipe chose.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # Kinds of layers × with or without gradients × training or evaluation; beyond torch's 8 the
    # rest would run uncompiled. From torch 2.13 on the setting is a thread's own.
    options: dict[str, Any] = {"dynamic": True}
    if "recompile_limit" in signature(torch.compile).parameters:
        options["recompile_limit"] = RECOMPILE_LIMIT
    config = torch._dynamo.config
    config.recompile_limit = max(RECOMPILE_LIMIT, config.recompile_limit)
    whole = (torch.nn.ModuleList, torch.nn.Embedding)
    parts = [m for m in backbone.children() if not isinstance(m, whole)]  # rotary tables, last norm
    inside = GradientCheckpointingLayer.__call__ is torch.nn.Module.__call__
    for module in backbone.modules():
        if not isinstance(module, GradientCheckpointingLayer):
            continue
        if inside and module.gradient_checkpointing:
            # From transformers 5.18 on a layer's own code checkpoints, which torch cannot compile.
            module._compiled_call_impl = None
            parts += module.children()
        else:
            parts.append(module)
    for module in parts:
        module.compile(**options)


@contextmanager
def uncompiled(backbone: torch.nn.Module) -> Iterator[None]:
    """Within the block nothing of a backbone is compiled code."""
    compiled = {m: m._compiled_call_impl for m in backbone.modules() if m._compiled_call_impl}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def _no_warning(*_: object) -> None:
    pass


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
    layout: Attending | None = None,
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
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return layout.layout.attend(layer, query, key, value, rules), None


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embeddings and norms leave query and key in float32 under autocast: undo that."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def attention_weights(
    scores: Float[Tensor, "... Q K"], rules: Rules, visible: Tensor | None, sinks: Tensor | None
) -> Float[Tensor, "... Q K"]:
    """The attention weights of each query, from q·k; all keys are visible where `visible` is None.

    The softmax is taken in float32 at least. Sources: Gemma 2 (arXiv:2408.00118, section 2) for the
    soft cap; gpt-oss (arXiv:2508.10925, section 2.3) for the sink.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * rules.scaling
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


class PackedLayout:
    """Segments end to end: each token sees its prefix and the earlier tokens of its segment.

    `lengths` and `follows` as in `Segments`. One layout serves all layers, forward and backward.
    """

    def __init__(self, lengths: Sequence[int], follows: Sequence[int] = ()) -> None:
        self.segments = Segments(tuple(int(length) for length in lengths), tuple(follows))
        # Plans, indices and masks, made at the first layer and shared by the others.
        self._cache: dict[Any, Any] = {}

    @property
    def tokens(self) -> int:
        """T."""
        return self.segments.tokens

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 Hkv T D"],
        value: Float[Tensor, "1 Hkv T D"],
        rules: Rules,
    ) -> Float[Tensor, "1 T H D"]:
        """Causal attention within each sequence; see `Layout.attend`."""
        if torch.is_autocast_enabled("cpu") and query.device.type == "cpu":
            # The compiled code is float32; where it does not apply, autocast rounds later.
            query, key, value = query.float(), key.float(), value.float()
        else:
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
        """`attend` with tokens first. Raises ValueError for another number of tokens than T."""
        if len(query) != self.tokens:
            raise ValueError(f"the layout has {self.tokens} tokens, but got {len(query)}")
        plain = rules.softcap is None and rules.sinks is None
        # Of queries of one token each the op swaps heads and tokens, and has no backward of that.
        if max(self.segments.lengths) > 1 and flash_applies(query, value, rules):
            return self._flash(query, key, value, rules)
        if plain and causal.applies(query, key, value):
            plan = self._once("causal", self._causal_plan)
            return causal.attend(query, key, value, plan, rules.scaling, rules.window)
        return self._by_length(query, key, value, rules)

    def _causal_plan(self) -> causal.CausalPlan:
        return causal.CausalPlan(self.segments.lengths, self.segments.follows)

    def _by_length(
        self, query: Tensor, key: Tensor, value: Tensor, rules: Rules
    ) -> Float[Tensor, "T H D"]:
        """Segments of equal length and prefix in one call; prefixes are repeated for each."""
        device = query.device
        groups, restore = self._once(("groups", device), lambda: self._equal_segments(device))
        parts = []
        for (length, prefix), own, visible in groups:
            count = len(own) // length
            q, k, v = (
                x.index_select(0, index).view(count, -1, *x.shape[1:]).transpose(1, 2)
                for x, index in ((query, own), (key, visible), (value, visible))
            )
            part = _attend(q, k, v, rules, self._mask(length, prefix, rules, device))
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, restore)

    def _equal_segments(
        self, device: torch.device
    ) -> tuple[list[tuple[tuple[int, int], Tensor, Tensor]], Tensor]:
        """For each length of segments and prefixes, indices of their own and visible tokens; and
        the index that restores the order of the tokens."""
        segments = self.segments
        kinds: dict[tuple[int, int], list[int]] = {}
        for number, kind in enumerate(zip(segments.lengths, segments.before, strict=True)):
            kinds.setdefault(kind, []).append(number)
        groups = [
            (kind, upload(segments.own(numbers), device), upload(segments.visible(numbers), device))
            for kind, numbers in kinds.items()
        ]
        return groups, torch.cat([own for _, own, _ in groups]).argsort()

    def _mask(
        self, length: int, prefix: int, rules: Rules, device: torch.device
    ) -> Bool[Tensor, "L K"] | None:
        """The keys that each token of a segment sees; None where `is_causal` says the same."""
        total = prefix + length
        window = rules.window if rules.window is not None and rules.window < total else None
        plain = rules.softcap is None and rules.sinks is None
        if plain and prefix == 0 and window is None:
            return None

        def make() -> Tensor:
            mask = torch.ones(length, total, dtype=torch.bool, device=device).tril(prefix)
            return mask if window is None else mask.triu(prefix + 1 - window)

        mask: Tensor = self._once(("mask", length, prefix, window, device), make)
        return mask

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """All segments in one variable-length flash-attention call. (T, heads, D) → (T, H, D).
        Causality is aligned to the last key, so the queries of a segment see all of its prefix.
        """
        device, segments = query.device, self.segments
        query_ends, key_ends = self._once(("bounds", device), lambda: self._bounds(device))
        if segments.follows:
            every = range(len(segments.lengths))
            index = self._once(("visible", device), lambda: upload(segments.visible(every), device))
            key, value = key.index_select(0, index), value.index_select(0, index)
        most = max(segments.lengths), segments.longest
        return flash(query, key, value, (query_ends, key_ends), most, rules)

    def _bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The cumulative numbers of queries and of visible keys of the segments."""
        lengths = torch.tensor((0, *self.segments.lengths), dtype=torch.int32)
        before = torch.tensor((0, *self.segments.before), dtype=torch.int32)
        queries, keys = lengths.cumsum(0), (lengths + before).cumsum(0)
        return upload(queries.int(), device), upload(keys.int(), device)

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]


def flash(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "K Hkv D"],
    value: Float[Tensor, "K Hkv D"],
    ends: tuple[Int[Tensor, " ends"], Int[Tensor, " ends"]],
    most: tuple[int, int],
    rules: Rules,
) -> Float[Tensor, "T H D"]:
    """Causal attention of S segments by torch's variable-length kernel.

    `ends` are the cumulative numbers of queries and of keys of the segments (int32), `most` those
    of the longest. Causality is aligned to the last key, so a segment may have more keys than
    queries.
    """
    width = query.shape[-1]
    # The kernel takes multiples of 8; features of zeros change no score and no other feature.
    query, key, value = (F.pad(x, (0, -width % 8)).contiguous() for x in (query, key, value))
    # Flash attention counts the keys to the left of a query, a window counts the query too.
    left = -1 if rules.window is None else rules.window - 1
    out: Tensor = _FLASH(
        query,
        key,
        value,
        *ends,
        *most,
        0.0,  # dropout
        rules.window is None,  # a window to the left with nothing to the right is causal too
        return_debug_mask=False,
        scale=rules.scaling,
        window_size_left=left,
        window_size_right=0,
    )[0]
    return out[..., :width]


def flash_applies(query: Tensor, value: Tensor, rules: Rules) -> bool:
    """Whether variable-length flash attention takes these tensors on this GPU."""
    width = query.shape[-1]
    return (
        rules.softcap is None
        and rules.sinks is None
        and query.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and width == value.shape[-1]
        and width <= 256
    )


def _attend(
    query: Float[Tensor, "S H L D"],
    key: Float[Tensor, "S Hkv K D"],
    value: Float[Tensor, "S Hkv K D"],
    rules: Rules,
    mask: Bool[Tensor, "L K"] | None,
) -> Float[Tensor, "S H L D"]:
    """Causal attention of S equal segments; `mask` None means plain causality, with K = L."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if rules.softcap is not None or rules.sinks is not None:
        grouped = query.reshape(len(query), kv_heads, -1, *query.shape[2:])
        scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2))
        sinks = None if rules.sinks is None else rules.sinks.view(1, kv_heads, -1, 1, 1)
        weights = attention_weights(scores, rules, mask, sinks)
        return torch.matmul(weights.to(value.dtype), value.unsqueeze(2)).flatten(1, 2)
    # Off the CPU only the flash kernel shares key-value heads; the others would be slow.
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
