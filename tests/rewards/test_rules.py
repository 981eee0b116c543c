from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.graders.formats import repeated_share, units
from keel.rewards.outputs import Wrong
from keel.rewards.rules import (
    choice,
    exact_match,
    format_match,
    length,
    numeric_match,
    overlong_penalty,
    place_match,
    repetition,
)
from keel.types import KeelError
from tests.shared import shared_path


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("wrap", [str, message])
def test_exact_match(wrap: Any) -> None:
    texts = [wrap(t) for t in (" 12 ", "12.", "13", "<answer>12</answer>", "x")]
    gold = ["12", "12", "12", "12", None]
    assert exact_match(completions=texts, answer=gold) == [1, 0, 0, 0, None]
    assert exact_match(completions=texts, answer=gold, normalised=True) == [1, 1, 0, 0, None]
    assert exact_match(completions=texts, answer=gold, tag="answer") == [0, 0, 0, 1, None]
    assert exact_match(completions=[wrap("3")], answer=[3]) == [1]


@pytest.mark.parametrize("wrap", [str, message])
def test_numeric_match(wrap: Any) -> None:
    texts = [wrap(t) for t in ("so 1,234", "#### 1234.0\n7", r"\boxed{1233}", "none", "1")]
    gold = ["a b <<1=1>> #### 1,234"] * 4 + [None]
    assert numeric_match(completions=texts, answer=gold) == [1, 1, 0, 0, None]
    assert numeric_match(completions=texts, answer=gold, tolerance=1e-3) == [1, 1, 1, 0, None]
    tagged = [wrap("<answer>5</answer> or 6"), wrap("5")]
    assert numeric_match(completions=tagged, answer=["5", 5], tag="answer") == [1, 0]
    paris, five = numeric_match(completions=[wrap("5")] * 2, answer=["Paris", "5"])
    assert isinstance(paris, Wrong)
    assert "holds 'Paris', which is not a number: use math or exact_match" in paris.why
    assert five == 1


@pytest.mark.parametrize("wrap", [str, message])
def test_premises_are_no_answer(wrap: Any) -> None:
    prompts = [wrap("Each box holds 12 eggs. There are 3 boxes. How many eggs are there?")] * 2
    texts = [wrap("There are 3 boxes. Each box holds 12 eggs."), wrap("There are 12 eggs.")]
    gold = ["12", "12"]
    assert numeric_match(completions=texts, answer=gold, prompts=prompts) == [0, 1]
    assert numeric_match(completions=texts, answer=gold) == [1, 1]


def test_numeric_match_reads_marked_answers_as_a_whole() -> None:
    def reward(text: str, gold: str) -> float | Wrong | None:
        return numeric_match(completions=[text], answer=[gold])[0]

    assert reward(r"\boxed{10}", "2^{10}") == 0
    assert reward(r"\boxed{1024}", "2^{10}") == 1
    assert isinstance(reward("x > 3", "x < 3"), Wrong)
    for wrong in (r"\boxed{5=5}", r"\boxed{y=5}"):
        assert reward(wrong, "x=5") == 0
    assert reward(r"\boxed{x=5}", "x=5") == 1
    logged: dict[str, float] = {}
    texts = ["18", "#### 4 or 18", "x", "17"]
    values = numeric_match(completions=texts, answer=["18"] * 4, log_metric=logged.__setitem__)
    assert values == [1, 0, 0, 0]
    assert logged == {"numeric_match/unread": 0.5}


@pytest.mark.parametrize("wrap", [str, message])
def test_format_match(wrap: Any) -> None:
    texts = [wrap("<think>a</think><answer>b</answer>"), wrap("<answer>b</answer>")]
    assert format_match(completions=texts, tags=["think", "answer"]) == [1, 0]
    assert format_match(completions=texts, regex="^<answer>.*</answer>$") == [0, 1]


