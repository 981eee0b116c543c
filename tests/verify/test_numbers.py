from __future__ import annotations

import json
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.verify.numbers import final_number, last_number, marked_answer, parse_number, same_number
from tests.shared import shared_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" 72. ", 72),
        ("1,234,567", 1234567),
        ("$1,234.50", Fraction("1234.5")),
        ("-3.5", Fraction("-3.5")),
        ("−3", -3),
        ("-$7", -7),
        ("3/4", Fraction(3, 4)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\dfrac{1}{3}", Fraction(-1, 3)),
        (r"\frac12", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        (".5", Fraction(1, 2)),
        ("50%", 50),
        ("1{,}000", 1000),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        (r"-2 \frac12", Fraction(-5, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-$1,234 3/4", Fraction(-4939, 4)),
    ],
)
def test_one_number(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "1 2", "1,23", "3 + 4", "1/0", "--3", "1 5/2", "1.5 1/2"]
)
def test_not_one_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 + 4 = 7", 7),
        ("10-3", 3),
        ("10 - 3", 3),
        ("it is -3", -3),
        ("x = (4)-2", 2),
        ("we get 1,000 apples, 3 left", 3),
        ("1,2,3", 3),
        ("no number", None),
        ("The total is $18.", 18),
        ("it takes 3 1/2 cups", Fraction(7, 2)),
        ("in 2024 5/2", Fraction(5, 2)),  # not a mixed number, but two
        ("on -7 4/4", 1),
        ("3 1/2,000", Fraction(1, 2000)),
        ("3\n1/2", Fraction(1, 2)),
        ("3 - 1/2", Fraction(1, 2)),
        ("x^2 1/2", Fraction(1, 2)),
        (r"x^2\frac{1}{2}", Fraction(1, 2)),
        (r"0.5\frac{1}{2}", Fraction(1, 2)),
        (r"\frac{3}{4}\frac{1}{2}", Fraction(1, 2)),
    ],
)
def test_last_number(text: str, value: Fraction | None) -> None:
    assert last_number(text) == value


def test_a_marked_answer_comes_before_what_follows_it() -> None:
    assert final_number("2 + 2\n#### 4\nThat took 3 steps.") == 4
    assert final_number(r"first \boxed{5}, no: \boxed{\frac{1}{2}} (see page 9)") == Fraction(1, 2)
    assert final_number("#### 1\nthen \\boxed{2}") == 2
    assert final_number("\\boxed{2}\n#### 1") == 1
    assert final_number(r"1 + 1 \boxed{2\frac{1}{2}}") == Fraction(5, 2)
    assert final_number(r"\boxed{none} 5") is None
    assert marked_answer(r"\boxed{\text{a {b} c}}") == r"\text{a {b} c}"
    assert marked_answer(r"\boxed{1") is None
    assert marked_answer("plain 5") is None


def test_a_heading_is_no_answer() -> None:
    assert final_number("#### Conclusion\nThe answer is 42.") == 42
    assert final_number("#### 42\n#### Check\nin 3 steps") == 42
    assert final_number("#### 41\n#### 42\n5") == 42
    assert final_number("\\boxed{7}\n#### Check\nin 3 steps") == 7
    assert final_number("#### 7\n\\boxed{none}\n#### Check\nin 3 steps") is None
    assert final_number("#### none") is None


def test_equality_has_a_tolerance_only_if_asked() -> None:
    a, b = Fraction("0.333"), Fraction(1, 3)
    assert not same_number(a, b)
    assert same_number(a, b, 1e-3)
    assert not same_number(a, b, 1e-4)
    assert same_number(Fraction(1_000_001), Fraction(1_000_000), 1e-5)
    assert not same_number(Fraction(1_000_001), Fraction(1_000_000), 1e-7)


@given(st.integers(-(10**15), 10**15))
def test_integers_survive_separators(n: int) -> None:
    assert parse_number(f"{n:,}") == n
    assert final_number(f"3 and 4\n#### {n:,}") == n


@given(st.fractions())
def test_fractions_are_exact(value: Fraction) -> None:
    assert last_number(f"it is {value.numerator}/{value.denominator} then") == value


@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000,
        "1e999999999",
        "1," * 50_000,
        "-" * 100_000,
        "\\boxed{" * 20_000,
        "1 1/" + "9" * 100_000 + ",5",
        "1 1/2 " * 50_000,
        "1 " * 100_000,
        "#### x\n" * 50_000,
    ],
)
def test_hostile_text_costs_little(text: str) -> None:
    start = time.process_time()
    final_number(text)
    parse_number(text)
    assert time.process_time() - start < 2.0  # far above what it takes, far below a hang


def test_gsm8k_golds_are_all_read() -> None:
    lines = shared_path("data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        answer = json.loads(line)["answer"]
        expected = answer.rsplit("#### ", 1)[1].replace(",", "").replace("$", "")
        assert final_number(answer) == Fraction(expected)


def test_a_digit_of_a_name_is_no_whole_part() -> None:
    assert last_number("in Q3 4/5") == Fraction(4, 5)
    assert last_number("in all 3 4/5") == Fraction(19, 5)
