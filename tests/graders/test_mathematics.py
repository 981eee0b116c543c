from __future__ import annotations

import builtins
import gc
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from keel.graders import mathematics_worker
from keel.graders.mathematics import Finding, Mathematics
from keel.types import KeelError
from tests.platform.processes import run_python
from tests.shared import needs_bubblewrap, shared_path

pytest.importorskip("math_verify")
pytestmark = needs_bubblewrap
LONG = 300.0


@pytest.fixture(scope="module")
def mathematics() -> Iterator[Mathematics]:
    made = Mathematics(timeout=LONG)
    yield made
    made.close()


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    text = shared_path("data/math/math500.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_answers_and_their_gold_answers(mathematics: Mathematics) -> None:
    """`mathematics.jsonl`: what is the same, and what is not, with the question if it matters."""
    text = (Path(__file__).parent / "mathematics.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    found = mathematics.compare([(r["gold"], r["text"], r.get("question", "")) for r in rows])
    assert [r for r, one in zip(rows, found, strict=True) if (one == "same") != r["same"]] == []
    assert set(found) == {"same", "different"}


@pytest.mark.parametrize("gold", ["", "  ", ")(", r"\frac{1}{"])
def test_gold_that_cannot_be_read(mathematics: Mathematics, gold: str) -> None:
    assert mathematics.compare([(gold, "1"), ("1", "1")]) == ["unreadable gold", "same"]


@pytest.mark.slow
def test_every_answer_of_math500_is_itself(
    mathematics: Mathematics, problems: list[dict[str, Any]]
) -> None:
    gold = [problem["answer"] for problem in problems]
    assert len(gold) == 500
    for message in (
        [f"\\boxed{{{answer}}}" for answer in gold],
        gold,
        [f"Therefore the answer is ${answer}$." for answer in gold],
        [problem["solution"] for problem in problems],
    ):
        assert set(mathematics.compare(list(zip(gold, message, strict=True)))) == {"same"}


@pytest.mark.slow
def test_and_no_other_problems(mathematics: Mathematics, problems: list[dict[str, Any]]) -> None:
    gold = [problem["answer"] for problem in problems]
    other = [*gold[1:], gold[0]]
    found = mathematics.compare([(a, f"\\boxed{{{b}}}") for a, b in zip(gold, other, strict=True)])
    same = [(a, b) for a, b, one in zip(gold, other, found, strict=True) if one == "same"]
    # Neighbours in the file whose answers are equal; of the rest not one passes.
    assert same == [("5", "x=5"), ("7", "7"), ("3", "3")]


@pytest.mark.parametrize(
    ("option", "pairs", "found"),
    [
        (
            "evaluated",
            [("408", r"\boxed{17 \times 24}"), ("408", r"\boxed{17 \times 23}"), ("2", "4/2")],
            ["same", "different", "same"],
        ),
        (
            "strict",
            [("0.08", r"\boxed{8\%}"), ("408", r"\boxed{17 \times 24}"), ("x+1", "so it is $x$")],
            ["same", "same", "different"],
        ),
    ],
)
def test_more_counts_only_if_asked(option: str, pairs: list[Any], found: list[str]) -> None:
    """Arithmetic that is left to do, and what math-verify alone takes for the same."""
    with closing(Mathematics(timeout=LONG, **{option: False})) as lenient:
        assert lenient.compare(pairs) == found


@pytest.mark.slow
def test_expressions_that_hang_are_given_up_and_the_next_is_still_judged() -> None:
    """From a thread that is not the main one, where alarms fail."""
    towers = [r"$x^{10^{10^{10}}}$", r"$x + 9^{9^{9^{9}}}$", r"$x + ((((3!)!)!)!)!$"]
    found: list[Finding] = []

    def work() -> None:
        mathematics = Mathematics(timeout=3.0)
        pairs = [("x", tower) for tower in towers]
        found.extend(mathematics.compare([*pairs, ("1", "1"), (towers[1], "x"), ("2y", "$y + y$")]))
        mathematics.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [found[3], found[5]] == ["same", "same"]
    assert {found[1], found[4]} <= {"timed out", "died"}  # of time or memory, what ends first
    # Some towers are seen through, or are too large for the limit on memory.
    assert set(found[:3]) <= {"timed out", "different", "died"}


def test_without_the_library_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KeelError, match=r"pip install -e .*\[math\]'"):
        Mathematics()


@pytest.mark.slow
def test_this_process_does_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = builtins.__import__

    def watch(name: str, *rest: Any, **more: Any) -> Any:
        assert not name.startswith(("sympy", "math_verify"))
        return loaded(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", watch)
    mathematics = Mathematics()
    assert mathematics.compare([("2x", "$x + x$")]) == ["same"]
    mathematics.close()


def test_a_gold_answer_whose_process_was_killed_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Once:
        """Computes here; the first process is killed."""

        def __init__(self, program: bytes) -> None:
            self.asked = 0

        def value(self, compute: Callable[[], float], cpu: float, patience: float) -> float | str:
            self.asked += 1
            return "died" if self.asked == 1 else compute()

    monkeypatch.setattr(mathematics_worker, "Confined", Once)
    answer = mathematics_worker.start(b"")
    gc.unfreeze()
    request = {"gold": "2x", "stated": "$2 x$", "question": "", "evaluated": True}
    request |= {"strict": True, "cpu": 1.0, "patience": 1.0}
    assert [answer(request) for _ in range(3)] == ["died", "same", "same"]


@pytest.mark.slow
def test_abandoned_it_ends_at_once_and_can_be_asked_again() -> None:
    mathematics_ = Mathematics(timeout=600.0)
    mathematics_.compare([("y", "$z$"), ("y", "$2z$")])
    message: list[str] = []

    def work() -> None:
        try:
            mathematics_.compare([("x", rf"$x + {n}^{{9^{{9^{{9}}}}}}$") for n in range(2, 9)])
        except KeelError as error:
            message.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.5)  # most likely it computes by then; earlier it ends as well
    mathematics_.abandon()
    thread.join(60)
    assert len(message) == 1
    assert "abandoned" in message[0]
    assert mathematics_.compare([("2x", "$x + x$")]) == ["same"]
    mathematics_.close()


@pytest.mark.slow
def test_a_fork_of_this_process_ends_nothing() -> None:
    mathematics_ = Mathematics(workers=1)
    assert mathematics_.compare([("2x", "$x + x$")]) == ["same"]
    (process,) = mathematics_.processes
    before = process.child
    child = os.fork()
    if child == 0:
        process.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert mathematics_.compare([("3x", "$x + 2x$")]) == ["same"]
    assert process.child is before
    mathematics_.close()


@pytest.mark.slow
def test_limits_of_the_shell_are_kept() -> None:
    """As `ulimit -t` and `ulimit -v` set them: lower than its own, and not to be raised."""
    program = (
        "import resource; "
        "resource.setrlimit(resource.RLIMIT_CPU, (100, 100)); "
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
        "from keel.graders.mathematics import Mathematics; "
        "print(Mathematics(workers=1).compare([('2x', '$x + x$')]))"
    )
    assert run_python(program).stdout == "['same']\n"
