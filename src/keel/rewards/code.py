"""The reward of code that passes its unit tests, run in a sandbox."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

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
from keel.platform.sandbox.bubblewrap import Limits, Sandbox
from keel.rewards.batch import log_summary
from keel.rewards.registry import RewardContext, check_column, keywords
from keel.rewards.rules import stated_texts
from keel.types import KeelError

In = TypeVar("In")
Out = TypeVar("Out")


def code(
    context: RewardContext,
    *,
    tests: str = "tests",
    entry_point: str | None = None,
    prepend: str | None = None,
    setup: str | None = None,
    isolation: Isolation = "process",
    partial: bool = False,
    timeout: float = 10.0,
    memory_mb: int = 512,
    processes: int = 8,
    output_kb: int = 64,
    workers: int = 2,
    trusted: bool = False,
) -> CodeReward:
    """The reward of code that passes its unit tests, run in a sandbox.

    `tests`, `entry_point`, `prepend` and `setup` name data columns. `tests` holds Python that
    raises if it fails, as one text or as a list (MBPP's `test_list`); HumanEval's `test`, which
    defines `check(candidate)`, needs the function's name from `entry_point`. `prepend` is put
    before the completion's code (HumanEval's `prompt`); `setup` is Python that runs before the
    tests, on their side (MBPP's `test_setup_code`), a text or a list.
    `isolation` gives the code a process of its own, or has it share that of the tests. With
    `partial` the reward is the share of a list's tests that pass. The limits are those of one
    process; `workers` completions run at a time. `trusted` runs them without a sandbox.
    Raises KeelError if there is no bubblewrap, or it can make no sandbox.
    """
    if not isinstance(workers, int) or workers < 1:
        raise KeelError(f"workers = {workers!r}: give a whole number of at least 1")
    for option, value in {"trusted": trusted, "partial": partial}.items():
        if not isinstance(value, bool):  # "false" would be true
            raise KeelError(f"{option} = {value!r}: give true or false")
    if isolation not in get_args(Isolation):
        raise KeelError(f"isolation = {isolation!r}: give 'process' or 'shared'")
    limits = Limits(timeout, memory_mb, processes, output_kb)
    columns = {"tests": tests, "entry_point": entry_point, "prepend": prepend, "setup": setup}
    named = {option: column for option, column in columns.items() if column is not None}
    for option, column in named.items():
        if not isinstance(column, str):
            raise KeelError(f"{option} = {column!r}: name a column of the data")
        check_column(option, column)
    return CodeReward(Sandbox(limits, trusted=trusted), named, isolation, partial, workers)


class CodeReward:
    """1 where the completion's code passes all its tests, else 0; None if the column is empty.

    The code is what stands in the last Python fence, or the whole text if there is none; a fence
    that defines nothing that the tests use counts only if none does. The
    cause of each failure goes into the rollouts as `code/cause`, and the share of completions that
    ended in each way into the metrics, `code/STATUS`. A call that is no longer waited for goes
    on until `abandon`, which ends it and all that it runs; the reward can be called again after.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        columns: dict[str, str],
        isolation: Isolation,
        partial: bool,
        workers: int,
    ) -> None:
        self._sandbox, self._columns, self._partial = sandbox, columns, partial
        self._isolation, self._workers = isolation, workers
        self._running: set[threading.Event] = set()
        names = dict.fromkeys(("completions", *columns.values(), "log_extra", "log_metric"))
        self.__signature__ = keywords(names, ("openings",))

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None],
        log_metric: Callable[[str, float], None],
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
                self._workers,
                stop,
            )
        finally:
            self._running.discard(stop)
        log_extra("code/cause", ["" if one is None else one.cause for one in tested])
        log_summary(log_metric, [one.status for one in tested if one is not None], _shares)
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
                ran = run_tests(self._sandbox, code, read, isolation=self._isolation)
                if ran.status == "timeout":
                    break  # further answers would take as long
                found += [answer] if ran.status == "passed" else []
            return found

        return in_threads(passed, list(enumerate(rows)), self._workers)

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
            return Checked((False,) * len(tests.texts), "error", unclosed)
        code = python_code(text, wanted_names(tests))
        if before and code != text and not before.endswith("\n"):
            before += "\n"  # a fence begins a line; a text goes on where the prompt ends
        return run_tests(self._sandbox, before + code, tests, isolation=self._isolation, stop=stop)

    def _worth(self, tested: Checked) -> float:
        return tested.share if self._partial else float(tested.status == "passed")


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

    Once `stop` is set no further item is begun, and the call ends in a KeelError. The threads are
    daemons: an abandoned call does not hold up the end of the process.
    """
    stop = stop or threading.Event()
    waiting: queue.SimpleQueue[tuple[int, In]] = queue.SimpleQueue()
    values: dict[int, Out] = {}
    errors: list[BaseException] = []
    for item in enumerate(items):
        waiting.put(item)

    def work() -> None:
        while not errors and not stop.is_set():
            try:
                at, item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                values[at] = function(item)
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="keel-code", daemon=True)
        for _ in range(min(workers, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if stop.is_set():
        raise KeelError("stopped before its end")
    return [values[at] for at in range(len(items))]
