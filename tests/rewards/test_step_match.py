"""The rule that judges step by step against the gold answer."""

from __future__ import annotations

from typing import Any

import pytest

from keel.models.build import byte_tokenizer
from keel.rewards import Scorer
from keel.rewards.registry import RewardContext
from keel.rewards.steps import on_tokens
from keel.types import KeelError
from tests.rewards.learned import group, policy, reward

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
