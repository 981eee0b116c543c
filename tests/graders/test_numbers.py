from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.graders.answers import final_answer, only_repeats, stated_number
from keel.graders.choices import chosen
from keel.graders.expressions import same_answer
from keel.graders.numbers import read_number, same_number
from tests.shared import shared_path

READINGS: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "readings.jsonl").read_text("utf-8").splitlines()
]


def number(text: str, *, evaluated: bool = True) -> Fraction | None:
    found = read_number(text, evaluated=evaluated)
    return None if found is None else found.value


def ends_on(text: str) -> Fraction | None:
    found = stated_number(text)
    return None if found is None else found.value


def test_what_is_left_to_do_is_read_of_gold_answers_alone() -> None:
    assert number("2^{10}", evaluated=False) == 1024
    assert number("816/2", evaluated=False) == 408
    assert number(r"17 \times 24", evaluated=False) is None


@pytest.mark.parametrize("row", READINGS, ids=lambda row: row["text"])
def test_what_a_text_states(row: dict[str, Any]) -> None:
    """`value` is what it states, null nothing, `other` what it does not state (readings.jsonl)."""
    text = row["text"]
    given = chosen(text) if row["read"] == "choice" else number(text)
    if row["read"] == "text":
        given = ends_on(text)
    if "value" in row:
        value = row["value"]
        assert (given if given is None else str(given)) == value
        assert row["read"] == "number" or value is None or same_answer(value, text) is True
    if "other" in row:
        assert str(given) != row["other"]
        assert same_answer(row["other"], text) is False


@pytest.mark.parametrize(
    ("gold", "message", "fits"),
    [
        ("x = 5", "5", True),
        ("5", "x = 5", True),
        ("x = 5", "y = 5", False),
        (r"15\mbox{ cm}^2", "15", True),
        (r"15\mbox{ cm}^2", "15 square centimeters", True),
        (r"15\mbox{ cm}^2", "15 cm^3", False),
        (r"\$36", r"36^\circ", False),
        (r"\$36", "36 dollars", True),
    ],
)
def test_a_name_or_unit_may_be_left_out_but_not_be_another(
    gold: str, message: str, fits: bool
) -> None:
    wanted, given = read_number(gold), read_number(message)
    assert wanted is not None
    assert given is not None
    assert wanted.value == given.value
    assert given.fits(wanted) is fits


def test_a_text_that_only_repeats_the_question() -> None:
    question = "There are 3 boxes. Each box holds\n12 eggs. How many eggs are there?"
    assert only_repeats("There are 3 boxes. Each box holds 12 eggs.", question)
    assert only_repeats(" each box holds 12 eggs", question)
    assert only_repeats("There are 3 boxes.", question)
    assert not only_repeats("Each box holds 12 eggs. So there are 36 eggs.", question)
    assert not only_repeats("There are 36 boxes. Each box holds 12 eggs.", question)
    assert not only_repeats("12 eggs", question)  # too short to tell
    assert not only_repeats("", question)


def test_a_marked_answer_comes_before_what_follows_it_and_counts_as_a_whole() -> None:
    assert ends_on("2 + 2\n#### 4\nThat took 3 steps.") == 4
    assert ends_on(r"first \boxed{5}, no: \boxed{\frac{1}{2}} (see page 9)") == Fraction(1, 2)
    assert ends_on("#### 1\nthen \\boxed{2}") == 2
    assert ends_on("\\boxed{2}\n#### 1") == 1
    assert ends_on(r"2 + 1/2 = \boxed{2\frac{1}{2}}") == Fraction(5, 2)
    assert ends_on(r"\boxed{none} 5") is None
    assert ends_on(r"so 5 \boxed{1") is None
    assert ends_on(r"\boxed{3} or \boxed{4}") is None
    assert ends_on(r"\boxed{4} or 3") is None
    assert ends_on("#### 3\n#### 4") is None
    assert ends_on(r"\boxed{4} and again \boxed{4}") == 4
    marked = final_answer(r"\boxed{\text{a {b} c}}")
    assert marked is not None
    assert marked.text == r"\text{a {b} c}"


