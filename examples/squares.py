"""A task of one's own: squares of the numbers from 0 to 99, each tenth held out."""

from __future__ import annotations

from keel.types import Completion, Prompt, Split

VALIDATION = 10


class Squares:
    """`prompt` is a function of its arguments, so that a run resumes from a number."""

    name = "squares"
    correctness = True

    def size(self, split: Split) -> int:
        return VALIDATION if split == "validation" else 100 - VALIDATION

    def prompt(self, split: Split, index: int) -> Prompt:
        every = 100 // VALIDATION
        n = index * every if split == "validation" else index + index // (every - 1) + 1
        return Prompt(
            f"{self.name}/{split}/{index}", f"{n}*{n}=", {"answer": str(n * n)}, self.name
        )

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.text.strip() == prompt.columns["answer"])

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.columns["answer"])
