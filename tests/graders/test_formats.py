from __future__ import annotations

import re

import pytest

from keel.graders import formats
from keel.graders.formats import has_tags, matches, normalise, same_text, tag_content
from keel.rewards.rules import format_match
from keel.rewards.validation import Wrong

BOTH = ("think", "answer")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a\nb</think>\n\n<answer></answer>\n", True),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think>so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> done", False),
        ("<think>a</think><answer>b", False),
        ("<think>a<think></think><answer>b</answer>", False),
        ("<think><answer>b</answer></think>", False),
        ("", False),
    ],
)
def test_tags(text: str, fits: bool) -> None:
    assert has_tags(text, BOTH) is fits


def test_the_last_complete_tag_counts() -> None:
    assert tag_content("<answer>1</answer> no, <answer> 2 </answer>", "answer") == "2"
    assert tag_content("<answer>1</answer> <answer>2", "answer") == "1"
    assert tag_content("2</answer>", "answer") is None
    assert tag_content("2", "answer") is None


def test_regular_expressions() -> None:
    assert matches(r"####\s*\d+$", ["so\n#### 4\n", "#### 4 apples"]) == [True, False]
    assert matches(r"^a.*b$", [" a\nb ", "ca\nb"]) == [True, False]
    assert matches("\ud800\r\u2028x", ["\ud800\r\u2028x", "\x00", ""]) == [True, False, False]
    assert matches("a", []) == []
    with pytest.raises(re.error):
        matches("(", ["x"])


def test_a_search_that_does_not_end_costs_its_own_text_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "SECONDS", 1)
    texts = ["aaa", "a" * 50 + "b", "b", "a" * 100_000]
    assert matches("^(a+)+$", texts) == [True, None, False, True]
    (slow,) = format_match(completions=texts[1:2], regex="^(a+)+$")
    assert isinstance(slow, Wrong)
    assert slow.why.startswith("regex = '^(a+)+$' takes more than")


def test_texts_are_equal_up_to_blanks_or_normalised() -> None:
    assert same_text(" Yes ", "Yes")
    assert not same_text("yes.", "Yes")
    assert same_text("yes.  ", "  YES", normalised=True)
    assert same_text("a\t b", "a b", normalised=True)
    assert not same_text("a b", "ab", normalised=True)
    assert normalise("ＡＢ．") == "ab"
