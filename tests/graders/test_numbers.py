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
        ("The answer is 4, (-1,6).", None),
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
    ("text", "value"),
    [
        (r"7\,\mathrm{W/m^2}", 7),
        (r"3\,\mathrm{mol\,L^{-1}}", 3),
        (r"12\ \text{ft}^{3}", 12),
        (r"\SI{7}{W/m^2}", 7),
        (r"\qty{7}{\watt\per\square\meter}", 7),
        (r"\num{1.5e3}", 1500),
        (r"\ang{30}", 30),
        (r"18 \frac{\text{m}}{\text{s}}", 18),
        (r"9.8\ \mathrm{m}/\mathrm{s}^2", Fraction("9.8")),
        (r"5\,\mathrm{k\Omega}", 5),
        (r"25\,\mu\mathrm{m}", 25),
        ("36本书", 36),
        ("36千克", 36),
        ("5万元", 50_000),
        (r"\boxed{3} \mathrm{4}", None),
        (r"5\,\mathrm{2}", None),
        (r"5\,\mathrm{x + 1}", None),
        (r"2 \text{ hours } 30 \text{ minutes}", None),
        ("36个半", None),
        ("25以上", None),
    ],
)
def test_units_in_latex_and_beside_characters(text: str, value: Fraction | None) -> None:
    assert number(text) == value


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("He is 6 feet 3 inches tall.", None),
        ("Answer: 6' 3\"", None),
        ("The answer is 6 and a half.", None),
        ("It is 4 and a quarter.", None),
        ("It takes 1 hour 20 minutes.", None),
        ("3 weeks and 2 days", None),
        (r"The length is $6$ and a half.", None),
        ("2 hours 30 minutes are 2 * 60 + 30 = 150 minutes.", 150),
        ("6 and a half hours, that is 6.5 hours.", Fraction("6.5")),
        ("12 boys and girls came.", 12),
        ("The answer is 35. Wait, I made a mistake. It should be 40.", None),
        (r"\boxed{35}. Wait, I made a mistake. It should be 40.", None),
        ("#### 5\n\nCorrection: 7", None),
        ("Final answer: 5 (this is wrong, it should be 7)", None),
        ("Die Antwort ist 4. Ich habe mich verrechnet, richtig ist 3.", None),
        ("The answer is 5. Sorry, I forgot two. The correct answer is 7.", 7),
        (r"\boxed{5} Wait, I need to add 2. \boxed{7}", 7),
        ("5. Actually no: 7.", 7),
        ("~~35~~ 40", 40),
        (r"$\boxed{5}$. Let me verify: $2 \cdot 5 = 10$. Correct.", 5),
        ("答案是4。等等，我算错了。答案是3。", 3),
    ],
)
def test_mixed_quantities_and_answers_taken_back(text: str, value: Fraction | None) -> None:
    assert ends_on(text) == value
    if value is not None:
        assert same_answer(str(value), text) is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("一共是36本书。", 36),
        ("17+19=36，所以一共有36本书。", 36),
        ("总价为¥1,200。", 1200),
        ("正确率是50%。", 50),
        ("気温は-4度です。", -4),
        ("合計は36円", 36),
        ("まず17冊あります。17+19=36冊です。", 36),
        ("รวมทั้งหมด36เล่ม", 36),
        ("정답은 36입니다.", 36),
        ("정답은 36이 아닙니다.", None),
        ("答案不是36。", None),
        ("少于36本。", None),
        ("ไม่ใช่36", None),
    ],
)
def test_digits_beside_chinese_japanese_korean_and_thai(text: str, value: Fraction | None) -> None:
    assert ends_on(text) == value


