from __future__ import annotations

import re

import pytest

from keel.graders import formats
from keel.graders.formats import (
    has_tags,
    matches,
    normalise,
    repeated_share,
    same_text,
    tag_content,
    units,
)
from keel.rewards.outputs import Wrong
from keel.rewards.rules import format_match, repetition

BOTH = ("think", "answer")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a\nb</think>\n\n<answer>c</answer>\n", True),
        ("<think>a</think><answer></answer>", False),
        ("<think> \n</think><answer>b</answer>", False),
        ("<think>\u200b</think><answer>b</answer>", False),
        ("<think>a</think><answer>\ufeff\u2060\u00a0</answer>", False),
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


@pytest.mark.slow
def test_a_search_that_does_not_end_costs_its_own_text_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "SECONDS", 1)
    texts = ["aaa", "a" * 60 + "b", "b", "a" * 100_000]
    assert matches("^(a|aa)+$", texts) == [True, None, False, True]
    (slow,) = format_match(completions=texts[1:2], regex="^(a|aa)+$")
    assert isinstance(slow, Wrong)
    assert slow.why.startswith("regex = '^(a|aa)+$' takes more than")


def test_texts_are_equal_up_to_blanks_or_normalised() -> None:
    assert same_text(" Yes ", "Yes")
    assert not same_text("yes.", "Yes")
    assert same_text("yes.  ", "  YES", normalised=True)
    assert same_text("a\t b", "a b", normalised=True)
    assert not same_text("a b", "ab", normalised=True)
    assert normalise("ＡＢ．") == "ab"
    assert normalise("ﬁ𝟑…") == normalise("FI3...")


@pytest.mark.parametrize("pair", ["3² 32", "3₂ 32", "1½ 11⁄2", "①2 12", "5㎡ 5m2", "1º 1o"])
def test_a_characters_place_is_not_normalised_away(pair: str) -> None:
    one, other = pair.split()
    assert not same_text(one, other, normalised=True)
    assert same_text(one, one.upper() + ".", normalised=True)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("ha" * 50, "ha " * 50),
        ("a" * 50, "a " * 50),
        ("so-" * 50, "so- " * 50),
        ("😂" * 9, "😂 " * 9),
    ],
)
def test_a_run_counts_as_its_repetitions(run: str, words: str) -> None:
    assert units(run) == words.split()
    assert repeated_share(run, 3) == repeated_share(words, 3) > 0.8
    assert repetition(completions=[f"no {run}", "it is so"]) == [
        -repeated_share(f"no {words}", 3),
        0.0,
    ]


def test_numbers_and_borders_are_no_runs() -> None:
    for text in ("1000000000", "|---|------|", "0.3333333333", "....", "book", "====" * 10):
        assert units(text) == [text]
    assert len(units("7" * 300)) == 300
