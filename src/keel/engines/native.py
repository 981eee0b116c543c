"""The native engine: continuous batching over the trainer's own model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.engines.kv_cache import DecodeRows, Prefill
from keel.engines.model_runner import pass_of
from keel.engines.multi_step import steps_of
from keel.engines.prefix_cache import PrefixCache
from keel.engines.sampler import Uniforms, check, draw
from keel.engines.scheduler import DecodeBatch, DecodeEntry
from keel.engines.stopping import LENGTH, REASONS, Stops, budgets, eos_ids
from keel.models.attention import ATTENTION, install
from keel.models.backbone import autocast_for
from keel.models.chat import decode
from keel.models.families import context_length, head_of
from keel.models.head import steady_logits
from keel.runs.cancel import look
from keel.runs.watchdog import beat
from keel.types import Completion, Group, KeelError, OnGroup, Prompt, Sampling

Ints = npt.NDArray[np.int64]


class NativeEngine:
    """Samples completions with the trainer's model (see `keel.types.Engine`).

    Each prompt goes through the model once for its whole group; then every step feeds one token of
    each live row, finished rows leave, and waiting sequences enter in the same forward pass. At
    most `max_rows` sequences are decoded at once, and at most `prefill_tokens` prompt tokens enter
    in one step (but at least one prompt).

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
        max_rows: int = 256,
        prefill_tokens: int = 16_384,
        autocast: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Share `model`, with packed attention installed where it is not yet.

        `autocast` as in the policy: float32 weights on a GPU work in bfloat16. With a `dtype` each
        call of `sample` works on a copy of the backbone's weights in it, with the model's own head:
        log-probabilities then differ from the trainer's. Raises KeelError for a model without an
        end-of-sequence token.
        """
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError("max_rows and prefill_tokens must be at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.autocast = autocast
        self.dtype = dtype
        self.context = context_length(model)
        self._eos = eos_ids(model, tokenizer)
        if model.config._attn_implementation != ATTENTION:
            install(model)

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        """`n` completions for each prompt; see `keel.types.Engine`. Raises as `stream`."""
        return self.stream(prompts, n, sampling, seed)

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """`sample` with `on_group` called for each group; see `keel.types.StreamingEngine`.

        Raises KeelError for invalid settings, a prompt without tokens or too long for the context,
        and logits that are not finite.
        """
        return self.sample_from(PrefixCache(), prompts, n, sampling, seed, on_group)

    @contextmanager
    def conversation(self) -> Iterator[Conversation]:
        """The engine with a prefix cache, for calls of `sample` that continue earlier sequences.

        A prompt that begins with a sequence of the last call enters with its new tokens only. Do
        not change the weights before the block ends; the cache is freed then. Only the compiled
        runner keeps sequences (`engines.compiled`), at most `max_rows` of a call; all other prompts
        enter whole.
        """
        beginnings = PrefixCache(self.max_rows)
        try:
            yield Conversation(self, beginnings)
        finally:
            beginnings.close()

    def sample_from(
        self,
        beginnings: PrefixCache,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """`stream` that starts from the sequences in `beginnings` and adds its own to them."""
        if n < 1:
            raise KeelError(f"{n} completions a prompt were asked for: ask for at least 1")
        check(sampling)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        stops = Stops(self._eos, sampling, self.tokenizer, vocabulary)
        limits = budgets(prompts, sampling, self.context)
        if not prompts:
            return []
        with torch.no_grad(), _evaluating(self.model), autocast_for(self.model, self.autocast):
            run = _Run(self.model, prompts, limits, n, sampling, seed, stops, self, beginnings)
            cut = GroupAssembler(prompts, n, run.trace, run.codes, self.tokenizer)
            while run.batch.live:
                over = run.step()
                beat()
                look()
                if on_group is not None and len(over):
                    for place, group in cut(over):
                        on_group(place, group)
        groups = cut.rest()
        beginnings.name(groups)
        return groups

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Take over weights by the model's own names; tensors that it shares are left alone.

        Raises KeelError for a name that the model does not have, or a shape that differs.
        """
        own = self.model.state_dict(keep_vars=True)
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


class Conversation:
    """See `NativeEngine.conversation`."""

    def __init__(self, engine: NativeEngine, beginnings: PrefixCache) -> None:
        self._engine = engine
        self._beginnings = beginnings

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        """As `NativeEngine.sample`; a call that raises clears the cache."""
        try:
            return self._engine.sample_from(self._beginnings, prompts, n, sampling, seed)
        except BaseException:
            self._beginnings.clear()
            raise