def test_length() -> None:
    ids = [[0] * n for n in (0, 5, 10, 12, 15, 20, 99)]
    assert length(completion_ids=ids, target=10, width=5) == [0, 0, 0, -0.4, -1, -1, -1]
    assert length(completion_ids=ids, target=10) == [0, 0, 0, -0.2, -0.5, -1, -1]
    assert length(completion_ids=ids, target=10, both=True) == [-1, -0.5, 0, -0.2, -0.5, -1, -1]


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 200))
def test_overlong_is_dapo_equation_13(n: int, budget: int, cache: int) -> None:
    # The three cases as the paper writes them (2503.14476, eq. 13).
    if n <= budget - cache:
        expected = 0.0
    elif budget - cache < n <= budget:
        expected = ((budget - cache) - n) / cache
    else:
        expected = -1.0
    got = overlong_penalty(n, budget, cache)
    assert got == expected
    assert -1.0 <= got <= 0.0 or cache > budget
    assert overlong_penalty(n + 1, budget, cache) <= got


def test_gsm8k_solutions_are_scored_as_their_labels() -> None:
    """The numbers that OpenAI's labels call right and wrong: an outside check of the rule."""
    path = shared_path("data/gsm8k/example_model_solutions.jsonl")
    agree = total = 0
    for line in path.read_text(encoding="utf-8").splitlines()[:300]:
        row = json.loads(line)
        for key, solution in row.items():
            if not isinstance(solution, dict) or "is_correct" not in solution:
                continue
            gold = row["ground_truth"]
            reward = numeric_match(completions=[solution["solution"]], answer=[gold])[0]
            agree += reward == float(solution["is_correct"])
            total += 1
            assert key
    assert total > 1000
    assert agree == total


def test_place_match_counts_characters_at_their_places() -> None:
    message = ["123", "132", "1", "12345", "", " 123\n"]
    expected = [1.0, 1 / 3, 1 / 3, 3 / 5, 0.0, 1.0]
    found = place_match(completions=message, answer=["123"] * len(message))
    assert found == pytest.approx(expected)
    assert place_match(completions=["abc", " abc"], answer=[" abc\n", "ab "]) == [1.0, 2 / 3]
    assert place_match(completions=["x", ""], answer=[None, ""]) == [None, None]


@pytest.mark.parametrize("wrap", [str, message])
@pytest.mark.parametrize("opening", ["", "<think>\n", "<reasoning>\n", "<scratchpad>\n"])
def test_the_answer_follows_the_last_thought(wrap: Any, opening: str) -> None:
    tag = opening.strip() or "<think>"
    end = f"</{tag[1:]}"
    begun = "" if opening else tag
    texts = [
        wrap(f"{begun}Maybe \\boxed{{35}}? <answer>35</answer>{end}36"),
        wrap(f"{begun}36. {end}The <answer>36</answer>"),
        wrap(f"{begun}I get \\boxed{{36}}."),
        wrap(f"{begun}36{end}"),
    ]
    given: dict[str, Any] = {"completions": texts, "openings": [opening] * 4}
    for gold, right in (("36", [1, 1, 0, 0]), ("35", [0, 0, 0, 0])):
        assert numeric_match(answer=[gold] * 4, prompts=["?"] * 4, **given) == right
    assert exact_match(answer=["36"] * 4, **given) == [1, 0, 0, 0]
    assert exact_match(answer=["36"] * 4, tag="answer", **given) == [0, 1, 0, 0]
    assert place_match(answer=["36"] * 4, **given) == [1, 0, 0, 0]


