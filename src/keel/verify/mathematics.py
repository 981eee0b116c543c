"""Mathematical equality by math-verify, in worker processes that can be killed.

math-verify's own timeouts are alarms, which fail off the main thread, and without them it can
hang for good; so they are off, and a worker that takes too long is killed from outside.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from keel.types import KeelError
from keel.verify.numbers import marked_answer
from keel.verify.worker import serve
from keel.verify.workers import Pool

Finding = Literal["same", "different", "unreadable gold", "timed out", "died"]
"""What is known of a pair. "different" is also said of an answer that cannot be read."""


_MARKED = re.compile(r"\\boxed|(?<!\\)\$|\\\(|\\\[")
_PROSE = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{2,}[\s:]")
# `Answer:`, `**So:**`; two letters at least, since a:b is a ratio.
_LABEL = re.compile(r"[*_]*[A-Za-z][A-Za-z ]*[A-Za-z][*_]*:[*_]*\s*")
_HEADING = re.compile(
    r"[*_]*[A-Za-z][A-Za-z ]*:[*_]*"
    r"|(?i:[*_]*[A-Za-z ]*\b(?:answer|solution|result|conclusion|final|step|summary)\b"
    r"[A-Za-z ]*[*_]*)"
)
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,3})(.+)\1")


class Mathematics:
    """Tells whether answers are mathematically the gold answers, many at a time.

    `timeout` is in seconds, for a pair. Raises KeelError where math-verify is not installed.
    """

    def __init__(self, *, timeout: float = 5.0, workers: int = 2) -> None:
        if not 0 < timeout < math.inf:
            raise KeelError(f"timeout = {timeout:g}: give some seconds, more than 0")
        if importlib.util.find_spec("math_verify") is None:
            raise KeelError("math-verify is not installed: pip install 'keel-rl[math]'")
        self.timeout = timeout
        self._pool = Pool(__name__, workers=workers)

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Finding]:
        """What is found of each pair of a gold answer and what was said.

        The order within a pair matters: where gold is 1, x = 1 is right; where gold is the
        equation 2x + z = 1, 1 is not. Each distinct pair is compared once.
        """
        distinct = list(dict.fromkeys(pairs))
        found: dict[tuple[str, str], Finding] = {}
        for pair, judged in zip(distinct, self._pool.map(distinct, self.timeout), strict=True):
            if judged.wrong is None:
                found[pair] = judged.value
            else:
                # What math-verify raises on, such as an expression too large, is not right.
                found[pair] = "different" if judged.wrong == "raised" else judged.wrong
        return [found[pair] for pair in pairs]

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def same_mathematics(gold: str, said: str) -> bool | None:
    """Whether an answer is mathematically the gold answer; None where gold cannot be read.

    Gold is an answer, or a solution that marks one by `#### …` or `\\boxed{…}`; what was said is a
    text that ends on its answer. Several boxes are a set, so that to name two answers is wrong.
    May hang: call it through `Mathematics`.
    """
    from math_verify import parse, verify

    marked = marked_answer(gold)
    wanted = parse(boxed(gold if marked is None else marked), parsing_timeout=0)
    if all(isinstance(one, str) for one in wanted):
        return None
    given = parse(_final(said), parsing_timeout=0)
    return bool(verify(wanted, given, timeout_seconds=0))


def boxed(answer: str) -> str:
    """A text that is an answer and nothing else, marked as such, less emphasis and a full stop."""
    if _MARKED.search(answer):
        return answer
    bare = answer.strip().removesuffix(".")
    emphasised = _EMPHASIS.fullmatch(bare)
    return f"\\boxed{{{(emphasised[2] if emphasised else bare).strip().removesuffix('.')}}}"


def _final(said: str) -> str:
    """A text as math-verify reads it: it knows boxes and dollars, but not `####` or bare LaTeX."""
    hashes, box = said.rfind("####"), said.rfind("\\boxed")
    if hashes > box:
        line, _, below = said[hashes + 4 :].strip().partition("\n")
        if not _HEADING.fullmatch(line.strip()) or (box < 0 and not below.strip()):
            said = line
        elif box < 0:
            said = below
    if "\n" in said.strip() or _MARKED.search(said):
        return said
    label = _LABEL.match(said.strip())
    bare = said.strip()[label.end() :] if label else said
    return said if _PROSE.search(bare) else boxed(bare)


def _answer(item: Any) -> Finding:
    gold, said = item
    same = same_mathematics(gold, said)
    if same is None:
        return "unreadable gold"
    return "same" if same else "different"


if __name__ == "__main__":
    import math_verify  # noqa: F401  (before it says that it is ready)

    serve(_answer)