@dataclass(frozen=True, eq=False)
class Trace:
    """The sampled tokens, step by step; log-probabilities stay on the device until the end."""

    sequences: list[Ints] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def take(self, places: Ints, n: int) -> Trace:
        """Remove and return what was sampled for the prompts of these numbers."""
        sequences, tokens = np.concatenate(self.sequences), np.concatenate(self.tokens)
        log_probs = torch.cat(self.log_probs)
        mine = np.isin(sequences // n, places)
        taken, left = (
            Trace(
                [sequences[chosen]],
                [tokens[chosen]],
                [log_probs[torch.from_numpy(chosen).to(log_probs.device)]],
            )
            for chosen in (mine, ~mine)
        )
        for name in ("sequences", "tokens", "log_probs"):
            getattr(self, name)[:] = getattr(left, name)
        return taken


class GroupAssembler:
    """Turns a trace into groups: those of some prompts at a time, or all at the end.

    `codes` says what ended each sequence (`engines.stopping`).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        n: int,
        trace: Trace,
        codes: npt.NDArray[np.int8],
        tokenizer: Any,
    ) -> None:
        self._prompts, self._n, self._tokenizer = prompts, n, tokenizer
        self._trace, self._codes = trace, codes
        self._groups: dict[int, Group] = {}
        self._broken: list[int] = []

    def __call__(self, places: Ints) -> Iterator[tuple[int, Group]]:
        """The groups of the prompts of these numbers (ascending), whose answers are done.

        Groups with logits that are not finite are left out; `rest` raises for them.
        """
        trace = self._trace.take(places, self._n)
        sequences = np.concatenate(trace.sequences)
        order = np.argsort(sequences, kind="stable")
        tokens = np.concatenate(trace.tokens)[order]
        log_probs = torch.cat(trace.log_probs).float().cpu().numpy()[order]
        chosen = (places[:, None] * self._n + np.arange(self._n)).ravel()
        bounds = np.searchsorted(sequences[order], chosen, "right")[:-1]
        answers, scores = np.split(tokens, bounds), np.split(log_probs, bounds)
        texts = decode(self._tokenizer, [answer.tolist() for answer in answers])
        completions = [
            Completion(
                tokens=answer,
                log_probs=log_prob,
                written=np.ones(len(answer), dtype=np.bool_),
                finish=REASONS[code],
                text=text,
            )
            for answer, log_prob, code, text in zip(
                answers, scores, self._codes[chosen].tolist(), texts, strict=True
            )
        ]
        for at, place in enumerate(places.tolist()):
            group = tuple(completions[at * self._n : (at + 1) * self._n])
            if not all(np.isfinite(completion.log_probs).all() for completion in group):
                self._broken.append(place)
                continue
            self._groups[place] = Group(self._prompts[place], group)
            yield place, self._groups[place]

    def rest(self) -> list[Group]:
        """All groups in the order of the prompts, at the end.

        Raises KeelError for logits that are not finite.
        """
        done = [*self._groups, *self._broken]
        left = np.setdiff1d(np.arange(len(self._prompts)), done)
        if len(left):
            list(self(left))
        if self._broken:
            raise KeelError(
                f"the model's logits for prompt '{self._prompts[min(self._broken)].id}' are not "
                "finite: its weights are broken or have diverged; use an earlier checkpoint or a "
                "lower learning rate"
            )
        return [self._groups[place] for place in range(len(self._prompts))]


class _Run:
    """One call of `sample`: rows, their keys and values, and what has been sampled so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Prompt],
        limits: Ints,
        n: int,
        sampling: Sampling,
        seed: int,
        stops: Stops,
        engine: NativeEngine,
        beginnings: PrefixCache,
    ) -> None:
        self.device = model.device
        # The trainer's own head: float32 logits, whatever the backbone computes in.
        head = head_of(model)
        self.logits = steady_logits(head)
        self.sampling = sampling
        self.stops = stops
        self.uniforms = Uniforms([prompt.id for prompt in prompts], n, seed)
        self.prompts = [np.array(prompt.tokens, dtype=np.int64) for prompt in prompts]
        self.lengths = np.array([len(tokens) for tokens in self.prompts], dtype=np.int64)
        answer = int(limits.max())
        self.forward = pass_of(model, int(self.lengths.max()), answer, engine.dtype, beginnings)
        self.steps = steps_of(self.forward, head, sampling, stops)
        self.known = self.forward.recall(self.prompts)
        total = n * len(prompts)
        rows = min(engine.max_rows, total)
        self.batch = DecodeBatch(self.lengths, limits, n, rows, engine.prefill_tokens, self.known)
        self.waiting_logits: Tensor | None = None
        """The logits of the last prompt, whose group may have entered only in part."""
        self.trace = Trace()
        self.codes = np.zeros(total, dtype=np.int8)

    def step(self) -> Ints:
        """Let sequences enter, run the model, and sample a token for every row; or several tokens
        where no sequence enters and compiled code can do the whole step.

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
        self.trace.sequences.append(np.tile(batch.sequence, len(tokens)))
        self.trace.tokens.append(tokens.ravel())
        self.trace.log_probs.append(log_probs.flatten())
        return self._ended()

    def _one(self, entry: DecodeEntry) -> tuple[Ints, Tensor]:
        """Tokens and log-probabilities (1, R) of the live rows and of those that enter."""
        logits = self._logits(entry)
        self.batch.add(entry)
        numbers = self.uniforms.take(self.batch.sequence, self.batch.made)
        tokens, log_probs = draw(logits, self._tensor(numbers[0]), self.sampling)
        return tokens.cpu().numpy()[None], log_probs[None]

    def _ended(self) -> Ints:
        """Remove rows that ended; returns the prompts whose last answer is done."""
        batch = self.batch
        codes = self.stops.check(batch.sequence, batch.token, batch.made >= batch.limit)
        done = codes > 0
        if not done.any():
            return np.empty(0, dtype=np.int64)
        self.codes[batch.sequence[done]] = codes[done]
        # Nothing continues a sequence whose budget is used up.
        for row in np.flatnonzero(done & (codes != LENGTH)).tolist():
            self.forward.keep(batch.ended(row))
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
