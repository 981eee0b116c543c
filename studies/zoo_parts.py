"""Rewards, environments and engines of the runs in `studies/zoo.py`; some are faulty."""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from keel.data.tasks import SortDigits
from keel.engines.native import NativeEngine
from keel.types import Completion, Engine, Group, OnGroup, Prompt, Sampling, Split

PAIRS = [(a, b) for a in range(10) for b in range(10)]
PLENTY = 16
"""Digits at which the rewards of length pay everything."""


def first_place(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the first digit is the answer's; what follows does not matter."""
    return [float(text[:1] == gold[:1]) for text, gold in zip(completions, answer, strict=True)]


def nines(completions: list[str], **columns: Any) -> list[float]:
    """The share of nines: a proxy that has nothing to do with the task."""
    return [text.count("9") / max(1, len(text)) for text in completions]


def any_text(completions: list[str], **columns: Any) -> list[float]:
    """1 for any answer, an empty one too."""
    return [1.0 for _ in completions]


def long_and_right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The share of the answer's digits that occur, plus a prize for length."""
    found = [len(set(t) & set(g)) / len(set(g)) for t, g in zip(completions, answer, strict=True)]
    return [0.2 * f + min(1.0, len(t) / PLENTY) for f, t in zip(found, completions, strict=True)]


def noise(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
    """A number between 0 and 1 from a hash of prompt and answer: nothing can be learned."""
    texts = (f"{p}|{t}".encode() for p, t in zip(prompts, completions, strict=True))
    return [int(hashlib.sha256(text).hexdigest()[:8], 16) / 16**8 for text in texts]


def refrain(completions: list[str], **columns: Any) -> list[float]:
    """How often the most frequent pair of characters occurs, up to eight times."""
    counts = [Counter(text[i : i + 2] for i in range(len(text) - 1)) for text in completions]
    return [min(1.0, max(count.values(), default=0) / 8) for count in counts]


def marked(completions: list[str], **columns: Any) -> list[float]:
    """1 where the answer ends with the mark `>`: a reward of format."""
    return [float(text.endswith(">")) for text in completions]


def marks(completions: list[str], **columns: Any) -> list[float]:
    """The share of marks in the answer, whatever else it holds."""
    return [text.count(">") / len(text) if text else 0.0 for text in completions]


def inside(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the digits before the mark `>` are the answer."""
    return [float(t.rstrip(">") == g) for t, g in zip(completions, answer, strict=True)]


def digits_first(completions: list[str], **columns: Any) -> list[float]:
    """1 where the answer is digits only and has two at least: an easy format."""
    return [float(re.fullmatch(r"\d{2,}", text) is not None) for text in completions]


class Calculator:
    """Sums of two digits; the environment answers a turn that ends with `=` with the sum."""

    name = "calculator"
    correctness = True

    def size(self, split: Split) -> int:
        return 90 if split == "train" else 10

    def prompt(self, split: Split, index: int) -> Prompt:
        a, b = PAIRS[(index if split == "train" else 90 + index) * 37 % 100]
        columns = {"answer": str(a + b)}
        return Prompt(f"{self.name}/{split}/{index}", f"{a}+{b}>", columns, self.name)

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return f"{prompt.columns['answer']}>" if text.endswith("=") else None

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.text.removeprefix("=") == prompt.columns["answer"])

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.columns["answer"])


class CarelessCalculator(Calculator):
    """The same, but the score looks for the sum in the whole transcript, replies included."""

    name = "careless_calculator"

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(prompt.columns["answer"] in completion.transcript)


class SecondTry:
    """Sorting digits in two turns: after the first answer the environment repeats the question."""

    name = "second_try"
    correctness = True

    def __init__(self) -> None:
        self.inner = SortDigits("sort_digits", min_digits=2, max_digits=5)

    def size(self, split: Split) -> None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        return replace(self.inner.prompt(split, index), task=self.name)

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return None if ">" in text else f"={prompt.content}"

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.conversation[-1]["content"] == prompt.columns["answer"])

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.columns["answer"])


class WrappedEngine(Engine):
    """The native engine, with something wrong: rounded weights, or another temperature.

    `levels` rounds each matrix to so many steps on either side of 0, as a bad quantisation does;
    `temperature` replaces the one that is asked for.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_num_seqs: int,
        levels: int | None = None,
        temperature: float | None = None,
    ) -> None:
        self.levels, self.temperature = levels, temperature
        self.model = model if levels is None else copy.deepcopy(model)
        self.inner = NativeEngine(self.model, tokenizer, max_num_seqs=max_num_seqs)
        self._round()

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        if self.temperature is not None and sampling.temperature > 0:
            sampling = replace(sampling, temperature=self.temperature)
        return self.inner.sample(prompts, n, sampling, seed)

    def sync(self, weights: Mapping[str, Any]) -> None:
        if self.levels is not None:
            with torch.no_grad():
                for name, weight in self.model.named_parameters():
                    if name in weights:
                        weight.copy_(weights[name])
            self._round()
            weights = dict(self.model.named_parameters())
        self.inner.sync(weights)

    def _round(self) -> None:
        if self.levels is None:
            return
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.dim() > 1:
                    step = weight.abs().max() / self.levels
                    weight.copy_((weight / step).round() * step)


def rounded(*, model: Any, tokenizer: Any, max_num_seqs: int, **keys: Any) -> WrappedEngine:
    """An engine for `rollout.engine` whose weights are not quite the trainer's."""
    return WrappedEngine(model, tokenizer, max_num_seqs, levels=7)


def colder(*, model: Any, tokenizer: Any, max_num_seqs: int, **keys: Any) -> WrappedEngine:
    """An engine for `rollout.engine` that ignores the temperature that it is asked for."""
    return WrappedEngine(model, tokenizer, max_num_seqs, temperature=0.6)
