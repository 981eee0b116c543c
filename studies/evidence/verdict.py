"""A task whose environment says whether a text was right, and lets the policy write on.

The policy writes a text, the environment answers `+` or `-` at random, the policy writes a second
text that counts for nothing. No policy is right more often than half of the time, so rewards hold
nothing that can be learned: what lengths do in training comes from the objective alone. A policy
that was answered `-` knows that it is wrong, as one that has lost its way in a long answer may.
"""

from __future__ import annotations

import hashlib

from keel.types import Completion, Prompt, Split

RIGHT, WRONG = "+", "-"


class Verdict:
    """Prompts are numbers in base two; the answer is the parity of a hash of prompt and text."""

    name = "verdict"
    correctness = True

    def size(self, split: Split) -> None:
        """Endless."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        """Even numbers train, odd ones validate."""
        number = f"{2 * index + (split == 'validation'):b}"
        text = number.replace("0", "a").replace("1", "b")
        return Prompt(f"verdict/{split}/{index}", f"{text}:", {}, self.name)

    def reply(self, prompt: Prompt, text: str) -> str:
        """The answer to the first text; `rollout.max_turns = 2` ends the second."""
        return _answer(prompt, text)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """1 where the answer is `+`."""
        first = completion.conversation[0]["content"]
        return float(_answer(prompt, str(first)) == RIGHT)


def _answer(prompt: Prompt, text: str) -> str:
    return RIGHT if hashlib.sha256(f"{prompt.id} {text}".encode()).digest()[0] % 2 else WRONG
