"""The native engine: continuous batching over the trainer's own model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.engines.groups import GroupAssembler, Trace
from keel.engines.kv_cache import DecodeRows, Prefill
from keel.engines.model_runner import pass_of
from keel.engines.multi_step import steps_of
from keel.engines.prefix_cache import PrefixCache
from keel.engines.random_streams import Uniforms
from keel.engines.sampler import check, draw
from keel.engines.scheduler import DecodeBatch, DecodeEntry
from keel.engines.stopping import LENGTH, Stops, budgets, context_length, eos_ids
from keel.models.attention.functions import ATTENTION, install
from keel.models.backbone import autocast_for
from keel.models.families import head_of
from keel.models.head import steady_logits
from keel.runs.cancel import look
from keel.runs.watchdog import beat
from keel.types import Group, KeelError, OnGroup, Prompt, Sampling

Ints = npt.NDArray[np.int64]


class NativeEngine:
    """Draws completions with the trainer's model (see `keel.types.Engine`).

    Each prompt goes through the model once for its whole group; then every step feeds one token of
    each live row, rows that finish leave, and waiting sequences enter beside them in the same
    forward pass. At most `max_rows` sequences are decoded at once, and at most `prefill_tokens`
    prompt tokens enter in one step (one prompt at least).

    Each token is drawn from its sequence's own random stream, so with exact arithmetic a completion
    does not depend on what shares its batch. Compiled code (`engines.cpu`) sums a row in an
    order of its own; elsewhere the order of a float32 sum may still tip a near-tie.

    The end-of-sequence token is part of the completion: choosing it is an act of the policy. The
    text leaves special tokens out and is otherwise what the tokens say: a stop string stays in it,
    with whatever else its last token holds. A completion that meets the end of the model's context
    stops there with finish "length".
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
        """Share `model`, turned to packed attention if it is not yet.

        `autocast` as in the policy: float32 weights on a GPU work in bfloat16. With a `dtype` each
        call of `sample` works on a copy of the backbone's weights in it, beside the model's own
        head: log-probabilities are then not the trainer's. Raises KeelError for a model without an
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
        self.eos = eos_ids(model, tokenizer)
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
        """`sample`, which hands each group over as it is done; see `keel.types.StreamingEngine`.

        Raises KeelError for settings that cannot be drawn with, a prompt without tokens or too long
        for the context, and logits that are not finite.
        """
        return self.sample_from(PrefixCache(), prompts, n, sampling, seed, on_group)

    @contextmanager
    def conversation(self) -> Iterator[Conversation]:
        """The engine with a memory, for calls of `sample` that go on from each other's sequences.

        In it a prompt that begins with one of the last call's sequences enters with its new tokens
        alone. This is for one set of weights: do not change them before it ends, and nothing of it
        is left then. Only the compiled pass remembers (`engines.cpu`), and of the sequences of
        a call no more than `max_rows`; the others enter whole, as all do elsewhere.
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
        """`stream` behind what earlier calls left in `beginnings`, where this one leaves what a
        later one may go on from."""
        if n < 1:
            raise KeelError(f"{n} completions a prompt were asked for: ask for at least 1")
        check(sampling)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        stops = Stops(self.eos, sampling, self.tokenizer, vocabulary)
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
        """As `NativeEngine.sample`; after a call that raised, all is forgotten."""
        try:
            return self._engine.sample_from(self._beginnings, prompts, n, sampling, seed)
        except BaseException:
            self._beginnings.clear()
            raise


class _Run:
    """One call of `sample`: rows, their store, and what has been sampled so far."""

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
        """Those of the last prompt that was computed: its group may have entered only in part."""
        self.trace = Trace()
        self.codes = np.zeros(total, dtype=np.int8)

    def step(self) -> Ints:
        """Let sequences enter, run the model, and draw a token for every row; or several where
        nobody enters and compiled code does it all.

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
        """Rows that ended with their last token leave; the prompts whose last answer is done."""
        batch = self.batch
        codes = self.stops.check(batch.sequence, batch.token, batch.made >= batch.limit)
        done = codes > 0
        if not done.any():
            return np.empty(0, dtype=np.int64)
        self.codes[batch.sequence[done]] = codes[done]
        # Behind a budget that is used up nothing follows.
        for row in np.flatnonzero(done & (codes != LENGTH)).tolist():
            self.forward.keep(batch.ended(row))
        touched = np.unique(batch.sequence[done] // batch.n)
        rows, slots = batch.drop(done)
        self.forward.drop(rows, len(batch.sequence), slots, len(batch.prompt))
        over: Ints = touched[batch.left(touched) == 0]
        return over

    def _logits(self, entry: DecodeEntry) -> Tensor:
        """The logits that the next token of each row is drawn from, live rows first. (R, V)"""
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
        """One pass: what enters of prompts, then the last token of each live row.

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
    """Evaluation mode for a while; every module is left in the mode it was found in."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
