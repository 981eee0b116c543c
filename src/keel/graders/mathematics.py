"""Mathematical equality: numbers and words here, all else by math-verify in the sandbox.

math-verify's own timeouts are alarms, which fail off the main thread, and without them it can
hang for good; so they are off, and a process that takes too long is ended from outside.
"""

from __future__ import annotations

import importlib.util
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, cast

from keel.graders.expressions import NotPlainExpression, same_answer
from keel.platform.extras import install_command
from keel.platform.process import Restarting
from keel.platform.sandbox import Resident, bubblewrap
from keel.types import KeelError

Finding = Literal["same", "different", "unreadable gold", "timed out", "died"]
"""What is known of a pair. "different" is also the verdict on an answer that cannot be read."""
START_SECONDS = 120.0
"""A process that has not started by then never will; imports on a busy machine take a while."""
PATIENCE = 10.0
"""Seconds by the clock for each second of computing: a busy machine changes no verdict."""
Pair = tuple[str, str] | tuple[str, str, str]
"""A gold answer, what was stated and, if it is known, the question."""


class Mathematics:
    """Tells whether answers are mathematically the gold answers, many at a time.

    `timeout` is in seconds of computing, for a pair; `evaluated` refuses arithmetic that is left
    to do (`keel.graders.expressions`). Not `strict`, math-verify reads and compares whole texts.
    `workers` processes in the sandbox, started when first needed, fork one for each verdict. Safe
    to use from any thread. Raises KeelError if math-verify is not installed, or there is no
    sandbox.
    """

    def __init__(
        self,
        *,
        timeout: float = 5.0,
        workers: int = 2,
        evaluated: bool = True,
        strict: bool = True,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise KeelError(f"math-verify is not installed: {install_command('math')}")
        check_sandbox()
        self.timeout, self.evaluated, self.strict = timeout, evaluated, strict
        self.processes = [Restarting(started) for _ in range(workers)]
        self._free: queue.SimpleQueue[Restarting] = queue.SimpleQueue()
        for process in self.processes:
            self._free.put(process)
        self._abandoned = 0

    def compare(self, pairs: Sequence[Pair]) -> list[Finding]:
        """What is found of each pair of a gold answer and what was stated.

        The order within a pair matters: if gold is 1, x = 1 is right; if gold is the
        equation 2x + z = 1, 1 is not. Each distinct pair is compared once. Raises KeelError if
        the processes are closed, or killed from outside.
        """
        found = {pair: self._plain(pair) for pair in dict.fromkeys(pairs)}
        hard = [pair for pair, finding in found.items() if finding is None]
        call = self._abandoned
        threads = ThreadPoolExecutor(len(self.processes))
        try:
            found.update(zip(hard, threads.map(partial(self._ask, call), hard), strict=True))
        finally:
            threads.shutdown(cancel_futures=True)
        return [finding for pair in pairs if (finding := found[pair])]

    def abandon(self) -> None:
        """End the processes and the calls under way, with a KeelError; others may follow."""
        self._abandoned += 1
        for process in self.processes:
            process.abandon()

    def close(self) -> None:
        """End the processes. A call under way in another thread ends with a KeelError."""
        self.abandon()
        for process in self.processes:
            process.close()

    def _plain(self, pair: Pair) -> Finding | None:
        """What is found by comparing numbers or words; None if there is more to read."""
        if not self.strict:
            return None
        gold, stated, question = (*pair, "")[:3]
        try:
            same = same_answer(
                gold, stated, question=question, evaluated=self.evaluated, plain=True
            )
        except NotPlainExpression:
            return None
        return "unreadable gold" if same is None else "same" if same else "different"

    def _ask(self, call: int, pair: Pair) -> Finding:
        """What a process that is free finds of a pair."""
        gold, stated, question = (*pair, "")[:3]
        limits = {"cpu": self.timeout, "patience": PATIENCE * self.timeout}
        request = {"gold": gold, "stated": stated, "question": question, **limits}
        request |= {"evaluated": self.evaluated, "strict": self.strict}
        process = self._free.get()
        try:
            if call != self._abandoned:
                raise KeelError("the comparison of answers was abandoned")
            # Two processes may be forked; each has its limit.
            reply = process.ask(2 * limits["patience"] + START_SECONDS, request)
        except TimeoutError:
            raise KeelError("the process that compares answers hangs: start again") from None
        finally:
            self._free.put(process)
        if "error" in reply:
            raise KeelError(f"the process that compares answers fails: {reply['error']}")
        return cast(Finding, reply["ok"])


def started() -> Resident:
    """A process in the sandbox that compares answers. Raises KeelError if it does not start."""
    here = Path(__file__).parent
    own = [one for one in here.rglob("*.*") if one.suffix in (".py", ".toml")]
    files = {f"keel/graders/{one.relative_to(here)}": one for one in own}
    found = importlib.util.find_spec("math_verify")
    assert found is not None
    assert found.origin is not None
    process = Resident(
        "keel.graders.mathematics_worker", files, Path(found.origin).resolve().parents[1]
    )
    limits = {"cpu": 60.0, "patience": START_SECONDS}
    process.first(
        START_SECONDS,
        {"gold": "1", "stated": "1", "question": "", "evaluated": True, "strict": True, **limits},
    )
    return process


def check_sandbox() -> None:
    """Raise KeelError if there is no sandbox to parse an answer in."""
    try:
        bubblewrap()
    except KeelError as error:
        raise KeelError(f"reward math: answers are parsed in a sandbox only: {error}") from None
