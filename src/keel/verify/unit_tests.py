"""Code judged by unit tests in a sandbox.

The verdict rests on secrets, one for each test, that are told only once the test has passed: no
printed word, exit status or early end stands for a pass. The tests run in the interpreter that ran
the code, since they call it; so code written to attack this very harness, which searches the
interpreter's frames for the secrets, or whose objects say that they equal everything, can still
pass. It cannot leave the sandbox.
"""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from keel.types import KeelError
from keel.verify.sandbox import Ran, Sandbox

Status = Literal[
    "passed", "failed", "error", "exited", "timeout", "memory", "processes", "output", "died"
]
"""What became of a piece of code, all its tests together.

A test failed; the code raised before its tests; it ended before they did; it ran out of time, of
memory, of processes, of the output it may print; a signal ended it.
"""
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_CAUSES: dict[str, Status] = {"MemoryError": "memory", "BlockingIOError": "processes"}


@dataclass(frozen=True, slots=True)
class Checked:
    """Which tests passed, what became of all, and the cause in a line (empty where all passed)."""

    passed: tuple[bool, ...]
    status: Status
    cause: str

    @property
    def share(self) -> float:
        """The share of the tests that passed."""
        return sum(self.passed) / len(self.passed)


def python_code(text: str) -> str:
    """The code of the last fence ```` ```python ```` (or `py`, or without a name), or all the text.

    A fence that is not closed runs to the end. The blanks at the beginnings of lines stay.
    """
    fences = [
        f[2] for f in _FENCE.finditer(text) if f[1].lower() in ("", "py", "python", "python3")
    ]
    return fences[-1] if fences else text


def read_tests(tests: str | Sequence[str], entry_point: str | None) -> tuple[tuple[str, ...], bool]:
    """The tests, and whether each defines `check(candidate)` and wants it called.

    Raises KeelError for what are no tests: not Python, empty, or `check` with nothing to check.
    """
    each = (tests,) if isinstance(tests, str) else tuple(tests)
    check = False
    for test in each:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise KeelError(f"the test {test[:60]!r} is not Python: {error}") from None
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        check |= "check" in defined
        if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(tree)):
            raise KeelError(f"the test {test[:60]!r} tests nothing")
    if not each:
        raise KeelError("an empty list of tests, which all code passes")
    if check and entry_point is None:
        raise KeelError(
            "the test defines check(candidate): name the function's column, entry_point"
        )
    return each, check


def run_tests(
    sandbox: Sandbox, code: str, tests: str | Sequence[str], entry_point: str | None = None
) -> Checked:
    """Run code, then its tests on what it defined; a test is Python that raises where it fails.

    A test that defines `check(candidate)`, as HumanEval's do, has it called with the function
    `entry_point`. Raises KeelError for what are no tests.
    """
    each, check = read_tests(tests, entry_point)
    told = [secrets.token_hex(16) for _ in each]
    ran = sandbox.carry_out(
        {"code": code, "tests": each, "check": check, "entry_point": entry_point, "secrets": told}
    )
    lines = set(ran.reported)
    passed = tuple(secret in lines for secret in told)
    if all(passed) and ran.status == "ended":
        return Checked(passed, "passed", "")
    status, cause = _cause(ran, [line for line in ran.reported if line not in told])
    # What counts is that the whole ended well: with too much output, say, no test counts.
    return Checked(
        passed if ran.status in ("ended", "timeout") else (False,) * len(each), status, cause
    )


def _cause(ran: Ran, lines: Sequence[str]) -> tuple[Status, str]:
    """What went wrong, by how the run ended and then by the first thing reported."""
    if ran.status != "ended":
        return ran.status, ran.cause
    if not lines:
        return "exited", f"ended before its tests did ({ran.cause})"
    where, _, said = lines[0].partition(" ")
    if where == "test":
        number, _, said = said.partition(": ")
        where = f"test {number}"
    name = said.partition(":")[0]
    status: Status = "failed" if where != "code" else "error"
    if name in _CAUSES:
        status = _CAUSES[name]
    elif "can't start new thread" in said:
        status = "processes"
    return status, f"{where}: {said}"[:300]
