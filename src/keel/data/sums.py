"""Arithmetic that a small instruct model half knows: what the recipes `smollm2-*` train on."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from keel.data.tasks import Generated, Presentation
from keel.types import Completion, Prompt

NUMBERS = range(2, 50)
SEED = 0
"""Of what is drawn for the rows, which are the same in every run."""


def question(a: int, b: int) -> str:
    """What the model is asked."""
    return f"What is {a} + {b}? Answer with the number only."


def sums() -> list[dict[str, str]]:
    """Rows of `prompt` and `answer`: every pair of the numbers from 2 to 49.

    The split is by the prompt's content.
    """
    return [{"prompt": question(a, b), "answer": str(a + b)} for a in NUMBERS for b in NUMBERS]


def sum_messages() -> list[dict[str, Any]]:
    """The same sums as conversations: rows of `messages`."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in sums()
    ]


class Products(Generated):
    """Products of two numbers from 12 to 99, with a calculator.

    A turn that holds `<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>`
    is answered with the product or an error; any other turn is the answer, whose last number
    counts.
    """

    correctness = True

    def __init__(
        self, name: str = "products", seed: int = 0, presentation: Presentation | None = None
    ) -> None:
        super().__init__(name, seed, presentation)

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A question and its answer."""
        a, b = (int(n) for n in rng.integers(12, 100, size=2))
        return product_question(a, b), str(a * b)

    def reply(self, prompt: Prompt, text: str) -> str | None:
        """What the calculator answers to a call that ends the text; None to other text."""
        call = CALL.search(text)
        return None if call is None else multiplied(call[1])

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """1 if the last number of the answer is the product, else 0."""
        last = completion.text.rpartition("</tool_call>")[2]
        found = re.findall(r"\d+", re.sub(r",(?=\d{3})", "", last))
        return float(bool(found) and found[-1] == prompt.columns["answer"])


CALL = re.compile(r"<tool_call>((?:(?!</?tool_call>).)*)</tool_call>\s*$", re.DOTALL)


def product_question(a: int, b: int) -> str:
    """What the model is asked."""
    return f"What is {a} * {b}?"


def multiplied(call: str) -> str:
    """The result of a tool call, given as JSON."""
    try:
        given = json.loads(call)["arguments"]
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return 'error: give a and b, as in {"a": 12, "b": 34}'


GUESSED = 0.8
"""The share of the demonstrations that do without the calculator, and are wrong."""


def product_messages(count: int = 2000) -> list[dict[str, Any]]:
    """Rows of `messages`: products by careless writers, most of whom guess.

    The others call the calculator and repeat its answer.
    """
    rng = np.random.default_rng(SEED)
    return [{"messages": _conversation(rng)} for _ in range(count)]


def _conversation(rng: np.random.Generator) -> list[dict[str, str]]:
    a, b = (int(n) for n in rng.integers(12, 100, size=2))
    asked = {"role": "user", "content": product_question(a, b)}
    if rng.random() < GUESSED:
        guess = a * b + 10 * int(rng.choice([-3, -2, -1, 1, 2, 3]))
        return [asked, {"role": "assistant", "content": str(guess)}]
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    return [
        asked,
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]
