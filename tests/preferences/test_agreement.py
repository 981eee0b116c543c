"""Labelled pairs counted by hand; agreement against tables and loops; a judge's audit by hand."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.statistics import share_interval, wilson_interval
from keel.preferences.agreement import (
    audit_judges,
    cohen_kappa,
    count_votes,
    fleiss_kappa,
    pairwise_agreement,
    vote_agreement,
)
from keel.preferences.files import Attribution, import_file
from keel.preferences.records import LabelRecord, Record, Side
from keel.preferences.statistics import describe_pairs
from keel.preferences.store import PreferenceStore
from tests.data.made import jsonl
from tests.preferences.made import human, made, pair
from tests.shared import shared_path


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


EXACT = 1e-12
"""Sums of a few dozen whole numbers and one division."""

# Fleiss 1971, table 1: six psychiatrists' diagnoses of each of 30 patients (depression,
# personality disorder, schizophrenia, neurosis, other).
DIAGNOSES = """
    00060 03003 01401 00006 03030 20400 00402 20310 20040 00006
    10050 11040 03300 10050 02031 00501 30012 51000 02040 10203
    00006 01050 02013 20040 10041 05010 40002 02040 10500 00006
"""
FLEISS = np.array([[int(count) for count in row] for row in DIAGNOSES.split()])


def judges(table: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Two judges' verdicts from how often each pair of categories came up."""
    cells = [(i, j) for i, row in enumerate(table) for j, n in enumerate(row) for _ in range(n)]
    return [i for i, _ in cells], [j for _, j in cells]


def cohen_loop(a: Sequence[int], b: Sequence[int]) -> float:
    observed = sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
    chance = sum(a.count(k) / len(a) * (b.count(k) / len(b)) for k in set(a) | set(b))
    return math.nan if chance == 1 else (observed - chance) / (1 - chance)


def fleiss_loop(votes: Sequence[Sequence[int]]) -> float:
    """By pairs of raters, and by the shares of all ratings."""
    pairs = [x == y for item in votes for x, y in combinations(item, 2)]
    every = [vote for item in votes for vote in item]
    chance = sum((every.count(k) / len(every)) ** 2 for k in set(every))
    return math.nan if len(set(every)) == 1 else (np.mean(pairs) - chance) / (1 - chance)


def test_fleiss_published_example() -> None:
    assert FLEISS.sum(axis=0).tolist() == [26, 26, 30, 55, 43]
    found = fleiss_kappa(FLEISS)
    assert found.mean == pytest.approx(0.430, abs=5e-4)  # as printed
    assert found.mean == pytest.approx(0.4302445, abs=5e-8)  # as R's irr prints it
    assert pairwise_agreement(FLEISS).mean == pytest.approx(0.5556, abs=5e-5)
    assert found.n == 30
    assert found.low < found.mean < found.high


def test_cohen_known_examples() -> None:
    # By hand: p_o = 35/50, p_e = ½ · 0.6 + ½ · 0.4 = ½, κ = 0.2 / 0.5.
    assert cohen_kappa(*judges([[20, 5], [10, 15]])).mean == pytest.approx(0.4, abs=EXACT)
    # By hand, worse than chance: p_o = 0.29, p_e = 0.5 · 0.4 + 0.3 · 0.3 + 0.2 · 0.3 = 0.35.
    table = [[50, 26, 24], [24, 4, 32], [6, 30, 4]]
    assert cohen_kappa(*judges(table)).mean == pytest.approx(-0.06 / 0.65, abs=EXACT)
    # As SAS prints the kappa coefficient of this table.
    found = cohen_kappa(*judges([[0, 4, 1], [0, 8, 0], [0, 1, 5]]))
    assert found.mean == pytest.approx(0.4842, abs=5e-5)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_cohen_is_the_loop(verdicts: list[tuple[int, int]]) -> None:
    a, b = [x for x, _ in verdicts], [y for _, y in verdicts]
    found = cohen_kappa(a, b)
    assert found.mean == pytest.approx(cohen_loop(a, b), abs=EXACT, nan_ok=True)
    swapped = cohen_kappa(b, a)
    assert swapped.mean == pytest.approx(found.mean, abs=EXACT, nan_ok=True)


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=1, max_size=30
        )
    )
)
def test_fleiss_is_the_loop(votes: list[list[int]]) -> None:
    counts = count_votes(votes)
    found = fleiss_kappa(counts)
    assert found.mean == pytest.approx(fleiss_loop(votes), abs=EXACT, nan_ok=True)
    pairs = [x == y for item in votes for x, y in combinations(item, 2)]
    assert pairwise_agreement(counts).mean == pytest.approx(np.mean(pairs), abs=EXACT)


