from __future__ import annotations

import json
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.graders.answers import final_answer, only_repeats, stated_number
from keel.graders.expressions import same_answer
from keel.graders.numbers import read_number, same_number
from tests.shared import shared_path


def number(text: str, *, evaluated: bool = True) -> Fraction | None:
    found = read_number(text, evaluated=evaluated)
    return None if found is None else found.value


def ends_on(text: str) -> Fraction | None:
    found = stated_number(text)
    return None if found is None else found.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" 72. ", 72),
        ("1,234,567", 1234567),
        ("10 000", 10000),
        ("$1,234.50", Fraction("1234.5")),
        ("-3.5", Fraction("-3.5")),
        ("−3", -3),
        ("-$7", -7),
        ("3/4", Fraction(3, 4)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\dfrac{1}{3}", Fraction(-1, 3)),
        (r"\frac12", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        (r"1.5 \times 10^{3}", 1500),
        (".5", Fraction(1, 2)),
        ("50%", 50),
        (r"8\%", 8),
        ("1{,}000", 1000),
        (r"10,\!080", 10080),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        (r"-2 \frac12", Fraction(-5, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("2½", Fraction(5, 2)),
        ("-$1,234 3/4", Fraction(-4939, 4)),
        ("１８", 18),
        ("**18**", 18),
        (r"$\$18$", 18),
        (r"\(18\)", 18),
        ("18 eggs per day", 18),
        ("8 m/s", 8),
        (r"999\text{ cm}^2", 999),
        (r"\frac{270}7\text{ degrees}", Fraction(270, 7)),
        (r"90^\circ", 90),
        ("18 million", 18_000_000),
        ("x = 5", 5),
        (r"\text{Total cost} = \$5", 5),
    ],
)
def test_one_number(text: str, value: Fraction) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1 2", "1,23", "3 + 4", "1/0", "--3", "1 5/2", "1.5 1/2", "0x3", "3x", "2k"),
        *("4 or 3", "3, 4, 5", "x > 3", "5 = 5", "2x = 10", "18!", "18k", "52²", "3 pi", r"3\pi"),
        *(r"17 \times 24", "816/2", "2^{10}", "9**9**9", "1. Compute the total", "1e999999999"),
    ],
)
def test_not_one_number(text: str) -> None:
    assert number(text) is None


