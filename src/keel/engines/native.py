"""The native engine: continuous batching over the trainer's own model, without a second copy."""

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

from keel.engines.batch import Batch, Entry
from keel.engines.passes import pass_of
from keel.engines.sampler import check, draw
from keel.engines.stopping import REASONS, Stops, budgets, context_length, eos_ids
from keel.engines.store import Entering, Live
from keel.engines.streams import Uniforms
from keel.models.attention import ATTENTION, install
from keel.models.backbone import autocast_for
from keel.models.encode import decode
from keel.models.families import head_of
from keel.models.head import logits
from keel.runs.watchdog import beat
from keel.types import Completion, Group, KeelError, Prompt, Sampling

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Trace:
    """What was sampled, step by step; the log-probabilities stay on the device until the end."""

    sequences: list[Ints] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)


class NativeEngine:
    """Draws completions with the trainer's model (see `keel.types.Engine`).

    Each prompt goes through the model once for its whole group; then every step feeds one token of
    each live row, rows that finish leave, and waiting sequences enter beside them in the same
    forward pass. At most `max_rows` sequences are decoded at once, and at most `prefill_tokens`
    prompt tokens enter in one step (one prompt at least).

    Each token is drawn from its sequence's own random stream, so with exact arithmetic a completion
    does not depend on what shares its batch; in float32 the order of a sum may still tip a
    near-tie.

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
    ) -> None:
        """Share `model`, turned to packed attention if it is not yet.

        `autocast` as in the policy: float32 weights on a GPU work in bfloat16. Raises KeelError
        for a model without an end-of-sequence token.
        """
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError("max_rows and prefill_tokens must be at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.autocast = autocast
        self.context = context_length(model)
        self._eos = eos_ids(model, tokenizer)
        if model.config._attn_implementation != ATTENTION:
            install(model)

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        """`n` completions for each prompt; see `keel.types.Engine`.

        Raises KeelError for settings that cannot be drawn with, a prompt without tokens or too long
        for the context, and logits that are not finite.
        """
        if n < 1:
            raise KeelError(f"{n} completions a prompt were asked for: ask for at least 1")
        check(sampling)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        stops = Stops(self._eos, sampling, self.tokenizer, vocabulary)
        limits = budgets(prompts, sampling, self.context)
        if not prompts:
            return []
        with torch.no_grad(), _evaluating(self.model), autocast_for(self.model, self.autocast):
            run = _Run(self.model, prompts, limits, n, sampling, seed, stops, self)
            while run.batch.live:
                run.step()
                beat()
        return self._groups(prompts, n, run)

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

    def _groups(self, prompts: Sequence[Prompt], n: int, run: _Run) -> list[Group]:
        """The trace, cut into completions."""
        sequences = np.concatenate(run.trace.sequences)
        order = np.argsort(sequences, kind="stable")
        tokens = np.concatenate(run.trace.tokens)[order]
        log_probs = torch.cat(run.trace.log_probs).float().cpu().numpy()[order]
        bounds = np.bincount(sequences, minlength=n * len(prompts)).cumsum()
        if not np.isfinite(log_probs).all():
            first = int(
                np.searchsorted(bounds, np.flatnonzero(~np.isfinite(log_probs))[0], "right")
            )
            raise KeelError(
                f"the model's logits for prompt '{prompts[first // n].id}' are not finite: "
                "its weights are broken or have diverged; use an earlier checkpoint or a lower "
                "learning rate"
            )
        pieces = np.split(tokens, bounds[:-1])
        texts = decode(self.tokenizer, [piece.tolist() for piece in pieces])
        completions = [
            Completion(
                tokens=piece,
                log_probs=log_prob,
                written=np.ones(len(piece), dtype=np.bool_),
                finish=REASONS[code],
                text=text,
            )
            for piece, log_prob, code, text in zip(
                pieces, np.split(log_probs, bounds[:-1]), run.codes.tolist(), texts, strict=True
            )
        ]
        return [
            Group(prompt, tuple(completions[p * n : (p + 1) * n]))
            for p, prompt in enumerate(prompts)
        ]


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
    ) -> None:
        self.device = model.device
        # The trainer's own head: float32 logits, whatever the backbone computes in.
        self.head = head_of(model)
        self.sampling = sampling
        self.stops = stops
        self.uniforms = Uniforms([prompt.id for prompt in prompts], n, seed)
        self.prompts = [np.array(prompt.tokens, dtype=np.int64) for prompt in prompts]
        self.lengths = np.array([len(tokens) for tokens in self.prompts], dtype=np.int64)
        self.forward = pass_of(model, int(self.lengths.max()), int(limits.max()))
        total = n * len(prompts)
        rows = min(engine.max_rows, total)
        self.batch = Batch(self.lengths, limits, n, rows, engine.prefill_tokens)
        self.waiting_logits: Tensor | None = None
        """Those of the last prompt that was computed: its group may have entered only in part."""
        self.trace = _Trace()
        self.codes = np.zeros(total, dtype=np.int8)

    def step(self) -> None:
        """Let sequences enter, run the model once, and draw a token for every row."""
        batch = self.batch
        entry = batch.waiting()
        logits = self._logits(entry)
        batch.add(entry)
        uniform = self._tensor(self.uniforms.take(batch.sequence, batch.made))
        tokens, log_probs = draw(logits, uniform, self.sampling)
        batch.token = tokens.cpu().numpy()
        batch.made += 1
        self.trace.sequences.append(batch.sequence)
        self.trace.tokens.append(batch.token)
        self.trace.log_probs.append(log_probs)
        codes = self.stops.check(batch.sequence, batch.token, batch.made >= batch.limit)
        done = codes > 0
        if done.any():
            self.codes[batch.sequence[done]] = codes[done]
            rows, slots = batch.drop(done)
            self.forward.drop(rows, len(batch.sequence), slots, len(batch.prompt))

    def _logits(self, entry: Entry) -> Tensor:
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

    def _forward(self, entry: Entry) -> Tensor:
        """One pass: prompts that enter, end to end, then the last token of each live row.

        Returns the logits (live rows + prompts, V), each at the last token.
        """
        batch = self.batch
        rows = len(batch.sequence)
        entering = Entering(
            self.lengths[entry.prompts.start : entry.prompts.stop], len(batch.prompt)
        )
        live = Live(batch.slot, batch.made - 1, batch.length, self.device) if rows else None
        if rows:
            self.forward.reserve(batch.made, batch.ahead)
        if not entry.prompts:
            tokens, places = self._tensor(batch.token), self._tensor(batch.place)
            return logits(self.forward(tokens, places, entering, live), self.head)
        self.forward.admit(entering, batch.prompts_ahead(entry))
        _, inside = entering.places()
        prompts = self.prompts[entry.prompts.start : entry.prompts.stop]
        states = self.forward(
            self._tensor(np.concatenate([*prompts, batch.token])),
            self._tensor(np.concatenate([inside, batch.place])),
            entering,
            live,
        )
        last = np.concatenate([entering.tokens + np.arange(rows), entering.lengths.cumsum() - 1])
        return logits(states.index_select(0, self._tensor(last)), self.head)

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
