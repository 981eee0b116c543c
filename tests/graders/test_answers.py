from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.graders.answers import chosen, final_answer, label_of, only_repeats, stated_number
from keel.graders.expressions import same_answer
from keel.graders.numbers import read_number, same_number
from keel.rewards.outputs import Wrong
from keel.rewards.rules import choice
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


def test_braces_in_a_box_are_its_own() -> None:
    marked = final_answer(r"\boxed{\text{a {b} c}}")
    assert marked is not None
    assert marked.text == r"\text{a {b} c}"


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


def test_gsm8k_golds_are_all_read() -> None:
    lines = shared_path("data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        answer = json.loads(line)["answer"]
        expected = answer.rsplit("#### ", 1)[1].replace(",", "").replace("$", "")
        assert ends_on(answer) == Fraction(expected)


@pytest.mark.parametrize(
    ("gold", "letter"),
    [
        *((one, "D") for one in ("D", "(D)", "D) 14", "d", r"\text{(D)}", "D. 14")),
        *(("14", ""), ("Dog", ""), ("", ""), ("D or C", "")),
    ],
)
def test_letter_of_a_gold_answer(gold: str, letter: str) -> None:
    assert label_of(gold) == letter


def test_choice_reward_compares_letters() -> None:
    given = choice(
        completions=["B", "B", "x", "<a>B</a> C", "B"],
        answer=["(B)", "C", "B", "B", None],
        tag=None,
    )
    assert given == [1.0, 0.0, 0.0, 0.0, None]
    assert choice(completions=["<a>B</a> C"], answer=["B) 2"], tag="a") == [1.0]
    assert choice(completions=["Which? A or B"], answer=["B"], prompts=["Which? A or B"]) == [0.0]
    (wrong,) = choice(completions=["B"], answer=["12"])
    assert isinstance(wrong, Wrong)
    assert "'12', which is not an option's letter" in wrong.why