# fmt: off
LEFT_ALONE = [
    r"\boxed{25}", r"So we get $\boxed{25}$.", r"$5^2=\boxed{25}$", r"**\boxed{25}**",
    r"The answer is: $$\boxed{25}$$", r"Thus $x = \boxed{25}$ cm.",
    r"$$x=\boxed{25\text{ cm}}$$", r"$\boxed{25}$ apples are left.",
    r"There are $\boxed{25}\text{ apples}$.", r"\[\boxed{25}\]",
    r"\begin{align*}x&=\boxed{25}\end{align*}", r"\therefore \boxed{25}",
    r"$\therefore \boxed{25}$", r"Answer: \(\boxed{25}\)", r"That makes \boxed{25}!",
    r"- \boxed{25}", r"> \boxed{25}", r"1. \boxed{25}",
    r"The area is $\boxed{25}$ square meters.", r"costs \$\boxed{25}", r"$\$\boxed{25}$",
    r"$\boxed{25}\%$", r"$\boxed{25}^\circ$", r"\textbf{\boxed{25}}",
    r"$\textbf{Answer: }\boxed{25}$", r"\boxed{25} is the final answer.",
    r"Hence, there are \boxed{25} ways to do it.", r"$n \equiv \boxed{25} \pmod{30}$",
    r"so 25 is the answer: \boxed{25}. (We could also count.)", "\\boxed{25}\n\nLet me know!",
    r"<answer>\boxed{25}</answer>", r"The remainder is \boxed{25} when divided by 30.",
    r"The number that is not counted is \boxed{25}.", r"It simplifies to \boxed{25}",
    r"rounds to $\boxed{25}$", r"a total of \boxed{25} eggs",
    r"$\boxed{25}$ - that is the answer",
]
CHANGED = [
    r"-\boxed{25}", r"$-\boxed{25}$", r"\sqrt{\boxed{25}}", r"$\frac{\boxed{25}}{2}$",
    r"\boxed{25}^2", r"$\boxed{25}^2$", r"\boxed{25}!", r"$x+\boxed{25}$", r"2\times\boxed{25}",
    r"$2\cdot\boxed{25}$", r"\boxed{25}\times 2", r"\boxed{25} + 3", r"$\boxed{25}$ minus 3",
    r"twice $\boxed{25}$", r"half of $\boxed{25}$", r"The answer is less than $\boxed{25}$.",
    r"It isn't \boxed{25}.", r"The answer is not $\boxed{25}$", r"It cannot be \boxed{25}",
    r"$x<\boxed{25}$", r"$x > \boxed{25}$", r"$\boxed{25}x$", r"\boxed{25}30", r"\boxed{25}.5",
    r"1\boxed{25}", r"\boxed{25} is wrong.", r"\boxed{25} is not the answer.",
    r"\boxed{25} thousand", r"\boxed{25} and a half", r"\boxed{25} feet 3 inches",
    r"between 3 and $\boxed{25}$", r"$\pi\boxed{25}$", r"$e^{\boxed{25}}$", r"$x_{\boxed{25}}$",
    r"$\boxed{25}\%$ of 80", r"$|\boxed{25}|-1$", r"$\boxed{25}-\boxed{3}$",
    r"If the answer were \boxed{25}, it would be odd.", r"more than \boxed{25}",
    r"$\boxed{25} x$", r"\boxed{25} x", r"\boxed{25} or more", r"\boxed{25} or \boxed{26}",
    r"Suppose the answer is \boxed{25}",
]
SAID = [
    "25", "25.", "The answer is 25.", "Answer: 25 eggs", "So she has 25 eggs left.",
    "The total is $25.", "x = 25", "He pays $25 in total.", "That makes 25 in all.",
    "There are exactly 25 of them.", "The price is 25 dollars and it is fair.",
    "So the final answer is 25 apples.", "Altogether: 25", "= 25", "5*5 = 25 apples",
    "She needs 25 more apples.", "Tom sold 25 tickets.", "Each child gets 25 candies.",
    "It takes him 25 minutes to get home.", "They collected a total of 25 shells.",
    "The result equals 25.", "**25**", "$25$", r"\(25\)", "25 km/h", "25%",
    "The discount is 25%.", "The percentage is 25 percent.", "Therefore, 25 students passed.",
    "Janet makes 25 dollars every day.", "The average is 25.", "That leaves 25 cookies for Sam.",
    "The number of students who do not play is 25.", "His speed is 25 mph.",
    "La réponse est 25.", "Die Antwort lautet 25.", "La respuesta es 25.", "答案：25",
    "答えは25です。",
    "คำตอบคือ 25", "总共25个苹果。", "一共花了25元。", "она 25", "We get 25.",
    "We find that the answer is 25.", "Thus, the sum of all of the numbers is 25.",
    "The answer is 25, not 30.", "It's not 30 but 25.", "The price went up by 25 dollars.",
    "So it is exactly 25.", "The answer should be 25.", "So x must be 25.",
    "Our answer is 25, as expected.", "It costs her 25 dollars to park for 3 hours.",
    "After 3 days there are 25 bacteria.", "The answer is approximately 25.",
    "The final count was 25 birds.", "So the number is 25, which is 5 squared.",
    "The answer is 25 because 5 * 5 = 25.", "5 times 5 is 25.", "Half of 50 is 25.",
    "A quarter of 100 is 25.", "50 divided by 2 is 25.", "30 minus 5 equals 25.",
    "Twice 12.5 is 25.", "He is 25 years old.", "She bought 25 eggs and ate none.",
    "The perimeter is 25 cm.", "The tank holds 25 liters of water.", "I got 25.",
    "The correct answer is **25**.", "Final Answer: 25", "#### 25",
    "The answer is: 25\n\nHope this helps!", "So there will be 25 pieces left over.",
]
NOT_SAID = [
    "The answer is twice 25.", "The answer is 25 minus 3.", "It is a quarter of 25.",
    "The total is below 25.", "The total is above 25.", "The sum is at least 25.",
    "It is up to 25.", "It is not 25.", "The answer is never 25.", "The answer cannot be 25.",
    "The answer is 25 or 26.", "It is nearly 25.", "Answer: 25 30", "Answer: 25/5",
    "Answer: 25^2", "Answer: 25!!", "Answer: -25", "Answer: 25x", "The answer is 25 times 2.",
    "The answer is 25 squared.", "Maybe 25.", "The answer might be 25.", "Is it 25?",
    "The answer is 25 more than 3.", "25 less than 30 is the answer.",
    "The answer is double 25.", "25% of 80 is the answer", "It is 25 percent of 80.",
    "The answer is the square root of 25.", "The answer is the square of 25.",
    "The answer is one third of 25.", "It takes 25 minutes and 30 seconds.",
    "He is 25 years and 3 months old.", "See page 25.", "This is step 25.",
    "The answer is 25, 30.", "The answer is divisible by 25.", "The result is a multiple of 25.",
    "Divide it by 25.", "The answer is 25. No wait, 30.",
    "The answer is 25.\n\nWait, I forgot to add 5.", "I doubt that the answer is 25.",
    "It is false that the answer is 25.", "The answer is within 25.", "There are fewer than 25.",
    "They have 25 dozen eggs.", "The ratio is 25:3", "The answer is 25-30.", "25 to 30",
    "between 25 and 30", "The number is 25 + x.", "If there were 25 apples, he would be happy.",
    "No one has 25.", "5 × 25", "x = 25y", "不是25。", "答案不是25。", "少于25。",
    "答案是25的一半。", "25以上",
    "25万", "約25以下です。", "答えは25ではありません。", "ไม่ใช่25", "25 กว่าบาท", "至少25个。",
    "超过25元。", "25분의 1",
    "25分之1", "The answer is 25 (or 26).", "$25$ and a third",
    r"The answer is $25$ and $\frac12$.", r"$25\frac{1}{2}$", "The answer is 25 and 1/2.",
    "The answer is 30, not 25.", "25 tens", "25 scores", "25 hundreds",
    "25\n26", "- 25\n- 26", "25; 26", "25 apples and 26 pears", "The answer isn't 25.",
    "The answer: not 25", "It wasn't 25.", "25 is too large.", "25 is too small.",
    "25 is incorrect.", "So the answer is not 24 or 25.",
]
# fmt: on


@pytest.mark.parametrize("text", [*LEFT_ALONE, *SAID])
def test_what_may_stand_around_an_answer(text: str) -> None:
    assert ends_on(text) == 25
    assert same_answer("25", text) is True


@pytest.mark.parametrize("text", [*CHANGED, *NOT_SAID])
def test_operands_bounds_and_denials_are_no_answer(text: str) -> None:
    assert ends_on(text) != 25
    assert same_answer("25", text) is False
