from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.models.text import split_steps
from keel.rewards.steps import aggregate
from keel.types import KeelError

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