def test_one_category_leaves_kappa_undefined() -> None:
    for found in (cohen_kappa([1] * 9, [1] * 9), fleiss_kappa(np.array([[3, 0]] * 9))):
        assert math.isnan(found.mean)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert found.n == 9
    # One item of nine differs: a third of the resamples are without it, and are left out.
    a, b = [1] * 7 + [2, 2], [1] * 8 + [2]
    found = cohen_kappa(a, b)
    assert (found.mean, found.high) == (pytest.approx(cohen_loop(a, b), abs=EXACT), 1.0)
    assert found.low < found.mean
    # One judge with one category agrees as chance would: κ is 0, not undefined.
    assert cohen_kappa([1, 1, 1], [1, 2, 1]).mean == 0.0


def test_resamples_that_do_not_vary_give_no_interval() -> None:
    a, b = judges([[12, 5], [4, 9]])
    one = ["p"] * len(a)
    for found, mean in (
        (cohen_kappa([1, 2] * 5, [1, 2] * 5), 1.0),
        (fleiss_kappa(np.array([[3, 0], [0, 3]] * 5)), 1.0),
        (cohen_kappa(a, b, one), cohen_kappa(a, b).mean),
        (fleiss_kappa(FLEISS, ["p"] * 30), fleiss_kappa(FLEISS).mean),
    ):
        assert found.mean == mean
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def test_resamples_are_drawn_in_blocks() -> None:
    """The draws are those of all at once, and thousands of clusters need not be held at once."""
    rng = np.random.default_rng(1)
    a = rng.integers(0, 2, 60)
    b = np.where(rng.random(60) < 0.7, a, 1 - a)
    found = cohen_kappa(a.tolist(), b.tolist())
    drawn = np.random.default_rng(0).multinomial(60, np.full(60, 1 / 60), size=2000)
    values = [cohen_loop(np.repeat(a, w).tolist(), np.repeat(b, w).tolist()) for w in drawn]
    ends = np.quantile(values, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx(tuple(ends), abs=1e-9)
    many = [1, 2] * 2500
    tracemalloc.start()
    cohen_kappa(many, [1] * 5000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 2000 × 5000 counts at once are 80 MB, twice over; 64 × 5000 are 2.6 MB.
    assert most < 10e6


def test_clusters_are_drawn_whole() -> None:
    """Each item ten times over says no more than the items once."""
    a, b = judges([[12, 5], [4, 9]])
    once = cohen_kappa(a, b)
    clusters = [f"prompt {i}" for i in range(len(a)) for _ in range(10)]
    ten = [x for x in a for _ in range(10)], [y for y in b for _ in range(10)]
    whole = cohen_kappa(*ten, clusters)
    assert (whole.mean, whole.low, whole.high) == pytest.approx(
        (once.mean, once.low, once.high), abs=EXACT
    )
    loose = cohen_kappa(*ten)
    # √10 times as narrow, give or take a fifth.
    ratio = (whole.high - whole.low) / (loose.high - loose.low)
    assert ratio == pytest.approx(math.sqrt(10), rel=0.2)


def test_pandalms_people_agree_as_published() -> None:
    """As its authors print κ, of the 999 rows of raw votes; and a model against the majority."""
    folder = shared_path("data/pandalm")
    rows = json.loads((folder / "testset-v1.json").read_text(encoding="utf-8"))
    votes = [[row[f"annotator{n}"] for n in (1, 2, 3)] for row in rows]
    found = fleiss_kappa(count_votes(votes))
    assert found.n == len(rows) == 999
    assert found.mean == pytest.approx(0.864, abs=5e-4)
    for (one, other), printed in {(0, 1): 0.85, (0, 2): 0.88, (1, 2): 0.86}.items():
        kappa = cohen_kappa([vote[one] for vote in votes], [vote[other] for vote in votes])
        assert kappa.mean == pytest.approx(printed, abs=5e-3)
    model = json.loads((folder / "pandalm-7b-testset-v1.json").read_text(encoding="utf-8"))
    said = [{"0": 0, "tie": 0}.get(v := str(r["pandalm_result"]).lower(), v) for r in model]
    majority = [max(set(vote), key=vote.count) for vote in votes]
    same = [one == int(other) for one, other in zip(majority, said, strict=True)]
    assert np.mean(same) == pytest.approx(0.668, abs=5e-4)
    assert cohen_kappa(majority, list(map(int, said))).mean == pytest.approx(0.435, abs=5e-4)


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
