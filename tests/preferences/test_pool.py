"""A store's pairs as a pool, and the batches that are chosen from it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keel.data.judged_rows import Preference
from keel.preferences.pool import (
    SelectionPlan,
    prefer_pairs,
    read_pool,
    read_texts,
    select_batch,
)
from keel.preferences.records import (
    LabelRecord,
    PairRecord,
)
from keel.preferences.store import PreferenceStore
from keel.types import KeelError
from tests.preferences.made import human, leased, made, pair


def judge(pair: str, value: float) -> LabelRecord:
    return LabelRecord(pair, value, "judge", "m")


def test_people_count_before_others(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 6) as store:
        store.add([human("p0", 1.0), human("p0", 0.5, "bob"), judge("p0", 0.0)])
        store.add([judge("p1", 0.25), LabelRecord("p1", 0.75, "rule")])
        store.add([human("p2", None), judge("p3", 0.0), human("p3", None)])
        pool = read_pool(store)
        assert pool.ids == tuple(f"p{n}" for n in range(6))
        assert pool.prompts == tuple(f"q{n}" for n in range(6))
        np.testing.assert_array_equal(pool.label_C, [0.75, 0.5, math.nan, 0.0, math.nan, math.nan])
        assert pool.people_C.tolist() == [True, False, False, False, False, False]
        # Which labels teach is a choice; who has labelled is a fact.
        rule = read_pool(store, ["rule", "human"])
        np.testing.assert_array_equal(rule.label_C, [0.75, 0.75, *[math.nan] * 4])


def test_texts_come_in_the_order_of_the_ids(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 5) as store:
        found = list(read_texts(store, ["p3", "p0", "p4"]))
    assert found == [Preference(f"p{n}", f"prompt {n}", "a", "b") for n in (3, 0, 4)]


def test_preferred_pairs_are_leased_first_and_in_order(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 5) as store:
        store.add([PairRecord("q0", "b0", "a0", priority=7.0, id="urgent")])
        priorities = prefer_pairs(store, ["p3", "p1"])
        assert priorities == {"p3": 9.0, "p1": 8.0}
        again = prefer_pairs(store, ["p4"])
        assert again == {"p4": 10.0}
        order = []
        while lease := store.lease_next("ann", float(len(order))):
            store.submit(lease, human(lease.pair, 1.0))
            order.append(lease.pair)
    assert order == ["p4", "p3", "p1", "urgent", "p0", "p2"]


# ---------------------------------------------------------------- a batch

GOOD, BAD = ["clear", "short", "right"], ["vague", "long", "wrong"]
WORDS = GOOD + BAD + list("abcdefghijklmnop")


def features(texts: Iterable[Preference]) -> np.ndarray:
    """How often each word is in the first answer, less that in the second."""
    return np.array(
        [[t.chosen.split().count(w) - t.rejected.split().count(w) for w in WORDS] for t in texts],
        dtype=float,
    ).reshape(-1, len(WORDS))


def store_of(path: Path, count: int, labelled: int) -> PreferenceStore:
    """Pairs of answers of which good words make the better, the first ones labelled by people."""
    generator = random.Random(0)
    store = PreferenceStore(path, create=True)
    for number in range(count):
        sides = [generator.choices(WORDS, k=6) for _ in "ab"]
        good = [sum((w in GOOD) - (w in BAD) for w in side) for side in sides]
        store.add(pair(number, number % 2, [" ".join(side) for side in sides]))
        if number < labelled:
            store.add([human(f"p{number}", float(good[0] >= good[1]))])
    return store


def numbers(rows: list[dict[str, object]]) -> list[int]:
    return [int(str(row["pair"])[1:]) for row in rows]


def test_the_chosen_pairs_are_leased_first(tmp_path: Path) -> None:
    with store_of(tmp_path / "a.db", 120, 60) as store:
        found = select_batch(store, SelectionPlan("d_optimal", 7), features)
        assert (found.labelled, found.unlabelled, found.method) == (60, 60, "d_optimal")
        chosen = numbers(found.rows)
        assert len(set(chosen)) == 7
        assert set(chosen) <= set(range(60, 120))
        assert [row["priority"] for row in found.rows] == [7, 6, 5, 4, 3, 2, 1]
        assert (np.diff([row["score"] for row in found.rows]) <= 1e-12).all()
        # Good words make the better answer, and 48 labels show it.
        assert found.check is not None
        assert (found.check.learned, found.check.held_out) == (48, 12)
        assert found.check.accuracy.mean > 0.7
        assert leased(store, "bob").pair == f"p{chosen[0]}"


def test_without_features_the_seed_decides(tmp_path: Path) -> None:
    with store_of(tmp_path / "a.db", 30, 10) as store:
        plan = SelectionPlan("random", 5)
        orders = [numbers(select_batch(store, replace(plan, seed=n)).rows) for n in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_gold_pairs_are_not_chosen(tmp_path: Path) -> None:
    with store_of(tmp_path / "a.db", 12, 0) as store:
        store.add(LabelRecord(f"p{number}", 1.0, "rule", "gold") for number in range(7))
        found = select_batch(store, SelectionPlan(count=12))
    assert set(numbers(found.rows)) == set(range(7, 12))


def test_rounds_sources_and_pools_narrow_the_choice(tmp_path: Path) -> None:
    with store_of(tmp_path / "a.db", 60, 40) as store:
        store.add(LabelRecord(f"p{n}", 1.0, "judge", "m") for n in range(30, 50))
        plan = SelectionPlan("margin")
        found = select_batch(store, replace(plan, round=1), features)
        assert (found.labelled, found.unlabelled) == (50, 10)
        assert {number % 2 for number in numbers(found.rows)} == {1}
        found = select_batch(store, replace(plan, sources=["judge"]), features)
        assert (found.labelled, found.unlabelled, len(found.rows)) == (20, 20, 20)
        found = select_batch(store, replace(plan, pool=8), features)
        assert (found.labelled, found.unlabelled, len(found.rows)) == (8, 8, 8)


def test_pairs_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    def some(texts: Iterable[Preference]) -> np.ndarray:
        found = features(texts)
        found[-1] = np.nan
        return found

    with store_of(tmp_path / "a.db", 40, 30) as store:
        found = select_batch(store, SelectionPlan("bald"), some)
        assert (found.long, found.unlabelled) == (1, 9)
        with pytest.raises(KeelError, match="no pair fits the model's context"):
            select_batch(store, SelectionPlan("bald"), lambda texts: features(texts) * np.nan)


def test_no_pair_to_choose_is_an_error(tmp_path: Path) -> None:
    with store_of(tmp_path / "a.db", 4, 4) as store:
        with pytest.raises(KeelError, match="people have labelled every pair"):
            select_batch(store, SelectionPlan())
        with pytest.raises(KeelError, match="there is no pair of round 9"):
            select_batch(store, SelectionPlan(round=9))
