"""Mathematical equality by math-verify, in worker processes that can be killed.

math-verify's own timeouts are alarms, which fail off the main thread, and without them it can
hang for good; so they are off, and a worker that takes too long is killed from outside.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Literal

from keel.types import KeelError
from keel.verify.expressions import same_answer
from keel.verify.worker import serve
from keel.verify.workers import Pool

Finding = Literal["same", "different", "unreadable gold", "timed out", "died"]
"""What is known of a pair. "different" is also said of an answer that cannot be read."""


class Mathematics:
    """Tells whether answers are mathematically the gold answers, many at a time.

    `timeout` is in seconds, for a pair; `evaluated` refuses arithmetic that is left to do
    (`keel.verify.expressions`). Raises KeelError where math-verify is not installed.
    """

    def __init__(self, *, timeout: float = 5.0, workers: int = 2, evaluated: bool = True) -> None:
        if not 0 < timeout < math.inf:
            raise KeelError(f"timeout = {timeout:g}: give some seconds, more than 0")
        if importlib.util.find_spec("math_verify") is None:
            raise KeelError("math-verify is not installed: pip install 'keel-rl[math]'")
        self.timeout = timeout
        self.evaluated = evaluated
        self._pool = Pool(__name__, workers=workers)

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Finding]:
        """What is found of each pair of a gold answer and what was said.

        The order within a pair matters: where gold is 1, x = 1 is right; where gold is the
        equation 2x + z = 1, 1 is not. Each distinct pair is compared once.
        """
        distinct = list(dict.fromkeys(pairs))
        found: dict[tuple[str, str], Finding] = {}
        items = [(*pair, self.evaluated) for pair in distinct]
        for pair, judged in zip(distinct, self._pool.map(items, self.timeout), strict=True):
            if judged.wrong is None:
                found[pair] = judged.value
            else:
                # What math-verify raises on, such as an expression too large, is not right.
                found[pair] = "different" if judged.wrong == "raised" else judged.wrong
        return [found[pair] for pair in pairs]

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def _answer(item: Any) -> Finding:
    gold, said, evaluated = item
    same = same_answer(gold, said, evaluated=evaluated)
    if same is None:
        return "unreadable gold"
    return "same" if same else "different"


if __name__ == "__main__":
    import math_verify  # noqa: F401  (before it says that it is ready)

    serve(_answer)
