"""The native engine: continuous batching over the trainer's own model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.config.model import Autocast
from keel.config.sources import Rollout
from keel.engines.compiled import compiled, make_multi_step
from keel.engines.model_runner import DecodeRows, ModelRunner, ModuleRunner, Prefill
from keel.engines.paged import PagedRun
from keel.engines.sampler import (
    GOING,
    LENGTH,
    Answers,
    Stops,
    Uniforms,
    budgets,
    check,
    eos_ids,
    sample_tokens,
)
from keel.engines.scheduler import DecodeBatch, DecodeEntry, PrefixCache, Request
from keel.engines.static import StaticDecoder
from keel.models.attention import ATTENTION, install
from keel.models.families import autocast_for, context_length, head_of
from keel.models.head import place_of_float64, steady_logits
from keel.models.loading import DTYPES
from keel.models.policy import token_count
from keel.platform.time_limit import heartbeat, raise_if_cancelled
from keel.types import (
    Capabilities,
    Engine,
    Group,
    KeelError,
    OnGroup,
    Prompt,
    Sampling,
)

Ints = npt.NDArray[np.int64]
CAPABILITIES = Capabilities(streams=True, in_process=True)
OnStep = Callable[[Answers], bool]
"""Sees what a call has sampled so far; whether the call shall end there."""


@dataclass(frozen=True, eq=False)
class Resumed:
    """What `decode` asks for beyond `sample`: see there."""

    budgets: Sequence[int]
    made: Sequence[int]
    on_step: OnStep


class NativeEngine(Engine):
    """Samples completions with the trainer's model (see `keel.types.Engine`).

    Each prompt goes through the model once for its whole group; then every step feeds one token of
    each live row, finished rows leave, and waiting sequences enter in the same forward pass. At
    most `max_num_seqs` sequences are decoded at once, and at most `prefill_tokens` prompt tokens
    enter in one step (but at least one prompt).

    Each sequence has its own random stream, so with exact arithmetic a completion does not depend
    on the rest of its batch. Compiled code (`engines.compiled`) sums each row in an order of its
    own; elsewhere the order of a float32 sum may still decide a near-tie.

    The end-of-sequence token is part of the completion, since the policy chose it. The text leaves
    out special tokens; a stop string stays in it, with the rest of its last token. A completion
    that reaches the end of the model's context stops with finish "length".
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_num_seqs: int = 256,
        prefill_tokens: int = 16_384,
        autocast: Autocast = True,
        dtype: torch.dtype | None = None,
        decoder: StaticDecoder | None = None,
    ) -> None:
        """Share `model`, with packed attention installed if it is not yet.

        `autocast` as in the policy: float32 weights on a GPU work in bfloat16; on a CPU compiled
        code samples in float32 all the same. With a `dtype` each
        call of `sample` works on a copy of the backbone's weights in it, with the model's own head:
        log-probabilities then differ from the trainer's. `decoder` samples over static buffers
        (None: made on CUDA, where it works on a copy of the weights in the type that autocast
        computes in; elsewhere a `ModelRunner` does). Raises KeelError for a model without an
        end-of-sequence token.
        """
        if max_num_seqs < 1 or prefill_tokens < 1:
            raise ValueError("max_num_seqs and prefill_tokens must be at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.tokens = token_count(tokenizer)
        self.max_num_seqs = max_num_seqs
        self.prefill_tokens = prefill_tokens
        self.autocast = autocast
        self.dtype = dtype
        self.capabilities = replace(CAPABILITIES, context=context_length(model))
        self.eos = eos_ids(model, tokenizer)
        self._prefix_cache: PrefixCache | None = None
        self._decoder = decoder
        if model.config._attn_implementation != ATTENTION:
            install(model)

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """`n` completions for each prompt; see `keel.types.Engine`.

        Raises KeelError for invalid settings, a prompt without tokens or too long for the context,
        and logits that are not finite.
        """
        return self._cached(prompts, n, sampling, seed, on_group=on_group)

    def decode(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        *,
        budgets: Sequence[int],
        made: Sequence[int],
        on_step: OnStep,
        waiting: Sequence[Prompt] = (),
    ) -> list[Group]:
        """One completion for each prompt, of at most `budgets` tokens, until `on_step` is true.

        The last `made` tokens of a prompt are what earlier calls sampled: a sequence that is
        decoded in several calls (with one id and seed) has the tokens of a single one. `on_step`
        is called after each step; what it sees has the code GOING until a sequence is done. A
        sequence that it cuts has finish "length"; in a `conversation` its keys and values are kept
        for the next call, and those of prompts that are `waiting` for a later one.
        Raises KeelError as `sample` does.
        """
        if self._prefix_cache is not None:
            self._prefix_cache.waiting = [np.array(p.tokens, dtype=np.int64) for p in waiting]
        whole = replace(sampling, max_tokens=max(budgets))
        return self._cached(prompts, 1, whole, seed, resumed=Resumed(budgets, made, on_step))

    def _cached(self, *call: Any, **options: Any) -> list[Group]:
        prefix_cache = self._prefix_cache or PrefixCache()
        try:
            return self._sample(prefix_cache, *call, **options)
        except BaseException:
            prefix_cache.clear()
            raise

    @contextmanager
    def conversation(self) -> Iterator[NativeEngine]:
        """The engine with a prefix cache, for calls of `sample` that continue earlier sequences.

        A prompt that begins with a sequence of the last call enters with its new tokens only. Do
        not change the weights before the block ends; the cache is freed then. The compiled runner
        (`engines.compiled`) and static buffers (`engines.static`) keep sequences, at most
        `max_num_seqs` of a call; elsewhere prompts enter whole. A call that raises clears the
        cache.
        """
        self._static()  # before the copy, which shares it
        engine = copy.copy(self)
        engine._prefix_cache = PrefixCache(self.max_num_seqs)
        try:
            yield engine
        finally:
            engine._prefix_cache.close()

    def _sample(
        self,
        prefix_cache: PrefixCache,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
        resumed: Resumed | None = None,
    ) -> list[Group]:
        """Start from the sequences in `prefix_cache`, and add those of this call."""
        check(sampling, n)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        eos = () if sampling.ignore_eos else self.eos
        stops = Stops(eos, sampling, self.tokenizer, vocabulary)
        limits = budgets(prompts, sampling, self.capabilities.context)
        if not prompts:
            return []
        made = None if resumed is None else resumed.made
        rows = min(self.max_num_seqs, n * len(prompts))
        if resumed is not None:
            limits = np.minimum(limits, resumed.budgets)
            rows = self.max_num_seqs  # of a server, whose calls share buffers for all rows
            for number, (prompt, own) in enumerate(zip(prompts, resumed.made, strict=True)):
                stops.resume(number, prompt.tokens[len(prompt.tokens) - own :])
        with torch.no_grad(), _evaluating(self.model), autocast_for(self.model, self.autocast):
            request = Request(
                prompts=[np.array(prompt.tokens, dtype=np.int64) for prompt in prompts],
                limits_P=limits,
                n=n,
                sampling=sampling,
                stops=stops,
                uniforms=Uniforms([prompt.id for prompt in prompts], n, seed, made),
                answers=Answers(n * len(prompts), n, self.tokenizer),
                rows=rows,
                prefill_tokens=self.prefill_tokens,
            )
            run = self._start(request, prefix_cache)
            groups: dict[int, Group | None] = {}
            try:
                while run.live:
                    over = run.step()
                    heartbeat()
                    raise_if_cancelled()
                    for number in over.tolist():
                        group = groups[number] = request.answers.group(prompts[number], number)
                        if on_group is not None and group is not None:
                            on_group(number, group)
                    if resumed is not None and resumed.on_step(request.answers) and run.live:
                        run.suspend()
                        for number, prompt in enumerate(prompts):
                            groups[number] = request.answers.group(prompt, number)
                        break
            except BaseException:
                if self._decoder is not None:
                    self._decoder.clear()
                raise
        done = []
        for number, prompt in enumerate(prompts):
            group = groups[number]
            if group is None:
                raise KeelError(
                    f"the model's logits for prompt '{prompt.id}' are not finite: its weights are "
                    "broken or have diverged; use an earlier checkpoint or a lower learning rate"
                )
            done.append(group)
        prefix_cache.name(done)
        return done

    def _start(self, request: Request, prefix_cache: PrefixCache) -> PagedRun | _Run:
        """A run over static buffers on CUDA, or if a decoder was given; else through a runner."""
        decoder = self._static()
        if decoder is None:
            return _Run(self, request, prefix_cache)
        decoder.begin(request)
        return PagedRun(decoder, request, prefix_cache)

    def _static(self) -> StaticDecoder | None:
        """The decoder over static buffers, made at the first call on CUDA."""
        if self._decoder is None and decodes_statically(self.model):
            self._decoder = StaticDecoder(
                self.model, tokens=self.tokens, autocast=self.autocast, dtype=self.dtype
            )
        return self._decoder

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Take over weights by the model's own names; tensors that it shares are left alone.

        Raises KeelError for a name that the model does not have, or a shape that differs.
        """
        copy_weights(self.model, weights)


def build_native(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    rollout: Rollout,
    autocast: Autocast,
    dtype: str,
    **_: Any,
) -> NativeEngine:
    """The native engine of a recipe; see `keel.engines.registry.build_engine`."""
    return NativeEngine(
        model,
        tokenizer,
        max_num_seqs=rollout.max_num_seqs,
        autocast=autocast,
        dtype=DTYPES.get(dtype),
    )


def copy_weights(model: PreTrainedModel, weights: Mapping[str, Any]) -> None:
    """Copy weights into a model by its own names; tensors that it shares are left alone.

    Raises KeelError for a name that the model does not have, or a shape that differs.
    """
    own = model.state_dict(keep_vars=True)
    for name, new in weights.items():
        if name not in own:
            raise KeelError(f"the engine's model has no weight '{name}': sync the same model")
        old = own[name]
        if old.shape != new.shape:
            raise KeelError(
                f"weight '{name}' has shape {tuple(new.shape)} but the engine's model "
                f"{tuple(old.shape)}: sync the same model"
            )
        if old.device == new.device and old.data_ptr() == new.data_ptr():
            continue
        with torch.no_grad():
            old.copy_(new)


class _Run:
    """One call of `sample`: rows, their keys and values, and what has been sampled so far."""

    def __init__(self, engine: NativeEngine, request: Request, cache: PrefixCache) -> None:
        model, sampling = engine.model, request.sampling
        self.device, self.sampling = model.device, sampling
        # The trainer's own head: float32 logits, whatever the backbone computes in.
        head = replace(head_of(model), tokens=engine.tokens)
        self.logits = steady_logits(head)
        self.prompts, self.answers = request.prompts, request.answers
        self.uniforms, self.stops = request.uniforms, request.stops
        self.lengths = np.array([len(tokens) for tokens in self.prompts], dtype=np.int64)
        most = int(request.limits_P.max())
        self.forward = make_runner(model, request.longest_prompt, most, engine.dtype, cache)
        self.steps = make_multi_step(self.forward, head, sampling, self.stops)
        self.known = self.forward.recall(self.prompts)
        self.batch = DecodeBatch(
            self.lengths,
            request.limits_P,
            request.n,
            request.rows,
            request.prefill_tokens,
            self.known,
        )
        self.waiting_logits: Tensor | None = None
        """The logits of the last prompt, whose group may have entered only in part."""

    @property
    def live(self) -> bool:
        """Whether anything is left to do."""
        return self.batch.live

    def step(self) -> Ints:
        """Let sequences enter, run the model, and sample a token for every row; or several tokens
        if no sequence enters and compiled code can do the whole step.

        Returns the prompts whose last answer is now done, in order.
        """
        batch = self.batch
        entry = batch.waiting()
        if self.steps is None or entry.sequences:
            tokens, log_probs = self._one(entry)
        else:
            tokens, log_probs = self.steps(batch, self.uniforms)
        batch.token = tokens[-1].copy()
        batch.made += len(tokens)
        columns = zip(tokens.T.tolist(), log_probs.cpu().T.tolist(), strict=True)
        for sequence, (own, scores) in zip(batch.sequence.tolist(), columns, strict=True):
            self.answers.extend(sequence, own, scores)
        return self._ended()

    def _one(self, entry: DecodeEntry) -> tuple[Ints, Tensor]:
        """Tokens and log-probabilities (1, R) of the live rows and of those that enter."""
        logits = self._logits(entry)
        self.batch.add(entry)
        numbers = self.uniforms.take(self.batch.sequence, self.batch.made)
        place = place_of_float64(logits.device)
        uniform = torch.from_numpy(numbers[0]).to(place)
        tokens, log_probs = sample_tokens(logits.to(place), uniform, self.sampling)
        return tokens.cpu().numpy()[None], log_probs[None]

    def _ended(self) -> Ints:
        """Remove rows that ended; returns the prompts whose last answer is done."""
        batch = self.batch
        codes = self.stops.check(batch.sequence, batch.token, batch.made >= batch.limit)
        # Nothing continues a sequence whose budget is used up.
        return self._remove(codes, codes != LENGTH)

    def suspend(self) -> None:
        """End what is left where it is; a later call may go on with the sequences."""
        self.answers.codes[self.answers.codes == GOING] = LENGTH
        codes = np.full(len(self.batch.sequence), LENGTH, dtype=np.int8)
        self._remove(codes, codes > 0)

    def _remove(self, codes: npt.NDArray[np.int8], kept: npt.NDArray[np.bool_]) -> Ints:
        """Remove the rows with a code; keep the keys and values of those that are `kept`."""
        batch, done = self.batch, codes > 0
        if not done.any():
            return np.empty(0, dtype=np.int64)
        self.answers.codes[batch.sequence[done]] = codes[done]
        for row in np.flatnonzero(done & kept).tolist():
            self.forward.keep(batch, row)
        touched = np.unique(batch.sequence[done] // batch.n)
        rows, slots = batch.drop(done)
        self.forward.drop(rows, len(batch.sequence), slots, len(batch.prompt))
        over: Ints = touched[batch.left(touched) == 0]
        return over

    def _logits(self, entry: DecodeEntry) -> Tensor:
        """The logits for the next token of each row, live rows first. (R, V)"""
        batch = self.batch
        live = len(batch.sequence)
        parts = []
        if live or entry.prompts:
            logits = self._forward(entry)
            parts.append(logits[:live])
        if entry.held:
            assert self.waiting_logits is not None
            parts.append(self.waiting_logits.expand(entry.held, -1))
        if entry.prompts:
            numbers = np.arange(entry.sequences.start + entry.held, entry.sequences.stop)
            ranks = numbers // batch.n - entry.prompts.start
            parts.append(logits[live:].index_select(0, self._tensor(ranks)))
            self.waiting_logits = logits[-1:].clone()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(self, entry: DecodeEntry) -> Tensor:
        """One forward pass: prompts that enter, then the last token of each live row.

        Returns the logits (live rows + prompts, V), each at the last token.
        """
        batch = self.batch
        rows = len(batch.sequence)
        new = slice(entry.prompts.start, entry.prompts.stop)
        entering = Prefill(self.lengths[new], len(batch.prompt), self.known[new])
        live = DecodeRows(batch.slot, batch.made - 1, batch.length, self.device) if rows else None
        if rows:
            self.forward.reserve(batch.made, batch.ahead)
        if not entry.prompts:
            tokens, places = self._tensor(batch.token), self._tensor(batch.place)
            return self.logits(self.forward(tokens, places, entering, live))
        self.forward.admit(entering, batch.prompts_ahead(entry))
        _, inside = entering.places()
        numbers = (entry.prompts.start + entering.order()).tolist()
        prompts = [self.prompts[number][self.known[number] :] for number in numbers]
        states = self.forward(
            self._tensor(np.concatenate([*prompts, batch.token])),
            self._tensor(np.concatenate([inside, batch.place])),
            entering,
            live,
        )
        last = np.concatenate([entering.tokens + np.arange(rows), entering.last()])
        return self.logits(states.index_select(0, self._tensor(last)))

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def decodes_statically(model: PreTrainedModel) -> bool:
    """Whether an engine of this model decodes over static buffers if none are given."""
    return str(model.device.type) == "cuda"


def make_runner(
    model: PreTrainedModel,
    longest_prompt: int,
    longest_answer: int,
    dtype: torch.dtype | None = None,
    prefix_cache: PrefixCache | None = None,
) -> ModelRunner:
    """A runner for the model's current weights: compiled code if it supports the model.

    With a `dtype` it works on a copy of the weights in that type. `prefix_cache` holds the keys and
    values of earlier calls, and receives this call's. In one that lasts the weights do not change,
    so that compiled code serves the next call too.
    """
    longest, cache = longest_prompt + longest_answer, prefix_cache or PrefixCache()
    found: ModelRunner | None = cache.runner
    if cache.runner is None or cache.runner.longest < longest:
        cache.runner = None  # before there is another copy of the weights
        places = 1 << (longest - 1).bit_length() if cache.lasts else longest
        found = compiled(model, places, dtype or torch.float32, cache)
        cache.runner = found if cache.lasts else None
    return found or ModuleRunner(model, longest_prompt, longest_answer, dtype)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every module has its mode again."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
