"""What a set of pairs is made of, counted by hand."""

from __future__ import annotations

import math

import pytest

from keel.analysis.proportions import share_interval
from keel.analysis.statistics import wilson_interval
from keel.data.preferences.schema import Preference
from keel.preferences.agreement import count_votes, fleiss_kappa
from keel.preferences.summary import agreement, summarise

CHAT = ({"role": "user", "content": "p"},)


def pair(prompt: object, chosen: str, rejected: str, p: float = 1.0, m: float = 0.0) -> Preference:
    return Preference("x", prompt, chosen, rejected, p, m)  # type: ignore[arg-type]


def test_counts() -> None:
    pairs = [
        pair("p", "long", "no", m=1.0),
        pair("q", "no", "long", 0.0),
        pair("q", "same", "size", 0.8),
        pair("r", "a", "bcd", 0.5),
        pair("r", "a", "", 0.3),
        pair("r", "a", "bcdefgh", 1.0),
        pair(CHAT, "a", "b"),
    ]
    found = summarise(pairs)
    assert found["rows"] == 7
    assert found["prompts"] == 4
    assert found["ties"] == 1
    assert found["soft"] == 2
    assert found["margins"] == 1
    assert found["empty_answers"] == 1
    assert (found["duplicates"], found["contradictions"]) == (0, 0)
    # Decided and of different length: rows 1 and 2 for the longer, 5 and 6 for the shorter.
    # Of three prompts: two say the one, the third twice the other.
    assert found["longer_preferred"] == share_interval([1, 1, 0, 0], [*"pqrr"]).as_dict()
    assert found["characters"]["chosen"] == {"median": 1.0, "mean": 14 / 7}
    assert found["characters"]["rejected"] == {"median": 3.0, "mean": 21 / 7}


@pytest.mark.parametrize(
    ("second", "duplicates", "contradictions"),
    [
        (pair("p", "a", "b"), 1, 0),
        (pair("p", "a", "b", 0.7), 1, 0),
        (pair("p", "b", "a"), 1, 1),
        (pair("p", "b", "a", 0.2), 1, 0),
        (pair("p", "a", "b", 0.2), 1, 1),
        (pair("p", "b", "a", 0.5), 1, 0),
        (pair("q", "b", "a"), 0, 0),
        (pair("p", "b", "c"), 0, 0),
        (pair(CHAT, "a", "b"), 0, 0),
    ],
)
def test_repeats(second: Preference, duplicates: int, contradictions: int) -> None:
    found = summarise([pair("p", "a", "b"), second])
    assert (found["duplicates"], found["contradictions"]) == (duplicates, contradictions)


def test_a_tie_contradicts_nothing() -> None:
    found = summarise([pair("p", "a", "b", 0.5), pair("p", "b", "a")])
    assert (found["duplicates"], found["contradictions"]) == (1, 0)


def test_where_no_pair_says_which_length_is_preferred() -> None:
    found = summarise([pair("p", "a", "bb", 0.5), pair("q", "a", "b")])["longer_preferred"]
    assert math.isnan(found["mean"])
    assert (found["low"], found["high"], found["n"]) == (0.0, 1.0, 0)


def test_pairs_of_one_prompt_are_not_so_many() -> None:
    """Thirty prompts, ten pairs each that say one and the same."""
    pairs = [
        pair(f"p{n}", f"{at}", "a longer answer", float(n % 3 != 0))
        for n in range(30)
        for at in range(10)
    ]
    found = summarise(pairs)["longer_preferred"]
    assert (found["mean"], found["n"]) == (pytest.approx(1 / 3), 300)
    # Nearly Wilson's of ten of thirty, not of a hundred of three hundred.
    few = wilson_interval(10, 30)
    assert found["low"] == pytest.approx(few.low, abs=0.02)
    assert found["high"] == pytest.approx(few.high, abs=0.02)


def test_people() -> None:
    votes = [[1, 1], [1, 2], [2, 2], [2, 2]]
    found = agreement(votes, ["p", "p", "q", "r"])
    assert found is not None
    assert (found["judges"], found["unanimous"]) == (2, 3)
    assert found["pairwise"]["value"] == 0.75
    plain = fleiss_kappa(count_votes(votes))
    assert found["fleiss_kappa"]["value"] == plain.value
    # Drawn over prompts: one prompt alone tells nothing.
    alone = agreement(votes, ["p"] * 4)
    assert alone is not None
    assert alone["fleiss_kappa"]["value"] == plain.value
    assert math.isnan(alone["fleiss_kappa"]["low"])
    assert (alone["pairwise"]["low"], alone["pairwise"]["high"]) == (0, 1)
    assert plain.low < plain.value
    assert agreement([[1], [2]], ["p", "q"]) is None
    assert agreement([], []) is None
    with pytest.raises(ValueError, match="2 ratings of one item and 3 of another"):
        agreement([[1, 1], [1, 1, 2]], ["p", "q"])
