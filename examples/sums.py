"""Additions that a small instruct model half knows: every pair of the numbers from 2 to 49."""

from __future__ import annotations


def sums() -> list[dict[str, str]]:
    """Rows of `prompt` and `answer`; the split is by the prompt's content."""
    numbers = range(2, 50)
    return [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}
        for a in numbers
        for b in numbers
    ]
