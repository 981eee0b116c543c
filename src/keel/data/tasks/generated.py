"""Tasks whose prompts are drawn, not stored: endless, seeded, and addressed by index."""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from keel.data.splits import split_of
from keel.data.tasks.base import BaseTask, Presentation, prompt_id
from keel.graders.stated import answer_part
from keel.types import Completion, KeelError, Prompt, Split

ATTEMPTS = 5_000
"""Draws for one prompt until one falls on its split; nine in ten validation draws do not."""


class Generated(BaseTask):
    """A task that generates a question and its answer; the score is exact match, 1 or 0.

    The prompt at (seed, split, index) is the first of the draws seeded by
    `SeedSequence([seed, split, index, attempt])` whose text the hash puts on that split.
    """

    correctness = True

    def __init__(
        self, name: str, seed: int = 0, presentation: Presentation | None = None, **options: Any
    ) -> None:
        self.name = name
        self.seed = seed
        self.presentation = presentation or Presentation()
        self.configure(**options)

    def configure(self) -> None:
        """Take the options of the task: its keyword parameters."""

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A question and its answer."""
        raise NotImplementedError

    def columns(self, rng: np.random.Generator, split: Split, index: int) -> dict[str, Any]:
        """The columns of a prompt; `prompt` is the question."""
        question, answer = self.draw(rng)
        return {"prompt": question, "answer": answer}

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at an index. Raises KeelError if no draw falls on the split."""
        for attempt in range(ATTEMPTS):
            key = [self.seed, int(split == "validation"), index, attempt]
            rng = np.random.default_rng(np.random.SeedSequence(key))
            columns = self.columns(rng, split, index)
            if split_of(columns["prompt"]) == split:
                body = self.presentation.body(columns, self.name)
                content = self.presentation.frame(body, self.name)
                return Prompt(prompt_id(self.name, split, index), content, columns, self.name)
        raise KeelError(
            f"task {self.name!r}: none of {ATTEMPTS} draws is on the {split} split, since there "
            "are too few different prompts: widen its options"
        )

    def gold(self, prompt: Prompt) -> str | None:
        """The right answer."""
        return str(prompt.columns["answer"])

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """1 for the right answer and nothing but it, else 0."""
        stated = answer_part(completion.text, prompt.opening) or ""
        return float(stated.strip() == self.gold(prompt))


def check_range(where: str, **bounds: int) -> None:
    """The options are whole numbers from 1 on, in rising order. Raises KeelError."""
    last = 1
    for name, value in bounds.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < last:
            raise KeelError(f"{where}: {name} = {value!r}: give a whole number from {last} on")
        last = value


MAX_DIGITS = 18
"""Most digits of a number that fits into 64 bits."""


class Addition(Generated):
    """Add two numbers of at most `digits` digits: `27+5=` asks for `32`."""

    def configure(self, *, digits: int = 2) -> None:
        check_range(f"task {self.name!r}", digits=digits)
        if digits > MAX_DIGITS:
            raise KeelError(f"task {self.name!r}: digits = {digits}: give at most {MAX_DIGITS}")
        self.digits = digits

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length for each number, then the number, so that short ones are not rare."""
        lengths = [int(rng.integers(1, self.digits + 1)) for _ in range(2)]
        a, b = (int(rng.integers(0, 10**n)) for n in lengths)
        return f"{a}+{b}=", str(a + b)


class SortDigits(Generated):
    """Sort the digits: `7301>` asks for `0137`, with `separator` between them if one is set."""

    def configure(self, *, min_digits: int = 4, max_digits: int = 8, separator: str = "") -> None:
        self.separator = separator
        check_range(f"task {self.name!r}", min_digits=min_digits, max_digits=max_digits)
        self.min_digits = min_digits
        self.max_digits = max_digits

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length, then each digit, all equally likely."""
        length = int(rng.integers(self.min_digits, self.max_digits, endpoint=True))
        # Floats in one call: an order of magnitude cheaper here than `integers` of a size.
        digits = "".join(str(int(10 * u)) for u in rng.random(length).tolist())
        return f"{digits}>", self.separator.join(sorted(digits))


class Reverse(Generated):
    """Reverse the letters: `keel>` asks for `leek`."""

    def configure(self, *, min_letters: int = 3, max_letters: int = 8) -> None:
        check_range(f"task {self.name!r}", min_letters=min_letters, max_letters=max_letters)
        self.min_letters = min_letters
        self.max_letters = max_letters

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length, then each letter, all equally likely."""
        length = int(rng.integers(self.min_letters, self.max_letters, endpoint=True))
        letters = "".join(string.ascii_lowercase[int(26 * u)] for u in rng.random(length).tolist())
        return f"{letters}>", letters[::-1]


MISTAKE_SHARE = 0.6
"""How often the careless teacher makes its mistake."""


def gold(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer itself."""
    return gold


def careless(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer with, in six of ten, one and the same mistake: first and last exchanged.

    Imitation takes the mistake over as well; a verifier does not.
    """
    if rng.random() < MISTAKE_SHARE and len(gold) > 1:
        return gold[-1] + gold[1:-1] + gold[0]
    return gold