def test_what_is_left_to_do_is_read_of_gold_answers_alone() -> None:
    assert number("2^{10}", evaluated=False) == 1024
    assert number("816/2", evaluated=False) == 408
    assert number(r"17 \times 24", evaluated=False) is None


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 + 4 = 7", 7),
        ("it is -3", -3),
        ("The total is $18.", 18),
        ("it takes 3 1/2 cups", Fraction(7, 2)),
        ("For 5 days, the total is $18 per day.", 18),
        ("The answer is 18, because 9 + 9 is 18.", 18),
        ("**Final Answer**\n\n18", 18),
        ("work\nA: 18", 18),
        ("in Q3 4/5", None),
        ("10 - 3", None),
        ("1,2,3", None),
        ("we get 1,000 apples, 3 left", None),
        ("3\n4", None),
        ("It is 4. Or 3.", None),
        ("x = 4 or x = 3", None),
        ("not 18", None),
        ("more than 18", None),
        ("no number", None),
        (r"The answer is 1251, \frac{1}{8}.", None),
        (r"The answer is 1440, \text{(E)}.", None),
        ("The answer is 129, -2.", None),
        ("The answer is 4, and 3.", None),
        ("The answer is 9, Evelyn.", None),
        ("The answer is 1,440.", 1440),
        ("How many are 3 and 4?", None),
        ("Find the sum of 3 + 4 = 7.", None),
        ("Is the answer 18?", None),
    ],
)
def test_what_a_text_without_a_mark_ends_on(text: str, value: Fraction | None) -> None:
    assert ends_on(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Each egg costs $2, so the total is $18.", 18),
        ("He had 5 dollars, so after doubling it he has 10 dollars.", 10),
        ("She sold 5 pies, and so earned $40.", 40),
        ("The recipe needs 3 cups for each batch, which is 12 cups in total.", 12),
        ("The recipe needs 3 cups per batch; with 4 batches that is 12 cups.", 12),
        ("Tom is 4 years older, so Tom is 14.", 14),
        ("The answer is 9 eggs, so 18 dollars.", 18),
        ("Eliza's earnings for this week are $460.", 460),
        ("The total cost for the trip is $460.", 460),
        ("The total cost for all the items is 200 + 260 = $460.", 460),
        ("The number of apples after lunch is 5.", 5),
        ("It will take Carla 160 minutes to download the file.", 160),
        ("So it costs $1,200 to buy.", 1200),
        ("He has 12 dollars to spend.", 12),
        ("12 apples are left.", 12),
        ("12 is the answer.", 12),
        ("So, 12 of the people came to the party.", 12),
        ("There are 12 students who do not play sports.", 12),
        ("Therefore, there are 12 boys and girls in the class.", 12),
        ("He has 12 more apples than Bob.", 12),
        ("Therefore, Janet makes **$18** every day at the farmers' market.", 18),
        ("Altogether they have 12 apples (3 + 9).", 12),
        ("The answer is 12, and that is final.", 12),
        ("The correct answer is (12).", 12),
        ("The answer is 18!", 18),
        ("\\boxed{9+9=18}", 18),
        ("#### 9 * 2 = 18", 18),
        ("Total = 3+4+5 = 12.\n\nLet me know if you have any other questions!", 12),
        ("It is 12. Would you like me to explain?", 12),
        ("**12**\n\nWould you like another?", 12),
        ("It is 12. Feel free to ask!", 12),
        ("It is 12. Note that tax is ignored.", 12),
        ("To find the total, add them: 5 + 7 = 12", 12),
        ("Now find the total: 3*4 = 12.", 12),
        ("So, to find the total, she multiplies 3 by 4 to get 12.", 12),
        ("Answer: 12\n\nThe answer is correct.", 12),
        ("Answer: 12\n\nThis answer is reasonable because 3*4=12.", 12),
        ("#### 3 dozen", None),
        ("\\boxed{3 \\text{ fifths}}", None),
        ("#### 5 hundredths", None),
        ("#### 7 eighths", None),
        ("#### 2 thirds", None),
        ("#### 5 wrong", None),
        ("#### 5 less", None),
        ("\\boxed{5} (or 6)", None),
        ("\\boxed{4}|\\boxed{5}|\\boxed{6}", None),
        ("1. \\boxed{5}\n2. \\boxed{6}", None),
        ("- \\boxed{5}\n- \\boxed{6}", None),
        ("#### 5\nor\n#### 6", None),
        ("#### 5\n- #### 6", None),
        ("\\boxed{18}\n\nAnd 18 is the answer.", 18),
        ("It is between 3 and 5.", None),
        ("It is not 5.", None),
        ("It is 3, 4, 5.", None),
        ("She has 5 and 3.", None),
        ("It is 3 dozen.", None),
        ("It is 17 * 24.", None),
        ("It costs 3 times 5.", None),
    ],
)
def test_answers_in_prose(text: str, value: int | None) -> None:
    assert ends_on(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{9+9=19}", None),
        (r"\boxed{9+9=18}", 18),
        (r"\boxed{9 + 9 = 2 \times 9 = 18}", 18),
        (r"\boxed{9 + 9 = 2 \times 8 = 18}", None),
        (r"\boxed{(1 + 2) * -3 = -9}", -9),
        (r"\boxed{12 \div 4 / 3 - 1 = 0}", 0),
        ("#### 1,000 - 1 = 999", 999),
        ("#### 1,000 - 1 = 998", None),
        ("#### 100/3 = 33.33", Fraction(3333, 100)),
        ("#### 100/3 = 33.34", None),
        ("#### 5/0 = 5", None),  # no calculation
        ("So 9 + 9 = $19", None),
        ("So 9 + 9 = $18", 18),
        ("The answer is 9+9=19.", None),
        ("9 * 2 = 19 eggs", None),
        ("Half of 12 - 3 = 3", 3),  # words are no calculation
    ],
)
def test_a_false_equation_is_no_answer(text: str, value: Fraction | None) -> None:
    assert ends_on(text) == value
    assert same_answer("19" if value is None else str(value), text) is (value is not None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She earned $18 a day for 5 days.", None),
        ("In 5 days, 12 eggs are laid.", None),
        ("He bought 3 boxes of 12 eggs.", None),
        ("She earns $18 a day for 5 days.", 18),
        ("For 5 days she is paid $18.", 18),
        ("He bought 12 eggs.", 12),
        (r"5.4 \text{ cents} or \text{Navin}", None),
        (r"5.4 \text{ cents}", Fraction(54, 10)),
    ],
)
def test_of_two_numbers_without_a_mark_neither_is_guessed(
    text: str, value: Fraction | None
) -> None:
    assert ends_on(text) == value


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
    assert ends_on(r"1 + 1 \boxed{2\frac{1}{2}}") == Fraction(5, 2)
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
