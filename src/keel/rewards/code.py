"""The reward of code that passes its unit tests, run in a sandbox."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from keel.algorithms.terms import FrozenModel
from keel.config.fields import Count, Seconds
from keel.graders.code_blocks import python_code
from keel.graders.unit_tests import (
    Checked,
    Isolation,
    UnitTests,
    read_tests,
    run_tests,
    trivial_codes,
    wanted_names,
)
from keel.platform.sandbox import Limits, Sandbox
from keel.rewards.outputs import Summary
from keel.rewards.registry import Column, RewardContext, with_arguments
from keel.rewards.rules import stated_texts
from keel.types import KeelError

In = TypeVar("In")
Out = TypeVar("Out")
COLUMNS = ("tests", "entry_point", "prepend", "setup")
"""Options that name data columns."""


class CodeOptions(FrozenModel):
    """The options of `code`; the first four name data columns, the limits are of one process."""

    tests: Column = "tests"
    """Python that raises if it fails, as one text or as a list (MBPP's `test_list`); or HumanEval's
    `test`, which defines `check(candidate)`."""
    entry_point: Column | None = None
    """The function's name, for such a `check`."""
    prepend: Column | None = None
    """Put before the completion's code (HumanEval's `prompt`)."""
    setup: Column | None = None
    """Python that runs before the tests, on their side (MBPP's `test_setup_code`), a text or a
    list."""
    isolation: Isolation = "process"
    """Whether the code has a process of its own, or shares that of the tests."""
    partial: bool = False
    """The reward is the share of a list's tests that pass."""
    timeout: Seconds = 10.0
    memory_mb: int = 512
    processes: int = 8
    output_kb: int = 64
    workers: Count = 2
    """Completions that run at a time."""
    trusted: bool = False
    """Run without a sandbox."""


def code(context: RewardContext, options: CodeOptions) -> CodeReward:
    """The reward of code that passes its unit tests, run in a sandbox.

    Raises KeelError if there is no bubblewrap, or it can make no sandbox.
    """
    o = options
    limits = Limits(o.timeout, o.memory_mb, o.processes, o.output_kb)
    return CodeReward(Sandbox(limits, trusted=o.trusted), options)


class CodeReward:
    """1 if the completion's code passes all its tests, else 0; None if the column is empty.

    The code is what stands in the last Python fence, or the whole text if there is none; a fence
    that defines nothing that the tests use counts only if none does. The
    cause of each failure goes into the rollouts as `code/cause`, and the share of completions that
    ended in each way into the metrics, `code/STATUS`. A call that is no longer waited for goes
    on until `abandon`, which ends it and all that it runs; the reward can be called again after.
    """

    def __init__(self, sandbox: Sandbox, options: CodeOptions) -> None:
        self._sandbox, self._options = sandbox, options
        named = ((name, getattr(options, name)) for name in COLUMNS)
        self._columns = {name: column for name, column in named if column is not None}
        self._running: set[threading.Event] = set()
        names = dict.fromkeys(("completions", *self._columns.values(), "log_extra", "log_summary"))
        with_arguments(self, names, ("openings",))

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None],
        log_summary: Callable[[Sequence[Any], Summary], None],
        openings: Sequence[str] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        rows = [
            {option: columns[column][at] for option, column in self._columns.items()}
            for at in range(len(completions))
        ]
        tests = [_read(at, row) for at, row in enumerate(rows)]
        before = [row.get("prepend") or "" for row in rows]
        stated = stated_texts(completions, None, openings)
        stop = threading.Event()
        self._running.add(stop)
        try:
            tested = in_threads(
                lambda item: self._judge(*item, stop),
                list(zip(stated, before, tests, strict=True)),
                self._options.workers,
                stop,
            )
        finally:
            self._running.discard(stop)
        log_extra("code/cause", ["" if one is None else one.cause for one in tested])
        log_summary([one.status for one in tested if one is not None], _shares)
        return [None if one is None else self._worth(one) for one in tested]

    def trivial(self, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """For each example, by its columns, which of the answers `TRIVIAL` its tests pass."""

        def passed(example: tuple[int, Mapping[str, Any]]) -> list[str]:
            at, row = example
            read = _read(at, {option: row.get(name) for option, name in self._columns.items()})
            found: list[str] = []
            if read is None:
                return found
            for answer, code in trivial_codes(read).items():
                ran = run_tests(self._sandbox, code, read, isolation=self._options.isolation)
                if ran.status == "timeout":
                    break  # further answers would take as long
                found += [answer] if ran.status == "passed" else []
            return found

        return in_threads(passed, list(enumerate(rows)), self._options.workers)

    def abandon(self) -> None:
        """Stop the calls that still run: their sandboxes are killed, and no further one starts."""
        for stop in self._running.copy():
            stop.set()

    close = abandon

    def _judge(
        self, text: str | None, before: str, tests: UnitTests | None, stop: threading.Event
    ) -> Checked | None:
        if tests is None:
            return None
        if text is None:
            unclosed = "no code: the completion ends within a thought"
            return Checked((False,) * len(tests.tests), "error", unclosed)
        code = python_code(text, wanted_names(tests))
        if before and code != text and not before.endswith("\n"):
            before += "\n"  # a fence begins a line; a text goes on where the prompt ends
        return run_tests(
            self._sandbox, before + code, tests, isolation=self._options.isolation, stop=stop
        )

    def _worth(self, tested: Checked) -> float:
        return tested.share if self._options.partial else float(tested.status == "passed")


def _read(at: int, row: Mapping[str, Any]) -> UnitTests | None:
    """The tests of an example, its columns by the options that name them."""
    if row["tests"] is None:
        return None
    setup, prompt = row.get("setup") or "", row.get("prepend") or ""
    try:
        return read_tests(row["tests"], row.get("entry_point"), setup=setup, prompt=prompt)
    except KeelError as error:
        raise KeelError(f"sample {at}: {error}") from None


def _shares(statuses: Sequence[str]) -> Mapping[str, float]:
    """The share of each way in which code ended."""
    counts = Counter(statuses)
    return {f"code/{status}": n / counts.total() for status, n in sorted(counts.items())}


def in_threads(
    function: Callable[[In], Out],
    items: Sequence[In],
    workers: int,
    stop: threading.Event | None = None,
) -> list[Out]:
    """Each item's value, by some threads at a time; the first error, once all have stopped.

    Once `stop` is set no further item is begun, and the call ends in a KeelError.
    """

    failed = threading.Event()

    def work(item: In) -> Out:
        if failed.is_set() or (stop is not None and stop.is_set()):
            raise KeelError("stopped before its end")
        try:
            return function(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(workers, thread_name_prefix="keel-code") as pool:
        return list(pool.map(work, items))
