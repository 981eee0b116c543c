"""The process that compares answers by math-verify: `python -m keel.graders.mathematics_worker`.

Started by `keel.graders.mathematics` in the sandbox. Requests, one JSON line each:

    {"gold", "stated", "question", "evaluated", "strict", "cpu", "patience"} -> "same", …

Each answer is parsed in a process that is forked for it alone, and so is each gold answer, whose
fork alone says whether it can be read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from sympy.core.random import seed

from keel.graders.expressions import can_be_read, same_answer, same_to_math_verify
from keel.platform.confined import Confined, Request, serve

KEPT = 16_384
"""Gold answers of which it is remembered whether they can be read."""
WARM = (
    (r"\frac{\sqrt{2}x}{3} + 1", r"1 + \frac{x \sqrt{2}}{3}"),
    ("x^2 + 1", "x^2 + x"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    (r"\sin x + \pi", r"\cos x + \log 2"),
    ("y = 2x + 1", "y = 2x + 3"),
    (r"\begin{pmatrix} x \\ 2 \end{pmatrix}", r"\begin{pmatrix} y \\ 2 \end{pmatrix}"),
)
"""Compared at the start, so that no fork has to import and to build as much again."""


def start(program: bytes) -> Callable[[Request], Any]:
    """What answers requests; `program` is the filter of system calls of each verdict."""
    assert [same_answer(*pair) for pair in WARM] == [True] + [False] * 5, "it does not compare"
    gc.collect()
    gc.freeze()  # what is not traced is not copied into each fork
    confined = Confined(program)

    known: dict[str, float] = {}

    def readable(gold: str, cpu: float, patience: float) -> float | str:
        if gold in known:
            return known[gold]
        found = confined.value(lambda: reads(gold), cpu, patience)
        if not isinstance(found, str):  # else what hindered it may pass
            if len(known) >= KEPT:
                known.clear()
            known[gold] = found
        return found

    def answer(request: Request) -> str:
        gold, stated, question, evaluated, strict, *limits = (
            request[name]
            for name in ("gold", "stated", "question", "evaluated", "strict", "cpu", "patience")
        )
        if not strict:
            same = confined.value(lambda: float(same_to_math_verify(gold, stated)), *limits)
            return same if isinstance(same, str) else "same" if same == 1.0 else "different"
        can = readable(gold, *limits)
        if can != 1.0:
            return can if isinstance(can, str) else "unreadable gold"
        found = confined.value(lambda: judge(gold, stated, evaluated, question), *limits)
        if isinstance(found, str):
            return found
        return "same" if found == 1.0 else "different"

    return answer


def reads(gold: str) -> float:
    """1 if a gold answer can be read, else 0."""
    try:
        return float(can_be_read(gold))
    except Exception:
        return 1.0  # what math-verify raises on is too large, not unreadable


def judge(gold: str, stated: str, evaluated: bool, question: str = "") -> float:
    """1 if an answer is the gold answer, else 0."""
    seed(0)  # sympy may try random numbers, and has a seed of the system's
    try:
        same = same_answer(gold, stated, evaluated=evaluated, question=question)
        return float(same is True)
    except Exception:
        return 0.0  # what math-verify raises on, such as an expression too large, is not right


if __name__ == "__main__":
    serve(start)
