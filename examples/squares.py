"""A task of one's own: squares of the numbers from 0 to 99, each tenth held out."""

from __future__ import annotations

from keel.types import Completion, Prompt, Side

HELDOUT = 10


class Squares:
    """`prompt` is a function of its arguments, so that a run resumes from a number."""

    name = "squares"
    correctness = True

    def size(self, side: Side) -> int:
        return HELDOUT if side == "heldout" else 100 - HELDOUT

    def prompt(self, side: Side, index: int) -> Prompt:
        every = 100 // HELDOUT
        n = index * every if side == "heldout" else index + index // (every - 1) + 1
        return Prompt(f"{self.name}/{side}/{index}", f"{n}*{n}=", {"answer": str(n * n)}, self.name)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.text.strip() == prompt.columns["answer"])

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.columns["answer"])
