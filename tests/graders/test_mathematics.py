from __future__ import annotations

import builtins
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keel.graders import mathematics_worker
from keel.graders.mathematics import Finding, Mathematics
from keel.types import KeelError
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


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"so it is $\frac{2}{4}$."),
        (r"\frac{1}{2}", r"\frac12"),
        (r"$\frac{1}{2}$", r"x = \frac{1}{2}"),
        (r"\frac{1}{2}", "work: 3\n#### 1/2\nDone in 7 steps."),
        (r"we see that \boxed{\frac{1}{2}}", r"\(0.5\)"),
        ("a + b\n#### 1,234", "1234"),
        ("18", "she pays $18"),
        ("$18", r"\boxed{18}"),
        (r"\$18", r"\$18"),
        ("(x+1)^2", r"$x^2 + 2x + 1$"),
        ("p - q", "p - q"),
        (r"\sqrt{8}", r"$2\sqrt{2}$"),
        (r"\{1, 2\}", r"$\{2, 1\}$"),
        ("(3, 4]", r"\boxed{(3,4]}"),
        ("1", "$x = 1$"),
        ("3", "Answer: 3"),
        ("3", "**Answer:** 3."),
        ("3", "the final answer is: 3"),
        ("3", "The answer is: it must be 3"),
        (r"\frac{1}{2}", r"Answer: \frac12"),
        ("42", "Result:42"),
        ("42", "#### Answer: 42"),
        ("2:3", "2:3"),
        ("3", "**3**"),
        ("3", "_3_"),
        ("12", "12."),
        ("12.", "**12.**"),
        ("12", "**12**."),
        (".5", ".5"),
        ("(1, 2)", "(1, 2)."),
        ("42", "#### 42."),
        ("42", "#### **42**"),
        ("42", "#### **42.**\nThat took 3 steps."),
        ("a b", "#### ab\nThat is the product."),
        ("#### **42**", "42"),
        ("42", "#### Conclusion\nThe answer is 42"),
        ("42", "#### **Answer:**\n42"),
        ("7", "\\boxed{7}\n#### Final check\nIt holds."),
        ("p - q", "5\n#### p - q\n"),
        ("18", "#### Step 1: 1 egg\n3\n#### Step 2: sum\n$18$"),
        ("8", r"\boxed{8\%}"),
        (r"8\%", "8"),
        ("8", "8 m/s"),
        ("1000", "1e3"),
        ("18", "１８"),
        ("x=5", "5"),
        (r"x \in [-2,7]", r"-2 \le x \le 7"),
        ("(5,\\infty)", "x > 5"),
        ("x<3", "3 > x"),
        ("y = 2x+3", "2x+3"),
        ("5x - 7y + 4 = 0", "10x-14y+8=0"),
        (r"\begin{pmatrix}1/5 \\ -18/5\end{pmatrix}", r"\begin{bmatrix}0.2\\-3.6\end{bmatrix}"),
        (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
        ("1,-2", r"The solutions are $x=1$ and $x=-2$."),
        (r"11\sqrt2", r"\sqrt{242}"),
        (r"3\sqrt{13}", "3√13"),
        (r"\text{Evelyn}", "It is Evelyn."),
        (r"\text{(C)}", r"\boxed{C}"),
        ("C", r"\boxed{(C)}"),
        ("52_8", "52_{8}"),
        ("2^{100}", "2^{100}"),
        ("\\text{June 20}", "\\boxed{\\text{June 20}}"),
        ("2^{2^{5}}", "\\boxed{2^{2^{5}}}"),
        ("0.\\overline{3}", "\\boxed{\\frac{1}{3}}"),
        ("0.\\overline{3}", "\\boxed{0.\\overline{3}}"),
        ("9:00", "9:00"),
        ("9:00", "\\boxed{9:00}"),
        ("2:3", "\\boxed{4:6}"),
        ("2:5", "\\boxed{4:10}"),
        ("5 m/s", r"\boxed{5\,\mathrm{m/s}}"),
        ("5 m/s", "5"),
        ("10:30", "10:30"),
        ("No", "The answer is no."),
        ("B", "Answer: B) 12"),
        ("B", "The correct option is B."),
        ("5", "\\boxed{a+b=5}"),
        ("5", "\\boxed{f(2)=5}"),
        ("\\emptyset", "\\boxed{\\varnothing}"),
        ("2^{100}", r"\boxed{2^{100}}"),
        ("10^{12}", r"\boxed{10^{12}}"),
        (r"\frac{6}{3}", r"\boxed{\frac{6}{3}}"),
        ("10!", "3628800"),
        (r"\frac{639}{40}", r"\boxed{15\frac{39}{40}}, or $\boxed{\frac{639}{40}}$"),
    ],
)
def test_the_same(mathematics: Mathematics, gold: str, message: str) -> None:
    assert mathematics.compare([(gold, message)]) == ["same"]


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        (r"\frac{1}{2}", r"\boxed{2}"),
        (r"\frac{1}{2}", r"\boxed{3} or \boxed{1/2}"),
        (r"\frac{1}{2}", r"\boxed{1/2} or \boxed{3}"),
        (r"\frac{1}{2}", "#### 3\n"),
        (r"\frac{1}{2}", "I do not know."),
        ("3", "Answer: 4"),
        ("42", "42!"),
        ("42", "#### Conclusion\nThe answer is 41"),
        ("42", "#### 41\nNo, it is 42."),
        ("east", "#### west\n"),
        ("2:3", "3:2"),
        (r"\frac{1}{2}", ""),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{"),
        ("2x + z = 1", "1"),
        (r"\{1, 2\}", r"$\{1, 2, 3\}$"),
        ("(3, 4]", r"\boxed{(3,4)}"),
        ("(x+1)^2", r"$x^2 + 1$"),
        ("1", "#### Step 1: 1 egg\n3\n#### Step 2: sum\n$18$"),
        ("0.08", r"\boxed{8\%}"),
        ("3", "#### 4 or 3"),
        ("4", "#### 4 or 3"),
        ("408", r"\boxed{17 \times 24}"),
        ("408", r"\boxed{816/2}"),
        (r"18+2\pi", r"9 \cdot 2 + 2\pi"),
        ("x<3", "x>3"),
        ("x=5", "5=5"),
        ("x=5", "y=5"),
        ("3", "0x3"),
        ("3R^2", "3r^2"),
        ("4s", "4"),
        ("2k", "2"),
        (r"\pi", "3.141593"),
        (".0000672", ".0000671"),
        ("(1,2)", r"\{1,2\}"),
        ("10:30", "\\boxed{1:3}"),
        ("5 m/s", r"\boxed{5\,\mathrm{m/s^2}}"),
        ("5", "\\boxed{5} (or 6)"),
        ("A", "The correct option is B."),
        ("5", "\\boxed{2+3=6}"),
        (r"\text{June 20}", r"\boxed{\text{June 21}}"),
        (r"0.\overline{3}", r"\boxed{0.3}"),
        ("10", r"\boxed{2x=10}"),
        ("52_8", "42"),
        ("52_8", "52_9"),
        ("1,-2", "1, -2, 3"),
        ("1", "1, -2"),
        ("east", "seat"),
        ("3", r"The answer is \text{east}, 3."),
        (r"\pi", r"The answer is \pi, \text{east}."),
        ("6", r"6 or \text{Evelyn}"),
        ("5", "The answer is p - q, 5."),
        ("x=5", r"The answer is \frac{7}{4}, x=5."),
        (r"\text{(C)}", "(B) or (C)"),
        ("y=x+1", "0=0"),
        (r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix} 1&2\\0&1\end{pmatrix}"),
        (r"15\mbox{ cm}^2", "15 cm^3"),
        (r"\cot x", "Simplify\n\\[\\frac{\\cos x}{\\sin x}.\\]\nAnswer:"),
    ],
)
def test_different(mathematics: Mathematics, gold: str, message: str) -> None:
    assert mathematics.compare([(gold, message)]) == ["different"]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("u=1, v=-2", r"v=-2,\ u=1", "v=1, u=-2"),
        ("u=1, v=-2", "1, -2", "-2, 1"),
        (
            "u=1, v=-2",
            r"\left\{\begin{array}{l} u = 1 \\ v = -2 \end{array}\right.",
            r"\begin{cases} u = 1 \\ v = 2 \end{cases}",
        ),
        (
            "x=3, y=4",
            r"\begin{aligned} y &= 4 \\ x &= 3 \end{aligned}",
            r"\begin{cases} x = 4 \\ y = 3 \end{cases}",
        ),
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]",
            r"\left[\begin{array}{cc} 1 & 3 \\ 2 & 4 \end{array}\right]",
        ),
        (r"(-\infty, 0)", r"\{t : t < 0\}", r"\{t : t \le 0\}"),
        ("[2, 5)", r"\{ x \in \mathbb{R} \mid 2 \le x < 5 \}", r"\{x \mid 2 < x < 5\}"),
        (r"\mathbb{R}", r"(-\infty, +\infty)", r"(0, \infty)"),
        (r"(-\infty,\infty)", r"x \in \mathbb{R}", r"\mathbb{R}^+"),
        (r"(-\infty,\infty)", r"\text{all real numbers}", r"\text{all positive numbers}"),
        ("x^2+1", r"x^2 + 1 \text{ for all real } x", r"x^2 - 1 \text{ for all real } x"),
        (r"\frac{4}{3}", r"1.\dot{3}", "1.3"),
        (r"\frac{5}{11}", r"0.\dot{4}\dot{5}", r"0.4\dot{5}"),
        (r"\frac{1}{\sqrt{k}}", r"1/\sqrt k", r"\sqrt k"),
        ("3:2", "3 : 2", "2:3"),
        ("1 hour 20 minutes", r"1 \text{ hour and } 20 \text{ minutes}", "1 hour 30 minutes"),
        (r"\frac{11}{7^{25}}", r"\frac{11}{7^{25}}", r"\frac{12}{7^{25}}"),
        (r"\frac{11x}{7^{25}}", r"\frac{11}{7^{25}} x", r"\frac{12x}{7^{25}}"),
        (r"\frac{1}{10^{20}}", "10^{-20}", "10^{-21}"),
        ("D) 14", "(D)", "C) 14"),
    ],
)
def test_answers_as_models_write_them(
    mathematics: Mathematics, gold: str, right: str, wrong: str
) -> None:
    pairs = [(gold, rf"$\boxed{{{one}}}$") for one in (right, wrong)]
    assert mathematics.compare(pairs) == ["same", "different"]


