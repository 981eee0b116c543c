from __future__ import annotations

import re
import tomllib
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from keel.graders import formats
from keel.graders.answers import in_tag
from keel.graders.formats import (
    answer_part,
    before_stop,
    has_tags,
    matches,
    normalise,
    opened,
    repeated_share,
    same_text,
    tag_content,
    units,
)
from keel.rewards.outputs import Wrong
from keel.rewards.rules import format_match, repetition

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("formats.toml").read_text("utf-8"))
OPENINGS = {
    "<think>\n": "</think>",
    "<reasoning>\n": "</reasoning>",
    "[THINK]": "[/THINK]",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<scratchpad>\n": "</scratchpad>",
}


@pytest.mark.parametrize("row", TABLE["tagged"], ids=itemgetter("text"))
def test_tags(row: dict[str, Any]) -> None:
    assert has_tags(row["text"], ("think", "answer")) is row["fits"]


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


# ---------------------------------------------------------------- thoughts, tags, stop strings


@pytest.mark.parametrize("row", TABLE["parts"], ids=itemgetter("text"))
def test_only_what_follows_the_last_thought_counts(row: dict[str, str]) -> None:
    assert answer_part(row["text"]) == row.get("part")


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_thought_that_the_template_opened(opening: str) -> None:
    assert opened(opening) == opening
    assert answer_part("so 36", opening) is None
    end = OPENINGS[opening]
    assert answer_part(f"35{end}36", opening) == "36"
    assert answer_part(f"{opening}35{end}36", opening) == "36"
    assert not opened(opening + end)
    assert answer_part("36", opening + end) == "36"


def test_openings_that_are_no_thoughts() -> None:
    for opening in ("", "Sure: ", "<think>\n\n</think>\n\n"):
        assert (opened(opening), answer_part("36", opening)) == ("", "36")
    assert answer_part("36</answer>", "<answer>") == "<answer>36</answer>"


def test_the_tag_of_a_recipe() -> None:
    assert in_tag("<sol>25</sol> so 7", "sol") == "25"
    assert in_tag("<x>1</x> no, <x>25</x>", "x") == "25"
    assert in_tag("- <x>25</x>", "x") == in_tag("1. **<x>25</x>**", "x") == "25"
    for text in ("<sol>25", "25</sol>", "25", "<answer>25</answer>"):
        assert in_tag(text, "sol") is None
    for text in ("-<sol>25</sol>", "3 * <sol>25</sol>", "<sol>25</sol>0", "<sol>25</sol>/5"):
        assert in_tag(text, "sol") is None


@pytest.mark.parametrize("row", TABLE["stops"], ids=itemgetter("text"))
def test_the_text_before_a_stop_string(row: dict[str, Any]) -> None:
    assert before_stop(row["text"], row["stop"]) == row["before"]
