"""A Llama-like backbone for decoding on a CPU: one call of compiled code a step, or several.

A decode step has few rows, so its cost is the number of operations and how its products read their
weights. Here all layers are one call of `kernels/decode.c`, on a copy of the weights in panels
that are read sequentially; it exists during a call of `sample`, when there are no gradients or
activations. The result of a row does not depend on the other rows. Prompts attend to themselves as
in training. Other models, and all models without a compiler, go through their own modules.

While no row enters or ends, several whole steps are one call (`MultiStep`): the Python code between
two calls costs as much as a step of a small model. The result of a row does not depend on how its
steps are divided into calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from keel.engines.model_runner import DecodeRows, ModelRunner, Prefill
from keel.engines.sampler import AHEAD, Stops, Uniforms
from keel.engines.scheduler import (
    DecodeBatch,
    Moves,
    PagePool,
    PageTable,
    PrefixCache,
    SlotMapping,
    joined,
    page_numbers,
)
from keel.models.attention import PackedLayout, Rules
from keel.models.head import Head, compiled_weight
from keel.models.kernels.decode import (
    PAGE,
    DecodeArguments,
    Layer,
    Panels,
    StepsArguments,
    address,
    filled,
    library,
    pointer,
    run_steps,
    steps_library,
)
from keel.models.kernels.sampling import HeadWeight, draw_of, sample_library
from keel.models.lora import affine, is_affine
from keel.types import Sampling

Ints = npt.NDArray[np.int64]
NO_PREFILL = Prefill(np.zeros(0, dtype=np.int64), 0)

LLAMA_LIKE = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""Backbones of one build: norm, attention with rotary embeddings, norm, gated SiLU, both added."""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies are fixed."""
SLICE = 0.05
"""Seconds after which a call starts no further step, so that its caller can check for signals."""


def is_llama_like(backbone: Any) -> bool:
    """Whether a backbone is of this build, with its usual activation, rotations that do not depend
    on the rest of the batch, and float32 weights on a CPU."""
    return (
        type(backbone) in LLAMA_LIKE
        and getattr(backbone.rotary_emb, "rope_type", "") in FIXED_ROPE
        and backbone.config.hidden_act == "silu"
        and 2 * backbone.rotary_emb.inv_freq.numel() == backbone.layers[0].self_attn.head_dim
        and all(p.device.type == "cpu" for p in backbone.parameters())
        # Weights in 4 bits are bytes.
        and {p.dtype for p in backbone.parameters() if p.is_floating_point()} == {torch.float32}
    )


def rules_of(layer: Any) -> Rules:
    """How a layer attends."""
    attention = layer.self_attn
    # Mistral's layers read it from the config.
    default = attention.config.sliding_window if type(attention) is MistralAttention else None
    return Rules(attention.scaling, getattr(attention, "sliding_window", default))


def angles(
    backbone: Any, positions: Int[Tensor, "T"]
) -> tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]:
    """Cosines and sines of each position, as the rotary module computes them."""
    cos, sin = (table[0] for table in backbone.rotary_emb(backbone.norm.weight, positions[None]))
    half = cos.shape[-1] // 2
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()


def _is_modified(module: nn.Module) -> bool:
    """Whether a module has hooks, or a `forward` of its own that replaces its class's."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks) or "forward" in vars(module)


def compiled(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype = torch.float32,
    prefix_cache: PrefixCache | None = None,
) -> CompiledRunner | None:
    """A runner with the model's current weights, for positions below `longest`; weights, keys and
    values are stored as `dtype`.

    None if the model is not like Llama, not float32 on a CPU, one of its modules has hooks, or
    there is no compiler.
    """
    backbone = model.base_model
    if not is_llama_like(backbone) or not _plain(backbone):
        return None
    if any(map(_is_modified, backbone.modules())):
        return None
    functions = library(dtype)
    if functions is None:
        return None
    return CompiledRunner(backbone, longest, functions, dtype, prefix_cache or PrefixCache())


