"""What the tests of tasks and rewards are made with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.sources import TaskSource
from keel.data.tasks import BaseTask
from keel.types import Completion, Prompt, Split


def completion(text: str, length: int | None = None) -> Completion:
    """A completion that says `text` in `length` tokens (one a character unless given)."""
    n = len(text) if length is None else length
    return Completion(
        tokens=np.arange(n, dtype=np.int64),
        log_probs=np.full(n, -1.0, dtype=np.float32),
        written=np.ones(n, dtype=np.bool_),
        finish="eos",
        text=text,
    )


def source(name: str, **keys: Any) -> TaskSource:
    """A task of a recipe."""
    return TaskSource.model_validate({"name": name, **keys})


def jsonl(path: Path, rows: Sequence[Any]) -> str:
    """Write rows, one a line; the path as a recipe has it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class Calculator(BaseTask):
    """Two turns: the policy writes `calc: 12*7`, the calculator answers, the policy concludes.

    The prompt is `12*7=`; full marks for the product at the end.
    """

    def __init__(self, name: str = "calculator", seed: int = 0) -> None:
        self.name = name
        self.seed = seed

    def prompt(self, split: Split, index: int) -> Prompt:
        """A product of two numbers from 10 to 99."""
        key = np.random.SeedSequence([self.seed, int(split == "validation"), index])
        a, b = (int(n) for n in np.random.default_rng(key).integers(10, 100, size=2))
        columns = {"answer": str(a * b)}
        return Prompt(f"{self.name}/{split}/{index}", f"{a}*{b}=", columns, self.name)

    def gold(self, prompt: Prompt) -> str:
        """The product."""
        return str(prompt.columns["answer"])

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """1 where the text ends on the product."""
        return float(completion.text.rstrip().endswith(self.gold(prompt)))

    def reply(self, prompt: Prompt, text: str) -> str | None:
        """The value of the product asked for, as long as none was given yet."""
        _, asked, product = text.rpartition("calc:")
        factors = product.strip().split("*")
        if not asked or "result:" in text or len(factors) != 2:
            return None
        if not all(factor.isdigit() and len(factor) < 10 for factor in factors):
            return None
        return f" result: {int(factors[0]) * int(factors[1])} "


class Listed(BaseTask):
    """A task with a given number of prompts a split, for the streams."""

    def __init__(self, name: str, train: int | None, validation: int | None = 5) -> None:
        self.name = name
        self.sizes = {"train": train, "validation": validation}

    def size(self, split: Split) -> int | None:
        """As given."""
        return self.sizes[split]

    def prompt(self, split: Split, index: int) -> Prompt:
        """The index as text."""
        size = self.sizes[split]
        assert size is None or 0 <= index < size
        return Prompt(f"{self.name}/{split}/{index}", f"{self.name} {split} {index}", {}, self.name)
