from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.models.build import byte_tokenizer
from keel.models.text import split_steps
from keel.rewards import Scorer
from keel.rewards.learned import aggregate, on_tokens
from keel.rewards.registry import RewardContext
from keel.types import KeelError
from tests.rewards.learned import group, policy, reward

RIGHT = [0.9, 0.25, 0.5]
texts = st.text(alphabet="ab \n;", max_size=40)
separators = st.sampled_from(["\n", "\n\n", ";", "ab", "; ", " "])


def steps(text: str, separator: str = "\n") -> list[str]:
    return [text[a:b] for a, b in split_steps(text, separator)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("one", ["one"]),
        ("one\n", ["one\n"]),
        ("one\ntwo", ["one\n", "two"]),
        ("one\ntwo\n", ["one\n", "two\n"]),
        # A blank step belongs to the one before it, the first to the one after it.
        ("one\n\n\ntwo", ["one\n\n\n", "two"]),
        ("\n\none\ntwo", ["\n\none\n", "two"]),
        ("one\n  \ntwo", ["one\n  \n", "two"]),
        ("one\ntwo\n  ", ["one\n", "two\n  "]),
        # Nothing but blanks is one step, as there is text.
        ("\n", ["\n"]),
        ("  \n \n", ["  \n \n"]),
    ],
)
def test_steps_of_lines(text: str, expected: list[str]) -> None:
    assert steps(text) == expected


def test_a_separator_may_be_long_and_may_overlap_itself() -> None:
    assert steps("a\n\nb\nc\n\n", "\n\n") == ["a\n\n", "b\nc\n\n"]
    assert steps("a;;;b", ";;") == ["a;;", ";b"]
    assert steps("one Step two Step three", "Step") == ["one Step", " two Step", " three"]


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(KeelError, match='separator = "" divides nothing'):
        split_steps("one", "")


@settings(deadline=None, derandomize=True)
@given(texts, separators)
def test_spans_cover_the_text_without_gaps(text: str, separator: str) -> None:
    spans = split_steps(text, separator)
    assert "".join(text[a:b] for a, b in spans) == text
    assert all(a < b for a, b in spans)
    assert [a for a, _ in spans][1:] == [b for _, b in spans][:-1]
    assert bool(spans) == bool(text)


@settings(deadline=None, derandomize=True)
@given(texts, separators)
def test_every_step_says_something_and_ends_where_a_separator_does(
    text: str, separator: str
) -> None:
    cut = steps(text, separator)
    assert all(step.endswith(separator) for step in cut[:-1])
    if len(cut) > 1:
        assert all(step.replace(separator, "").strip() for step in cut)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1), separators)
def test_what_was_joined_is_cut_again(words: list[str], separator: str) -> None:
    words = [word.replace("ab", "c") for word in words]
    # "ab" could arise across the seam of a word and a separator.
    text = separator.join(words)
    if separator == "ab":
        text, separator = text.replace("ab", "\t"), "\t"
    assert [step.removesuffix(separator) for step in steps(text, separator)] == words


@pytest.mark.parametrize(
    ("how", "expected"), [("min", 0.25), ("last", 0.5), ("product", 0.1125), ("mean", 0.55)]
)
def test_aggregates(how: str, expected: float) -> None:
    assert aggregate(RIGHT, how) == pytest.approx(expected, rel=1e-15)  # type: ignore[arg-type]
    assert aggregate([0.7], how) == 0.7  # type: ignore[arg-type]
    assert aggregate([], how) == 0.0  # type: ignore[arg-type]


LETTERS = policy().tokenizer
GOLD = "1+1\n=2\n2"


def marks(text: str, gold: str | None = GOLD, **options: Any) -> Any:
    """Each step's (index of its last token, reward); None if there is none."""
    named = reward("step_match", RewardContext(tokenizer=LETTERS), options=options)
    (result,) = Scorer([named])([group(LETTERS, "a:", [text], answer=gold)], 0).results[0]
    if result.reward is None:
        return None
    assert result.reward == sum(step.reward for step in result.steps)
    return [(step.end, step.reward) for step in result.steps]


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("1+1\n=2\n2", [1, 1, 1], [1, 1, 1]),
        (" 1+1 \n=2\n\n2\n", [1, 1, 1], [1, 1, 1]),  # blanks and blank lines do not count
        ("1+1\n=3\n2", [1, 0, 0], [1, 0, 1]),
        ("1+2\n=2\n2", [0, 0, 0], [0, 1, 1]),
        # One that stops short is wrong at its end.
        ("1+1\n=2", [1, 0], [1, 0]),
        ("1+1", [0], [0]),
        # What goes on is wrong from there.
        ("1+1\n=2\n2\n2", [1, 1, 1, 0], [1, 1, 1, 0]),
        # A step in another's place is wrong.
        ("=2\n1+1\n2", [0, 0, 0], [0, 0, 1]),
        ("", [0], [0]),
    ],
)
def test_marks(text: str, strict: list[int], loose: list[int]) -> None:
    assert [reward for _, reward in marks(text)] == strict
    assert [reward for _, reward in marks(text, strict=False)] == loose


def test_marks_stand_at_the_tokens_that_close_the_steps() -> None:
    assert marks("1+1\n=2\n2") == [(3, 1.0), (6, 1.0), (8, 1.0)]
    assert marks("1+1\n\n=3") == [(4, 1.0), (7, 0.0)]
    assert marks("") == [(0, 0.0)]


def test_another_separator() -> None:
    assert marks("a;b", "a;b", separator=";") == [(1, 1.0), (3, 1.0)]
    assert marks("a\n;b", "a; b", separator=";") == [(2, 1.0), (4, 1.0)]
    assert marks("a\nb", "a;b", separator=";") == [(3, 0.0)]


def test_a_separator_of_several_bytes() -> None:
    """Tokens are bytes here, and half a character is no separator."""
    text = "一。二。三"
    made = on_tokens(byte_tokenizer(64), list(text.encode()), text, "。", [1.0, 0.5, 0.0])
    assert made == [(5, 1.0), (11, 0.5), (14, 0.0)]


def test_an_answer_without_a_token_has_no_step() -> None:
    assert on_tokens(LETTERS, [], "", "\n", []) == []


@pytest.mark.parametrize("gold", [None, ""])
def test_no_gold_answer_no_reward(gold: str | None) -> None:
    assert marks("1\n2", gold) is None


def test_it_needs_a_policy_and_a_separator() -> None:
    with pytest.raises(KeelError, match="tokens of a policy, and there is none"):
        reward("step_match", RewardContext())
    with pytest.raises(KeelError, match=r"reward 'step_match': separator = \"\" divides nothing"):
        reward("step_match", RewardContext(tokenizer=LETTERS), options={"separator": ""})