def test_a_form_begins_with_what_the_template_opened() -> None:
    asked: dict[str, Any] = {"tags": ["reasoning", "answer"]}
    text = "18 + 18.\n</reasoning>\n<answer>36</answer>"
    openings = ["<reasoning>\n"]
    assert format_match(completions=[text], openings=openings, **asked) == [1]
    assert format_match(completions=[message(text)], openings=openings, **asked) == [1]
    assert format_match(completions=[text], **asked) == [0]
    assert format_match(
        completions=["</reasoning><answer>36</answer>"], openings=openings, **asked
    ) == [0]
    regex = r"^<reasoning>.+</reasoning>\s*<answer>\d+</answer>$"
    assert format_match(completions=[text], openings=openings, regex=regex) == [1]
    # A thought that the template closed as well is no part of the policy's form.
    closed = ["<think>\n\n</think>\n\n"]
    assert format_match(completions=["<answer>36</answer>"], openings=closed, tags=["answer"]) == [
        1
    ]


# ---------------------------------------------------------------- answer columns that hold lists


def test_any_entry_of_a_list_is_right() -> None:
    golds: list[Any] = [["Oslo", "Kristiania"], "Lima", None, [], [14.0, None], math.nan, 14.0]
    said = ["Kristiania", "Lima", "x", "x", "14", "nan", "14"]
    assert exact_match(completions=said, answer=golds) == [1.0, 1.0, None, None, 1.0, None, 1.0]
    assert exact_match(completions=["['Oslo']"], answer=[["Oslo"]]) == [0.0]
    assert place_match(completions=["ab"], answer=[["xyz", "ac"]]) == [0.5]


@pytest.mark.parametrize(("gold", "other"), [(True, "no"), (False, "Yes")])
def test_true_or_false_may_be_yes_or_no(gold: bool, other: str) -> None:
    written = ["True", "true", "yes", "Yes"] if gold else ["False", "false", "no", "No"]
    assert exact_match(completions=written, answer=[gold] * 4) == [1.0] * 4
    wrong = [other, str(not gold), "1", ""]
    assert exact_match(completions=wrong, answer=[gold] * 4) == [0.0] * 4


@pytest.mark.parametrize("empty", ["", "  ", "\n", [""], [], None, math.nan])
def test_an_empty_answer_judges_nothing(empty: Any) -> None:
    for reward in (exact_match, numeric_match, place_match, choice):
        assert reward(completions=["", "25"], answer=[empty, empty]) == [None, None]  # type: ignore[operator]


def test_a_list_of_numbers_is_read_entry_by_entry() -> None:
    extras: dict[str, Any] = {}
    found = numeric_match(
        completions=["It is 7.", "It is 36.", "It is 5."],
        answer=[["1", 7], [35, "thirty-six", 36.0], ["none", "neither"]],
        prompts=["a"] * 3,
        log_extra=extras.__setitem__,
    )
    assert found[:2] == [1.0, 1.0]
    assert isinstance(found[2], Wrong)
    assert extras["extracted"] == ["7", "36", "5"]
    with pytest.raises(KeelError, match="a table of text: name a key of it"):
        exact_match(completions=["8"], answer=[{"text": ["8"]}])


# ---------------------------------------------------------------- repetition


def test_repetition() -> None:
    text = "a b c A  b\nC d"  # abc bca cab abc bcd: one of five is a repeat
    message = [text, [{"role": "assistant", "content": text}], "a b", "", "x x x x", "a b c d"]
    rewards = repetition(completions=message)
    assert rewards == pytest.approx([-0.2, -0.2, 0, 0, -0.5, 0], abs=1e-12)
    assert str(rewards[2]) == "0.0"
    assert repetition(completions=["x x x x"], n=1, max_penalty=2.0) == [-1.5]
    assert units("我们 ab，cd我") == ["我", "们", "ab，cd", "我"]
    assert repetition(completions=["我们我们我们"], n=2) == pytest.approx([-0.6], abs=1e-12)


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.integers(1, 4))
def test_repetition_counts_what_came_before(words: list[str], n: int) -> None:
    grams = [words[at : at + n] for at in range(max(0, len(words) - n + 1))]
    again = sum(gram in grams[:at] for at, gram in enumerate(grams))
    expected = again / len(grams) if grams else 0.0
    assert repeated_share(" ".join(words), n) == pytest.approx(expected, abs=1e-12)
