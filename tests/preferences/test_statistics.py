"""What a store's labelled pairs are, counted by hand, and how far labels agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from keel.analysis.statistics import share_interval
from keel.preferences.files import import_file
from keel.preferences.formats import Attribution
from keel.preferences.statistics import count_votes, describe_pairs, fleiss_kappa, vote_agreement
from keel.preferences.store import PreferenceStore
from tests.data.tasks.made import jsonl


def described(folder: Path, *rows: tuple[str, str, str, float]) -> dict[str, Any]:
    """Of rows of prompt, chosen, rejected and probability."""
    names = ("prompt", "chosen", "rejected", "probability")
    path = jsonl(folder / "rows.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
    with PreferenceStore(None) as store:
        import_file(store, "trl", Path(path), Attribution(keep_empty=True))
        return describe_pairs(store)


def test_labelled_pairs_are_counted(tmp_path: Path) -> None:
    found = described(
        tmp_path,
        ("p", "long", "no", 1.0),
        ("q", "no", "long", 0.0),
        ("q", "same", "size", 0.8),
        ("r", "a", "bcd", 0.5),
        ("r", "a", "", 0.3),
        ("r", "a", "bcdefgh", 1.0),
    )
    counts = {"pairs": 6, "ties": 1, "soft": 2, "empty": 1, "contradictions": 0}
    assert {name: found[name] for name in counts} == counts
    # Decided and of different length: rows 1 and 2 for the longer, 5 and 6 for the shorter.
    # Of three prompts: two say the one, the third twice the other.
    assert found["longer_preferred"] == share_interval([1, 1, 0, 0], [*"pqrr"]).as_dict()
    assert found["characters"]["chosen"]["mean"] == pytest.approx((4 + 4 + 4 + 0 + 1) / 6, abs=0.6)


@pytest.mark.parametrize(
    ("second", "contradictions"),
    [
        (("p", "a", "b", 0.7), 0),
        (("p", "b", "a", 1.0), 1),
        (("p", "b", "a", 0.2), 0),
        (("p", "a", "b", 0.2), 1),
        (("p", "b", "a", 0.5), 0),
        (("q", "b", "a", 1.0), 0),
        (("p", "b", "c", 1.0), 0),
    ],
)
def test_labels_for_either_answer_contradict(
    second: tuple[str, str, str, float], contradictions: int, tmp_path: Path
) -> None:
    assert described(tmp_path, ("p", "a", "b", 1.0), second)["contradictions"] == contradictions


def test_votes_agree_with_intervals_over_prompts() -> None:
    votes = [[1, 1], [1, 2], [2, 2], [2, 2]]
    found = vote_agreement(votes, ["p", "p", "q", "r"])
    assert (found["judges"], found["unanimous"]) == (2, 3)
    assert found["pairwise"]["mean"] == 0.75
    plain = fleiss_kappa(count_votes(votes))
    assert found["fleiss_kappa"]["mean"] == plain.mean
    # Drawn over prompts: one prompt alone tells nothing.
    alone = vote_agreement(votes, ["p"] * 4)
    assert math.isnan(alone["fleiss_kappa"]["low"])
    assert (alone["pairwise"]["low"], alone["pairwise"]["high"]) == (0, 1)