@pytest.mark.parametrize(
    ("gold", "left"),
    [
        (r"\frac{\pi}{8}", r"\int_{0}^{2} \frac{1}{4+x^2} dx"),
        (r"\frac{\pi}{8}", r"\frac{1}{2}\arctan(1)"),
        (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^{n} k"),
        (r"\pi", r"\lim_{x\to 0} \frac{\sin(\pi x)}{x}"),
        (r"11\sqrt2", r"\sqrt{242}"),
        (r"3\sqrt2", r"5\sqrt{2}-2\sqrt{2}"),
        (r"\sqrt6", r"\sqrt2 \cdot \sqrt3"),
        ("4y^2-12y+9", "(3-2y)^2"),
        ("a^2-9", "(a+3)(a-3)"),
        ("5x", "2x+3x"),
        ("8x", "2^3 x"),
        (r"\frac{7\pi}{12}", r"\frac{3\pi+4\pi}{12}"),
        ("x+1", r"\frac{(x-1)(x+1)}{x-1}"),
    ],
)
def test_an_operation_left_to_do_is_refused(mathematics: Mathematics, gold: str, left: str) -> None:
    pairs = [(gold, rf"\boxed{{{one}}}", "Simplify.") for one in (left, gold)]
    assert mathematics.compare(pairs) == ["different", "same"]


@pytest.mark.parametrize(
    ("question", "gold", "own"),
    [
        ("Expand $(2y-3)^2$.", "4y^2-12y+9", "(2y-3)^2"),
        ("Expand (2y-3)^2.", "4y^2-12y+9", r"\left(2y - 3\right)^{2}"),
        ("Expand $2(x+1)$.", "2x+2", r"(1+x) \cdot 2"),
        ("Factor $a^2-9$ completely.", "(a-3)(a+3)", "-9+a^2"),
        ("Factor $x^4-1$ completely.", "(x-1)(x+1)(x^2+1)", "(x^2-1)(x^2+1)"),
        (r"Rationalise $\frac{1}{\sqrt{3}-1}$.", r"\frac{\sqrt{3}+1}{2}", r"\frac{1}{\sqrt{3}-1}"),
        (r"Simplify \(\frac{x^2-1}{x-1}\).", "x+1", r"\frac{x^2-1}{x-1}"),
        (r"Write $\cos^2 t - \sin^2 t$ as one function.", r"\cos(2t)", r"\cos^2 t - \sin^2 t"),
        (r"Solve $3x + 2y = 12$ for $y$.", r"y = 6 - \frac{3}{2}x", "3x+2y=12"),
        (r"Write $-2 \le x \le 7$ as an interval.", "[-2, 7]", r"-2 \le x \le 7"),
    ],
)
def test_the_questions_own_expression_is_no_answer(
    mathematics: Mathematics, question: str, gold: str, own: str
) -> None:
    pairs = [(gold, rf"\boxed{{{one}}}", question) for one in (own, gold)]
    assert mathematics.compare(pairs) == ["different", "same"]


@pytest.mark.parametrize(
    ("question", "gold", "message"),
    [
        ("What is the derivative of $e^x$?", "e^x", r"\boxed{e^x}"),
        ("Expand $(2y-3)^2$.", "4y^2-12y+9", "$(2y-3)^2 = 4y^2 - 12y + 9$"),
        (r"Compute $\sum_{k=1}^{n} k$.", r"\frac{n(n+1)}{2}", r"\boxed{\frac{n^2+n}{2}}"),
        (r"Differentiate $x^3 e^x$.", "x^2 e^x (x+3)", r"\boxed{3x^2 e^x + x^3 e^x}"),
        ("Which has the roots 1 and 2?", "(x-1)(x-2)", r"\boxed{x^2-3x+2}"),
        ("", r"\frac{\sqrt2}{2}", r"\boxed{\frac{1}{\sqrt2}}"),
        ("", r"\frac{3\pi}{2}", r"\boxed{\frac{6\pi}{4}}"),
        ("", "x^2+x", r"\boxed{x(x+1)}"),
        ("", r"2 \cdot 3^n", r"\boxed{3^n \cdot 2}"),
    ],
)
def test_other_ways_to_write_an_answer_stay(
    mathematics: Mathematics, question: str, gold: str, message: str
) -> None:
    assert mathematics.compare([(gold, message, question)]) == ["same"]


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


def test_arithmetic_left_to_do_counts_only_if_asked() -> None:
    lenient = Mathematics(timeout=LONG, evaluated=False)
    pairs = [("408", r"\boxed{17 \times 24}"), ("408", r"\boxed{17 \times 23}"), ("2", "4/2")]
    assert lenient.compare(pairs) == ["same", "different", "same"]
    lenient.close()


def test_math_verify_alone_decides_only_if_asked() -> None:
    published = Mathematics(timeout=LONG, strict=False)
    pairs = [("0.08", r"\boxed{8\%}"), ("408", r"\boxed{17 \times 24}"), ("x+1", "so it is $x$")]
    assert published.compare(pairs) == ["same", "same", "different"]
    published.close()


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
    with pytest.raises(KeelError, match=r"pip install 'keel-rl\[math\]'"):
        Mathematics()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_is_some_time(timeout: float) -> None:
    with pytest.raises(KeelError, match=f"timeout = {timeout:g}: give some seconds"):
        Mathematics(timeout=timeout)


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
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "['same']\n", ran.stderr
