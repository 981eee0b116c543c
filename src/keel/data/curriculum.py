"""A curriculum: which prompts of a stream are asked, by how often they were answered rightly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keel.config.sources import Curriculum
from keel.types import Prompt, PromptSupply


class CurriculumStream:
    """A stream that passes over prompts that are too easy or too hard by now.

    A prompt is taken if it was never sampled, if the moving average of its pass rate is in the
    window, or at every `revisit`-th time that it comes. So it is a function of the stream, of what
    was observed, and of `state()`. Online difficulty filtering, arXiv:2504.03380, with a moving
    average so that it is known before a prompt is sampled.
    """

    def __init__(self, stream: PromptSupply, rule: Curriculum, state: Mapping[str, Any]) -> None:
        self.stream, self.rule = stream, rule
        known = state.get("curriculum", {})
        self.passed_over = int(known.get("passed_over", 0))
        self.rates: dict[str, float] = dict(known.get("rates", {}))
        self.waited: dict[str, int] = dict(known.get("waited", {}))

    def take(self, k: int) -> list[Prompt]:
        """The next `k` prompts that are not passed over."""
        found: list[Prompt] = []
        while len(found) < k:
            (prompt,) = self.stream.take(1)
            waited = self.waited.pop(prompt.id, 0) + 1
            if self._fits(self.rates.get(prompt.id)) or waited >= self.rule.revisit:
                found.append(prompt)
            else:
                self.waited[prompt.id] = waited
                self.passed_over += 1
        return found

    def observe(self, rewards: Iterable[tuple[str, list[float]]]) -> None:
        """Take in the rewards of completions of prompts, by the prompts' ids."""
        for prompt, given in rewards:
            if given:
                rate = sum(reward > self.rule.threshold for reward in given) / len(given)
                old = self.rates.get(prompt, rate)
                self.rates[prompt] = self.rule.decay * old + (1 - self.rule.decay) * rate

    def metrics(self) -> dict[str, float]:
        """How many prompts were passed over so far, and the share of the known ones that fit."""
        fitting = [self._fits(rate) for rate in self.rates.values()]
        share = sum(fitting) / len(fitting) if fitting else 1.0
        return {"prompts/passed_over": float(self.passed_over), "prompts/in_window": share}

    def _fits(self, rate: float | None) -> bool:
        return rate is None or self.rule.low <= rate <= self.rule.high

    @property
    def left_out(self) -> Mapping[str, int]:
        return self.stream.left_out

    def state(self) -> dict[str, Any]:
        """That of the stream, with what was observed."""
        seen = {"rates": dict(self.rates), "waited": dict(self.waited)}
        own = {"passed_over": self.passed_over, **seen}
        return {**self.stream.state(), "curriculum": own}
