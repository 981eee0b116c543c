"""The task, the rewards and the demonstrations of the evidence's recipes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keel.types import Completion, Prompt, Split

RIGHT, WRONG = "+", "-"


class Verdict:
    """Its environment says at random whether a text was right, and lets the policy write on.

    The policy writes a text, the environment answers `+` or `-`, the policy writes a second text
    that counts for nothing. No policy is right more often than half of the time, so rewards hold
    nothing that can be learned: what lengths do in training comes from the objective alone. A
    policy that was answered `-` knows that it is wrong, as one that has lost its way in a long
    answer may. Prompts are numbers in base two; the answer is the parity of a hash of prompt and
    text.
    """

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


def characters(
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    **_: Any,
) -> list[list[tuple[int, float]]]:
    """A step reward for each character (one token each): 1 while all so far are the answer's.

    The token that ends the completion is a step too, right where the whole text is.
    """
    found = []
    for text, ids, gold in zip(completions, completion_ids, answer, strict=True):
        right = [float(gold.startswith(text[: end + 1])) for end in range(len(text))]
        found.append(list(enumerate([*right, float(text == gold)][: len(ids)])))
    return found


def characters_written(*, completions: Sequence[str], **_: Any) -> list[float]:
    """The length of each answer, which differs even where a policy knows nothing."""
    return [float(len(text)) for text in completions]


def noise(*, completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Up to 10, by a hash of the right answer and the given one: nothing that can be learned."""
    return [
        10 * hashlib.sha256(f"{gold} {text}".encode()).digest()[0] / 255
        for text, gold in zip(completions, answer, strict=True)
    ]


def seldom_right(prompt: Any, gold: str, rng: np.random.Generator) -> str:
    """The gold answer with its first and last character exchanged in 99 of 100."""
    return _exchanged(gold, 0.99, rng)


def few_right(prompt: Any, gold: str, rng: np.random.Generator) -> str:
    """The gold answer with its first and last character exchanged in nine of ten."""
    return _exchanged(gold, 0.9, rng)


def _exchanged(gold: str, share: float, rng: np.random.Generator) -> str:
    return gold[-1] + gold[1:-1] + gold[0] if rng.random() < share and len(gold) > 1 else gold