def _plain(backbone: Any) -> bool:
    """Whether projections are linear layers, with or without adapters, and heads are alike."""
    same = len({heads_of(layer) for layer in backbone.layers}) == 1
    return same and all(
        is_affine(linear) for layer in backbone.layers for linear in _linears(layer)
    )


def _linears(layer: Any) -> Iterator[nn.Module]:
    a, m = layer.self_attn, layer.mlp
    yield from (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)


def heads_of(layer: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the width of one."""
    attention = layer.self_attn
    width = attention.head_dim
    return (
        attention.q_proj.out_features // width,
        attention.k_proj.out_features // width,
        width,
    )


@dataclass(frozen=True, eq=False)
class Block:
    """The weights of a layer."""

    number: int
    epsilon: float
    qkv: Panels
    norms: tuple[Tensor | None, Tensor | None]
    """Weights of the norms of each query head and each key head."""
    out: Panels
    gate_up: Panels
    down: Panels
    rules: Rules

    def pointers(self) -> Layer:
        """Valid as long as this object."""
        return Layer(
            qkv=self.qkv.pointers,
            out=self.out.pointers,
            gate_up=self.gate_up.pointers,
            down=self.down.pointers,
            query_norm=pointer(self.norms[0]),
            key_norm=pointer(self.norms[1]),
            number=self.number,
            window=self.rules.window or 0,
            epsilon=self.epsilon,
            scaling=self.rules.scaling,
        )


def block_of(number: int, layer: Any, dtype: torch.dtype) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Block(
        number=number,
        epsilon=first.variance_epsilon,
        qkv=Panels(dtype, *map(affine, qkv), scale=first.weight),
        norms=(_weight(norms[0]), _weight(norms[1])),
        out=Panels(dtype, affine(attention.o_proj)),
        gate_up=Panels(
            dtype,
            affine(mlp.gate_proj),
            affine(mlp.up_proj),
            scale=second.weight,
            gated=True,
        ),
        down=Panels(dtype, affine(mlp.down_proj)),
        rules=rules_of(layer),
    )


def _weight(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.contiguous()


class CompiledRunner:
    """`ModelRunner` of a Llama-like backbone.

    `functions` are compiled code, `layers` its pointers to the weights, and `step` its other
    arguments; `embed` and `norm` are the model's own. `MultiStep` runs with them too. Positions are
    below `longest`.
    """

    def __init__(
        self,
        backbone: Any,
        longest: int,
        functions: Any,
        dtype: torch.dtype,
        prefix_cache: PrefixCache,
    ) -> None:
        self.functions = functions
        self.longest = longest
        self.embed: Tensor = backbone.embed_tokens.weight.detach()
        self.norm = backbone.norm.weight.contiguous(), backbone.norm.variance_epsilon
        self._cos, self._sin = angles(backbone, torch.arange(longest))
        self._like: Tensor = self.embed.new_empty(0, dtype=dtype)
        self._blocks = [block_of(n, layer, dtype) for n, layer in enumerate(backbone.layers)]
        self._heads = heads_of(backbone.layers[0])
        self.layers = (Layer * len(self._blocks))(*(b.pointers() for b in self._blocks))
        self._prefix_cache = prefix_cache
        self._recalled: deque[list[int]] = deque()
        numbers = page_numbers(len(self._blocks), *self._heads[1:])
        self._pool = prefix_cache.pool(lambda: PagePool(numbers, self._like))
        self._prompts, self._answers = PageTable(self._pool), PageTable(self._pool)
        self._work: _Scratch | None = None
        self.step = self._fixed()
        self._arrays: dict[str, Ints] = {}
        """The arrays that the step points into."""

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        for unused in self._recalled:  # of a call that was suspended before they entered
            self._pool.give(unused)
        known, pages = self._prefix_cache.take(prompts)
        self._recalled = deque(pages)
        return known

    def admit(self, entering: Prefill, ahead: int) -> None:
        for number in np.flatnonzero(entering.before).tolist():
            self._prompts.adopt(entering.first + number, self._recalled.popleft())
        self._prompts.reserve(entering.lengths, entering.first)

    def reserve(self, places_R: Ints, ahead: int) -> None:
        self._answers.reserve(places_R)

    def keep(self, batch: DecodeBatch, row: int) -> None:
        """Copy the places of the prompt and of the row, without its last token, to new pages."""
        if self._prefix_cache.full:
            return
        sequence, slot = int(batch.sequence[row]), int(batch.slot[row])
        prompt, own = int(batch.length[slot]), int(batch.made[row]) - 1
        kept, places = PageTable(self._pool), np.arange(prompt + own)
        source = self._answers.locate(np.full(own, row), np.arange(own))
        if batch.left(batch.prompt[slot]) == 1:
            # No other row reads the prompt's pages: take them over.
            kept.adopt(0, self._prompts.release(slot))
            places = places[prompt:]
        else:
            before = self._prompts.locate(np.full(prompt, slot), places[:prompt])
            source = joined(before, source)
        kept.reserve(np.array([prompt + own]))
        self._copy(source, kept.locate(np.zeros_like(places), places))
        self._prefix_cache.hold(sequence, kept.release(0))

    def _copy(self, source: SlotMapping, target: SlotMapping) -> None:
        shape = (len(self._blocks), *self._heads[1:], len(source.page))
        self.functions.keel_copy(*shape, *(values.ctypes.data for values in (*source, *target)))

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        self._answers.close(rows, rows_left)
        self._prompts.close(slots, slots_left)

    def __call__(
        self, tokens: Tensor, positions: Tensor, entering: Prefill, live: DecodeRows | None
    ) -> Tensor:
        x = self.embed.index_select(0, tokens)
        rows = _Rows(entering, live)
        work = self._scratch(len(tokens), rows)
        self._set(x, positions, self._mapping(entering, rows), self._own_pages(rows), rows)
        step = addressof(self.step)
        if len(entering.lengths) and len(entering.whole):
            self._layer_by_layer(work, entering)
        else:
            self.functions.keel_decode(addressof(self.layers), len(self.layers), step)
        weight, epsilon = self.norm
        self.functions.keel_norm(pointer(weight), epsilon, step)
        return x

    def prepare(self, positions: Tensor, live: DecodeRows, steps: int) -> PreparedStep:
        """Set the step to one token of each live row, to be repeated `steps` times."""
        rows = _Rows(NO_PREFILL, live)
        rows.places += steps - 1
        self._scratch(len(positions), rows)
        x = self.embed.new_empty(len(positions), self.embed.shape[1])
        mapping = SlotMapping(np.empty_like(rows.end), np.empty_like(rows.end))
        self._set(x, positions, mapping, self._answers.pages, rows)
        return PreparedStep(x, positions, rows.end, mapping, self._answers.pages)

    def _layer_by_layer(self, work: _Scratch, entering: Prefill) -> None:
        """Layers of a step in which whole prompts enter, which attend as in training."""
        layout = PackedLayout(entering.whole.tolist())
        split = layout.tokens
        queries, keys, _ = self._heads
        for block in self._blocks:
            layer, step = addressof(self.layers[block.number]), addressof(self.step)
            self.functions.keel_enter(layer, step)
            if split:
                query, key, value = work.qkv[:split].split_with_sizes((queries, keys, keys), dim=1)
                work.seen[:split] = layout.attend_tokens(query, key, value, block.rules)
            self.functions.keel_leave(layer, step)

    def _scratch(self, tokens: int, rows: _Rows) -> _Scratch:
        """New memory for a step, which the step then points to."""
        self._work = None  # free the last step's first
        queries, keys, width = self._heads
        places = PAGE * (-(-rows.width // PAGE) + -(-rows.places // PAGE))
        new = self.embed.new_empty
        self._work = work = _Scratch(
            qkv=new(tokens, queries + 2 * keys, width),
            seen=new(tokens, queries, width),
            mid=new(tokens, self._blocks[0].down.shape[1]),
            scores=new(torch.get_num_threads(), places),
            taken=self._taken(tokens),
        )
        for name, tensor in vars(work).items():
            setattr(self.step, name, pointer(tensor))
        self.step.threads, self.step.score_room = work.scores.shape
        return work

    def _taken(self, tokens: int) -> Tensor:
        """Memory for the rounded inputs of any product."""
        if self._like.dtype == self.embed.dtype:
            return self._like
        block = self._blocks[0]
        most = max(part.shape[1] for part in (block.qkv, block.out, block.down))
        return self._like.new_empty(tokens, filled(most, self._like.dtype))

    def _mapping(self, entering: Prefill, rows: _Rows) -> SlotMapping:
        """Where each token's keys and values go."""
        end = rows.end[len(rows.continued) :]
        own = self._answers.locate(np.arange(len(end)), end)
        if not len(entering.lengths):
            return own
        return joined(self._prompts.locate(*entering.places()), own)

    def _own_pages(self, rows: _Rows) -> Ints:
        """The pages of each row's own tokens; for a token after a known beginning, its prompt's."""
        answers = self._answers.pages
        if not len(rows.continued):
            return answers
        first = self._prompts.pages[rows.continued]
        rest = answers[: len(rows.end) - len(rows.continued)]
        pages = np.zeros((len(rows.end), max(first.shape[1], rest.shape[1])), dtype=np.int64)
        pages[: len(first), : first.shape[1]] = first
        pages[len(first) :, : rest.shape[1]] = rest
        return pages

    def _fixed(self) -> DecodeArguments:
        """A step with the arguments that all steps share."""
        queries, keys, width = self._heads
        sizes = {"heads": queries, "shared_heads": keys, "width": width}
        tables = {"cos": pointer(self._cos), "sin": pointer(self._sin)}
        return DecodeArguments(hidden=self.embed.shape[1], **sizes, **tables)

    def _set(
        self, x: Tensor, positions: Tensor, mapping: SlotMapping, own: Ints, rows: _Rows
    ) -> None:
        """Point the step to these arrays."""
        step, prompts = self.step, self._prompts.pages
        step.tokens = len(positions)
        step.prompt_tokens = len(positions) - len(rows.end)
        step.prompt_most, step.answer_most = prompts.shape[1], own.shape[1]
        step.x, step.position = pointer(x), pointer(positions)
        self._arrays = {
            "page": mapping.page,
            "place": mapping.place,
            "prompt_pages": prompts,
            "answer_pages": own,
            **{name: getattr(rows, name) for name in ("slot", "end", "length", "order")},
        }
        for name, array in self._arrays.items():
            setattr(step, name, array.ctypes.data)


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """The arrays that a step points to, which advance from step to step."""

    x: Float[Tensor, "R H"]
    positions: Int[Tensor, "R"]
    end: Ints
    mapping: SlotMapping
    pages: Ints


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Memory that a step works on."""

    qkv: Float[Tensor, "T A D"]
    """Query heads, key heads, value heads."""
    seen: Float[Tensor, "T Hq D"]
    mid: Float[Tensor, "T I"]
    scores: Float[Tensor, "threads S"]
    taken: Float[Tensor, "..."]
    """The rounded inputs of a product."""


class _Rows:
    """Prompt tokens after a known beginning, and then `DecodeRows`, as compiled code reads them.

    Such a token is a row whose own places are its prompt's, after an empty prompt.
    """

    def __init__(self, entering: Prefill, live: DecodeRows | None) -> None:
        none = np.zeros(0, dtype=np.int64)
        self.slot, self.end, self.length = (
            (none, none, none) if live is None else (live.slot_R, live.end_R, live.length_G)
        )
        self.width, self.places = (0, 0) if live is None else (live.width, live.places)
        self.continued: Ints = none
        """The slot of each prompt token after a known beginning."""
        if len(entering.lengths) and entering.before.any():
            slots, places = (x[entering.whole.sum() :] for x in entering.places())
            self.continued = slots
            self.slot = np.concatenate([np.full_like(slots, len(self.length)), self.slot])
            self.end = np.concatenate([places, self.end])
            self.length = np.append(self.length, 0)
            self.places = max(self.places, int(places.max()) + 1)
        # Rows of one prompt in succession, so that its keys stay in the processor's cache.
        self.order: Ints = np.argsort(self.slot, kind="stable")


# ---------------------------------------------------------------- several steps


def make_multi_step(
    forward: ModelRunner, head: Head, sampling: Sampling, stops: Stops
) -> MultiStep | None:
    """None if compiled code cannot do a whole step: with another runner, a head with a scale or a
    soft cap, stop strings, or a token to sample that might lack an embedding."""
    plain = head.scale == 1.0 and head.softcap is None
    weight = compiled_weight(head) if plain else None
    ends_V = stops.by_token
    if not isinstance(forward, CompiledRunner) or weight is None or ends_V is None:
        return None
    embed, outputs = forward.embed, weight.shape[0]
    known = embed.is_contiguous() and outputs <= min(len(embed), len(ends_V))
    if not (known and sample_library() and steps_library()):
        return None
    return MultiStep(forward, weight, sampling, ends_V)


class MultiStep:
    """Feeds the last token of each row and samples its next one, some steps at a time."""

    def __init__(
        self,
        runner: CompiledRunner,
        weight: HeadWeight,
        sampling: Sampling,
        ends_V: npt.NDArray[np.int8],
    ) -> None:
        self._runner, self._weight = runner, weight
        self._sampling, self._ends = sampling, ends_V
        functions = runner.functions
        self._calls = {
            "decode": address(functions.keel_decode),
            "norm": address(functions.keel_norm),
            "logits": address(weight.function),
            "draw": address(sample_library().keel_draw),
            "layers": addressof(runner.layers),
            "step": addressof(runner.step),
            "count": len(runner.layers),
            "weight": pointer(runner.norm[0]),
            "epsilon": runner.norm[1],
            "hidden": runner.embed.shape[1],
            "embed": pointer(runner.embed),
            "room": PAGE,
            "ends": ends_V.ctypes.data,
        }

    def __call__(self, batch: DecodeBatch, uniforms: Uniforms) -> tuple[Ints, Tensor]:
        """Tokens and log-probabilities (steps, R) of the live rows: at least one step, and no step
        after one in which a row ends."""
        most, rows = _most(batch), len(batch.sequence)
        runner = self._runner
        runner.reserve(batch.made + most - 1, batch.ahead)
        live = DecodeRows(batch.slot, batch.made - 1, batch.length, torch.device("cpu"))
        step = runner.prepare(torch.from_numpy(batch.place), live, most)
        numbers = torch.from_numpy(uniforms.take(batch.sequence, batch.made, most))
        product = self._weight.of(step.x)
        draw = draw_of(product.out, numbers.new_empty(rows), self._sampling)
        draw.tokens.copy_(torch.from_numpy(batch.token))
        tokens = draw.tokens.new_empty(most, rows)
        log_probs = numbers.new_empty(most, rows)
        # These structures must live as long as the call.
        head, chance = product.pointers(), draw.pointers()
        done = run_steps(
            StepsArguments(
                **self._calls,
                head=addressof(head),
                chance=addressof(chance),
                rows=rows,
                most=step.pages.shape[1],
                pages=step.pages.ctypes.data,
                x=pointer(step.x),
                position=pointer(step.positions),
                end=step.end.ctypes.data,
                page=step.mapping.page.ctypes.data,
                place=step.mapping.place.ctypes.data,
                token=pointer(draw.tokens),
                number=pointer(draw.uniform),
                log_prob=pointer(draw.log_probs),
                numbers=pointer(numbers),
                tokens=pointer(tokens),
                log_probs=pointer(log_probs),
                steps=most,
                seconds=SLICE,
            )
        )
        return tokens[:done].numpy(), log_probs[:done]


def _most(batch: DecodeBatch) -> int:
    """Steps until a row's budget is used up, or the longest row has filled its page: so no row
    takes a page more than PAGE steps before it needs it."""
    left = int((batch.limit - batch.made).min())
    page = PAGE - (int(batch.made.max()) - 1) % PAGE
    assert page <= AHEAD
    return min(left, page)
