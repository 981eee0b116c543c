"""The audit of a judge against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from keel.analysis.statistics import wilson_interval
from keel.preferences.agreement import audit_judges
from keel.preferences.records import LabelRecord, Record, Side
from keel.preferences.store import PreferenceStore
from tests.preferences.made import human, made, pair

# Of each pair: the two texts and models, the judge's value with the first and with the second
# completion shown first, and people's values.
A, B, C = "m", "judge", "other"
PAIRS: list[tuple[str, str, str, str, float | None, float | None, tuple[float | None, ...]]] = [
    ("long one", "short", A, B, 1.0, 1.0, (1.0,)),  # the longer, consistently; people agree
    ("tiny", "much longer", B, A, 1.0, 1.0, (0.0, 0.0, 1.0)),  # the shorter, its own; people not
    ("aaa", "bb", A, C, 1.0, 0.0, (0.5,)),  # the place shown first: a tie; people say tie
    ("aa", "bbb", A, A, 0.0, 1.0, ()),  # the place shown second: a tie
    ("aaaa", "b", C, A, 0.5, 1.0, (None,)),  # a tie and a win: the longer at ¾; people skipped
    ("same", "size", A, B, 0.0, 0.0, (0.0,)),  # its own, of equal length; people agree
    ("x", "yy", A, B, 1.0, None, (1.0,)),  # no verdict in one order
]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    records: list[Record] = []
    for number, (one, other, *models, shown, swapped, people) in enumerate(PAIRS):
        records += pair(number, texts=(one, other), models=models)
        records += both_orders(number, (shown, swapped))
        records += [human(f"p{number}", value, f"person {at}") for at, value in enumerate(people)]
    with PreferenceStore(tmp_path / "a.db", create=True) as opened:
        opened.add(records)
        yield opened


def both_orders(number: int, values: Sequence[float | None]) -> list[Record]:
    """The judge's labels of a pair with the first and with the second answer shown first."""
    return [
        LabelRecord(f"p{number}", value, "judge", B, "rubric", shown_first=side)
        for value, side in zip(values, get_args(Side), strict=True)
    ]


def place_store(path: Path, labels: list[tuple[float, float]]) -> PreferenceStore:
    """A pair a prompt, with the judge's values in the two orders."""
    opened = made(path, len(labels))
    opened.add(
        label for number, values in enumerate(labels) for label in both_orders(number, values)
    )
    return opened


def test_figures_of_a_small_store(store: PreferenceStore) -> None:
    (audit,) = audit_judges(store)
    assert (audit["judge"], audit["rubric"]) == (B, "rubric")
    assert (audit["pairs"], audit["no_verdict"], audit["ties"]) == (6, 1, 2)
    # Consistent: 1, 2 and 6 of 6.
    assert audit["order_consistency"]["mean"] == pytest.approx(3 / 6)
    # One pair for each place.
    assert audit["position_bias"]["mean"] == 0
    # The longer wins in 1 and 5, and loses in 2; 3 and 4 are ties, 6 has equal lengths.
    assert (audit["longer_preferred"]["mean"], audit["longer_preferred"]["n"]) == (
        pytest.approx(2 / 3),
        3,
    )
    # Own completions: 0 in 1; 1 in 2; 1 in 6. Pair 4 is of one model.
    rates = {
        row["model"]: (row["win_rate"]["mean"], row["win_rate"]["n"]) for row in audit["models"]
    }
    assert rates == {
        A: (pytest.approx((1 + 0 + 0.5 + 0.25 + 0) / 5), 5),
        B: (pytest.approx(2 / 3), 3),
        C: (pytest.approx((0.5 + 0.75) / 2), 2),
    }
    assert audit["own"]["mean"] == pytest.approx(2 / 3)
    # People on these three: 1 for A in 1, ⅓ for the judge's in 2, 1 for the judge's in 6.
    assert audit["own_by_people"]["mean"] == pytest.approx((0 + 1 / 3 + 1) / 3)


def test_agreement_with_people_by_hand(store: PreferenceStore) -> None:
    """People: first, second, tie, second; the judge: first, first, tie, second."""
    people = audit_judges(store)[0]["people"]
    assert people["pairs"] == 4
    assert people["accuracy"]["mean"] == pytest.approx(3 / 4)
    # p_e = ¼·½ (first) + ½·¼ (second) + ¼·¼ (tie)
    chance = 0.25 * 0.5 + 0.5 * 0.25 + 0.25 * 0.25
    assert people["cohen_kappa"]["mean"] == pytest.approx((0.75 - chance) / (1 - chance))
    assert people["accuracy"]["low"] < 0.75 < people["accuracy"]["high"]


@pytest.mark.parametrize(
    ("values", "bias"), [((1.0, 0.0), 1.0), ((0.0, 1.0), -1.0), ((1.0, 1.0), 0.0)]
)
def test_a_bias_without_spread_has_an_interval_nevertheless(
    values: tuple[float, float], bias: float, tmp_path: Path
) -> None:
    with place_store(tmp_path / "a.db", [values] * 20) as store:
        found = audit_judges(store)[0]["position_bias"]
    assert found["mean"] == bias
    # Of 20 pairs at most as many are otherwise as Wilson's interval leaves room for, or a few more.
    others = 1 - wilson_interval(20, 20).low
    room = others if bias == 0 else 2 * others
    assert max(abs(found["low"] - bias), abs(found["high"] - bias)) == pytest.approx(room, rel=0.2)
    assert -1 <= found["low"] < found["high"] <= 1


def test_of_two_labels_of_one_order_the_last_counts(tmp_path: Path) -> None:
    with place_store(tmp_path / "a.db", [(1.0, 0.0)] * 2) as store:
        store.add([LabelRecord("p0", 1.0, "judge", B, "rubric", round=1, shown_first="second")])
        assert audit_judges(store)[0]["order_consistency"]["mean"] == 0.5


def test_labels_of_one_order_alone_are_not_audited(tmp_path: Path) -> None:
    with place_store(tmp_path / "a.db", [(1.0, 1.0)]) as store:
        store.add([LabelRecord("p0", 1.0, "judge", "another", shown_first="first")])
        assert [audit["judge"] for audit in audit_judges(store)] == [B]
