"""What a call of `sample` has drawn, token by token, and the groups that become of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from keel.engines.stopping import REASONS
from keel.models.chat import decode
from keel.types import Completion, Group, KeelError, Prompt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Trace:
    """What was sampled, step by step; the log-probabilities stay on the device until the end."""

    sequences: list[Ints] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def take(self, places: Ints, n: int) -> Trace:
        """What was sampled for the prompts at these places, which is then no longer in here."""
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
    """A trace cut into groups: those of some prompts at a time, or all at the end.

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
        """The groups of the prompts at these places (in order), whose answers are done.

        Those with logits that are not finite are left out: `rest` speaks of them.
        """
        trace = self._trace.take(places, self._n)
        sequences = np.concatenate(trace.sequences)
        order = np.argsort(sequences, kind="stable")
        tokens = np.concatenate(trace.tokens)[order]
        log_probs = torch.cat(trace.log_probs).float().cpu().numpy()[order]
        chosen = (places[:, None] * self._n + np.arange(self._n)).ravel()
        bounds = np.searchsorted(sequences[order], chosen, "right")[:-1]
        pieces, said = np.split(tokens, bounds), np.split(log_probs, bounds)
        texts = decode(self._tokenizer, [piece.tolist() for piece in pieces])
        completions = [
            Completion(
                tokens=piece,
                log_probs=log_prob,
                written=np.ones(len(piece), dtype=np.bool_),
                finish=REASONS[code],
                text=text,
            )
            for piece, log_prob, code, text in zip(
                pieces, said, self._codes[chosen].tolist(), texts, strict=True
            )
        ]
        for at, place in enumerate(places.tolist()):
            answers = tuple(completions[at * self._n : (at + 1) * self._n])
            if not all(np.isfinite(answer.log_probs).all() for answer in answers):
                self._broken.append(place)
                continue
            self._groups[place] = Group(self._prompts[place], answers)
            yield place, self._groups[place]

    def rest(self) -> list[Group]:
        """Every group, in the order of the prompts, at the end of the run.

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