def test_a_heading_is_no_answer() -> None:
    steps = "#### Step 1: {} eggs\n16 - 3 = 13\n#### 2. Sum\nShe makes 9 * 2 = $18 every day."
    assert ends_on(steps.format(1)) == 18
    assert ends_on("#### Step 1: 18\n") is None
    assert ends_on("#### 3 Steps to Solve\nThe answer is 42.") == 42
    assert ends_on("#### Conclusion\nThe answer is 42.") == 42
    assert ends_on("#### 42\n#### Check\nin 3 steps") == 42
    assert ends_on("\\boxed{7}\n#### Check\nin 3 steps") == 7
    assert ends_on("#### 7\n\\boxed{none}\n#### Check\nin 3 steps") is None
    assert ends_on("#### none") is None
    assert ends_on("#### 18 dollars\nThat is it.") == 18


def test_equality_has_a_tolerance_only_if_asked() -> None:
    a, b = Fraction("0.333"), Fraction(1, 3)
    assert not same_number(a, b)
    assert same_number(a, b, 1e-3)
    assert not same_number(a, b, 1e-4)
    assert same_number(Fraction(1_000_001), Fraction(1_000_000), 1e-5)
    assert not same_number(Fraction(1_000_001), Fraction(1_000_000), 1e-7)


@given(st.integers(-(10**15), 10**15))
def test_integers_survive_separators(n: int) -> None:
    assert number(f"{n:,}") == n
    assert ends_on(f"3 and 4\n#### {n:,}") == n


@given(st.fractions())
def test_fractions_are_exact(value: Fraction) -> None:
    assert number(f"{value.numerator}/{value.denominator}") == value


@pytest.mark.parametrize(
    "text",
    [
        *("9" * 1_000_000, "1e999999999", "1," * 50_000, "-" * 100_000, "1 1/2 " * 50_000),
        *("\\boxed{" * 20_000, "\\boxed{" * 20_000 + "}" * 20_000, "\\boxed{}" * 20_000),
        *("#### x\n" * 50_000, "#### Step 1\n" * 30_000, "answer: ?" * 30_000, "$" * 100_000),
        *("the answer is " * 20_000, "1 " * 100_000, "**" * 50_000, "= " * 50_000, "9**9**9"),
        *("\\boxed{1} or " * 10_000, "\\[" * 50_000, "(" * 100_000, "²" * 100_000, ". " * 50_000),
        *(r"\boxed{" + "9" * 1_000_000 + "}", r"\boxed{" + "a" * 100_000 + "=1}"),
        *(r"\boxed{9^{9^{9}}}", "#### " + " " * 100_000 + "x", "is " * 30_000, "\n" * 100_000),
        *("$" + "\n" * 50_000 + "x", "1" + " " * 100_000 + "x", "so 1, " * 30_000, "3 + " * 30_000),
        *("# 1\n" * 50_000, r"\boxed{" + "1 + " * 30_000 + "= 2}", "1. - | " * 30_000),
    ],
)
def test_hostile_text_costs_little(text: str) -> None:
    start = time.process_time()
    stated_number(text)
    stated_number(text, evaluated=False)
    read_number(text)
    assert time.process_time() - start < 2.0  # far above what it takes, far below a hang


def test_gsm8k_golds_are_all_read() -> None:
    lines = shared_path("data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        answer = json.loads(line)["answer"]
        expected = answer.rsplit("#### ", 1)[1].replace(",", "").replace("$", "")
        assert ends_on(answer) == Fraction(expected)


@pytest.mark.parametrize(
    ("gold", "message", "fits"),
    [
        ("7 W/m^2", r"7\,\mathrm{W\,m^{-2}}", True),
        ("7 W/m^2", r"\SI{7}{\watt\per\meter\squared}", True),
        ("7 W/m^2", r"7\,\mathrm{W/m}", False),
        ("18 m/s", r"\qty{18}{\metre\per\second}", True),
        ("18 m/s", r"18\,\mathrm{m}", False),
        ("12 ft^3", "12 cubic feet", True),
        ("12 ft^3", r"12\ \text{ft}^{2}", False),
        ("$18", "18 dollars per day", True),
    ],
)
def test_compound_units_are_compared(gold: str, message: str, fits: bool) -> None:
    wanted, given = read_number(gold), read_number(message)
    assert wanted is not None
    assert given is not None
    assert given.fits(wanted) is fits
