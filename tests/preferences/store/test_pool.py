"""What a store says of its pairs to whoever chooses among them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from keel.data.preferences.schema import Preference
from keel.preferences.store import store as module
from keel.preferences.store.pool import (
    judge_agreement,
    prefer_pairs,
    read_pool,
    read_texts,
)
from keel.preferences.store.records import LabelRecord, PairRecord
from tests.preferences.store.made import human, made


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
        assert pool.judge_C.tolist() == [True, True, False, True, False, False]
        # Which labels teach is a choice; who has labelled is a fact.
        rule = read_pool(store, ["rule", "human"])
        np.testing.assert_array_equal(rule.label_C, [0.75, 0.75, *[math.nan] * 4])
        assert rule.judge_C.tolist() == pool.judge_C.tolist()


def test_texts_come_in_the_order_of_the_ids(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("keel.preferences.store.pool.PAGE", 2)
    assert module.PAGE > 2
    with made(tmp_path / "a.db", 5) as store:
        found = list(read_texts(store, ["p3", "p0", "p4"]))
    assert found == [Preference(f"p{n}", f"prompt {n}", "a", "b") for n in (3, 0, 4)]


def test_preferred_pairs_are_leased_first_and_in_order(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 5) as store:
        store.add_pairs([PairRecord("q0", "b0", "a0", priority=7.0, id="urgent")])
        priorities = prefer_pairs(store, ["p3", "p1"], read_pool(store).priority)
        assert priorities == {"p3": 9.0, "p1": 8.0}
        again = prefer_pairs(store, ["p4"], read_pool(store).priority)
        assert again == {"p4": 10.0}
        order = []
        while lease := store.lease_next("ann", float(len(order))):
            store.submit(lease, human(lease.pair, 1.0))
            order.append(lease.pair)
    assert order == ["p4", "p3", "p1", "urgent", "p0", "p2"]


def test_a_judges_agreement_with_people(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 8) as store:
        # Right, right, wrong; then a tie of people, a tie of the judge, and one side alone.
        for pair, people, said in (
            *(("p0", 1.0, 0.9), ("p1", 0.0, 0.0), ("p2", 1.0, 0.0)),
            *(("p3", 0.5, 1.0), ("p4", 1.0, 0.5)),
        ):
            store.add([human(pair, people), judge(pair, said)])
        store.add([human("p5", 1.0), judge("p6", 1.0)])
        found = judge_agreement(store)
    assert (found.n, found.mean) == (3, 2 / 3)


def test_an_empty_store_has_an_empty_pool(tmp_path: Path) -> None:
    with made(tmp_path / "a.db") as store:
        pool = read_pool(store)
        assert (pool.ids, pool.priority, judge_agreement(store).n) == ((), 0.0, 0)
        assert list(read_texts(store, [])) == []
        assert prefer_pairs(store, [], pool.priority) == {}
