"""The preference store: what is added, queried, leased, undone and refused."""

from __future__ import annotations

import resource
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from keel.preferences.records import (
    CompletionRecord,
    CostRecord,
    LabelRecord,
    PairRecord,
    PromptRecord,
    StepsRecord,
)
from keel.preferences.store import PAGE, PreferenceStore
from keel.types import KeelError
from tests.preferences.made import human, leased, made, pair, taken

CHAT = ({"role": "user", "content": "Hé"},)
PROMPT = PromptRecord(CHAT, {"answer": [1, "ü"]})
ONE = CompletionRecord(
    PROMPT.id, "one", "m", {"temperature": 0.7}, 2, tokens=3, seconds=0.5, cost=0.1
)
TWO = CompletionRecord(PROMPT.id, "two", columns={"score": 3.5})
PAIR = PairRecord(PROMPT.id, ONE.id, TWO.id, 2, 0.5, {"id": "x"})
LABEL = LabelRecord(
    *(PAIR.id, 0.7, "judge", "gpt", "be kind", "v1", 2, 0.25, "second", 1.5, 0.01, "why", 9.0)
)
STEPS = StepsRecord(PROMPT.id, ("a", "b"), (1.0, None), "rule", columns={"k": 1})
COST = CostRecord("round 2: judge", "api", 1.25, "dollars", "labels", 2, forecast=True)
EVERY = [PROMPT, ONE, TWO, PAIR, LABEL, STEPS, COST]


def test_records_read_back_as_they_were_added(tmp_path: Path) -> None:
    with made(tmp_path / "a.db") as store:
        # In no particular order: each finds what it refers to.
        assert store.add(EVERY[::-1]) == {
            **{"prompts": 1, "completions": 2, "pairs": 1, "labels": 1, "steps": 1, "costs": 1}
        }
    with PreferenceStore(tmp_path / "a.db") as store:
        assert list(store.prompts()) == [PROMPT]
        assert list(store.completions()) == [TWO, ONE]
        assert list(store.pairs()) == [PAIR]
        assert list(store.labels()) == [LABEL]
        assert list(store.steps()) == [STEPS]
        assert list(store.costs()) == [COST]
        assert next(store.costs()).forecast is True
        judged = store.judged_pair(PAIR.id)
        assert (judged.pair, judged.prompt, judged.first) == (PAIR, PROMPT, ONE)
        assert (judged.second, judged.labels) == (TWO, (LABEL,))
        assert list(store.judged_pairs()) == [judged]
        assert store.prompt(PROMPT.id) == PROMPT
        with pytest.raises(KeelError, match="there is no pair 'x'"):
            store.judged_pair("x")
        with pytest.raises(KeelError, match="there is no prompt 'x'"):
            store.prompt("x")


def test_adding_twice_is_one_row(tmp_path: Path) -> None:
    with made(tmp_path / "a.db") as store:
        store.add(EVERY)
        counts = store.counts()
        assert set(store.add(EVERY).values()) == {0}
        # What it took is the first one's.
        assert (
            store.add([replace(LABEL, seconds=9.0), replace(LABEL, seconds=8.0)]).get("labels", 0)
            == 0
        )
        assert store.counts() == counts
        assert list(store.labels()) == [LABEL]
        # A judgement that says something else is another.
        assert store.add([replace(LABEL, value=0.2, id="")]).get("labels", 0) == 1
        assert store.add([replace(LABEL, annotator="other", id="")]).get("labels", 0) == 1


@pytest.mark.parametrize(
    "other",
    [
        PromptRecord("else", id=PROMPT.id),
        replace(ONE, text="else"),
        replace(PAIR, first=TWO.id, second=ONE.id),
        replace(LABEL, value=0.1),
        replace(STEPS, labels=(0.0, None)),
        replace(COST, amount=2.0),
    ],
    ids=lambda record: type(record).__name__,
)
def test_an_id_with_other_content_is_refused(other: object, tmp_path: Path) -> None:
    with made(tmp_path / "a.db") as store:
        store.add(EVERY)
        with pytest.raises(KeelError, match=r"another .* has the id"):
            store.add([PromptRecord("new"), other])  # type: ignore[list-item]
        assert store.counts()["prompts"] == 1  # all or none


def test_what_records_refuse() -> None:
    for make, what in (
        (lambda: LabelRecord("p", 1.5, "human"), "value = 1.5"),
        (lambda: LabelRecord("p", float("nan"), "human"), "value = nan"),
        (lambda: LabelRecord("p", 1.0, "humans"), "did you mean 'human'"),  # type: ignore[arg-type]
        (lambda: LabelRecord("p", 1.0, "human", shown_first="left"), "'left'"),  # type: ignore[arg-type]
        (lambda: LabelRecord("p", 1.0, "human", cost=float("inf")), "cost = inf"),
        (lambda: StepsRecord("p", ("a",), (1.0, 0.0), "human"), "2 labels of 1 steps"),
        (lambda: StepsRecord("p", ("a",), (2.0,), "human"), "numbers from 0 to 1"),
        (lambda: CostRecord("", "api", 1.0, "dollars"), "id is empty"),
        (lambda: CostRecord("a", "tea", 1.0, "dollars"), "'tea'"),  # type: ignore[arg-type]
        (lambda: PromptRecord("p", {"a": {1}}), "no JSON"),
    ):
        with pytest.raises(KeelError, match=what):
            make()


def test_what_a_record_refers_to_must_be_there(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 1) as store:
        with pytest.raises(KeelError, match="a label refers to what is not there"):
            store.add([human("p0", 1.0), human("p7", 1.0)])
        assert store.counts()["labels"] == 0
        with pytest.raises(KeelError, match="lone surrogate"):
            store.add([PromptRecord("\ud800")])
        with pytest.raises(KeelError, match="1 pairs are not there"):
            store.set_priorities([("p0", 1.0), ("p7", 1.0)])


def test_queries_select(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 3) as store:
        store.add(pair(3, round=1))
        store.add([human("p0", 1.0), human("p1", None)])
        store.add([LabelRecord("p0", 0.2, "judge", "m", "kind", "v1", round=1)])

        def without(*arguments: str, **which: object) -> list[str]:
            return [p.id for p in store.unlabelled(*arguments, **which)]  # type: ignore[arg-type]

        assert without("human") == ["p2", "p3"]  # a skip is a label
        assert without("human", annotator="bob") == ["p0", "p1", "p2", "p3"]
        assert without("judge", rubric="kind") == ["p1", "p2", "p3"]
        assert without("judge", rubric="strict") == ["p0", "p1", "p2", "p3"]
        assert [p.id for p in store.pairs(round=1)] == ["p3"]
        assert [label.source for label in store.labels("p0")] == ["human", "judge"]
        assert [label.pair for label in store.labels(source="human")] == ["p0", "p1"]
        assert [label.pair for label in store.labels(annotator="m", round=1)] == ["p0"]
        assert [c.id for c in store.completions("q1")] == ["a1", "b1"]


def test_iterators_cross_pages(tmp_path: Path) -> None:
    count = PAGE + 1
    with made(tmp_path / "a.db") as store:
        store.add([PromptRecord(str(n)) for n in range(count)])
        assert [p.content for p in store.prompts()] == [str(n) for n in range(count)]


# ---------------------------------------------------------------- leases


def test_two_annotators_get_different_pairs(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 2) as store:
        one, two = (store.lease_next(who, 0.0, seconds=10) for who in ("ann", "bob"))
        assert one is not None
        assert two is not None
        assert (one.pair, two.pair) == ("p0", "p1")
        assert store.lease_next("cid", 9.9) is None
        # Whoever has a pair gets it again, for longer.
        again = store.lease_next("ann", 9.0, seconds=10)
        assert again == replace(one, expires=19.0)
        # Bob's expired and Ann's has not.
        third = leased(store, "cid", 10.0)
        assert third.pair == "p1"
        assert taken(store)
        with pytest.raises(KeelError, match="the lease of 'bob' expired"):
            store.submit(two, human("p1", 1.0, "bob"))
        assert store.counts()["labels"] == 0


def test_a_lease_is_used_once(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 1) as store:
        lease = leased(store, "ann", 0.0, seconds=1)
        label = human("p0", 1.0)
        with pytest.raises(KeelError, match="are not the lease's"):
            store.submit(lease, human("p0", 1.0, "bob"))
        with pytest.raises(KeelError, match="are not the lease's"):
            store.submit(lease, LabelRecord("p0", 1.0, "judge", "ann"))
        # No one else asked for the pair: work that took long is not lost.
        assert store.submit(lease, label)
        assert not store.submit(lease, label)  # an answer that was lost on the way is sent again
        with pytest.raises(KeelError, match="has labelled it: undo that first"):
            store.submit(lease, human("p0", 0.0))
        assert list(store.labels()) == [label]
        assert store.lease_next("ann", 5.0) is None
        assert store.lease_next("bob", 5.0) is None
        assert taken(store)


def test_overlap_asks_several_people(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 2) as store:
        for who in ("ann", "bob", "cid"):
            lease = leased(store, who, 0.0, overlap=2)
            assert lease.pair == ("p1" if who == "cid" else "p0")
            store.submit(lease, human(lease.pair, 1.0, who))
        assert store.lease_next("cid", 0.0) is None  # of overlap 1, all pairs have a label
        found = [store.lease_next("ann", 0.0, overlap=3), store.lease_next("cid", 0.0, overlap=3)]
        assert [lease and lease.pair for lease in found] == ["p1", "p0"]
        assert taken(store)


def test_the_order_is_priority_then_age(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 4) as store:
        store.add(pair(9, round=1))
        store.set_priorities([("p2", 5.0), ("p3", 5.0), ("p0", -1.0)])
        leases = [store.lease_next(f"a{n}", 0.0) for n in range(3)]
        assert [lease and lease.pair for lease in leases] == ["p2", "p3", "p1"]
        lease = leased(store, "x", 0.0, round=1)
        assert lease.pair == "p9"
        assert store.lease_next("y", 0.0, round=1) is None


def test_gold_is_leased_only_when_asked_for(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 3) as store:
        store.set_priorities([("p0", 9.0)])
        gold = {"gold": ["p2", "p0"]}
        for who in ("ann", "bob"):
            found = []
            for gold_next in (True, False, True, True):
                lease = store.lease_next(who, 0.0, overlap=2, gold_next=gold_next, **gold)
                found.append(lease and lease.pair)
                if lease is not None:
                    store.submit(lease, human(lease.pair, 1.0, who))
            # The gold pairs in their order; when both are labelled there is nothing else.
            assert found == ["p2", "p1", "p0", None]
        # Two people have them: a third gets gold, and nothing else.
        assert store.lease_next("cid", 0.0, overlap=2, **gold) is None
        lease = leased(store, "cid", 0.0, round=5, gold_next=True, **gold)
        assert lease.pair == "p2"
        again = leased(store, "cid", 1.0, round=5, **gold)
        assert again.id == lease.id
        assert taken(store)


def test_labels_of_others_fill_places_and_skips_do_not(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 2) as store:
        store.add([human("p0", 0.5, "imported"), LabelRecord("p1", 1.0, "judge")])
        lease = leased(store, "ann", 0.0)
        assert lease.pair == "p1"
        store.submit(lease, human("p1", None))
        assert store.lease_next("ann", 0.0) is None
        other = leased(store, "bob", 0.0)
        assert other.pair == "p1"
        # Bob has it now: Ann's skip goes, and the pair stays Bob's.
        undone = store.undo("ann", 0.0)
        assert undone is not None
        assert store.lease_next("ann", 0.0) is None
        assert store.submit(other, human("p1", 0.0, "bob"))
        assert taken(store)


def test_undo_shows_a_pair_of_another_round_again(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 1) as store:
        store.add(pair(1, round=2))
        lease = leased(store, "ann", 0.0, round=0)
        store.submit(lease, human("p0", 1.0))
        assert store.undo("ann", 1.0) == human("p0", 1.0)
        again = leased(store, "ann", 2.0, round=2)
        assert again.pair == "p0"


def test_undo_takes_back_the_last_label(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 3) as store:
        assert store.undo("ann", 0.0) is None
        for value in (1.0, 0.5):
            lease = leased(store, "ann", 0.0)
            store.submit(lease, human(lease.pair, value))
        store.add([human("p2", 1.0)])  # imported: no work to take back
        store.lease_next("bob", 0.0, overlap=2)
        assert store.undo("bob", 0.0) is None
        assert store.undo("ann", 1.0) == human("p1", 0.5)
        assert store.undo("ann", 2.0, seconds=5) == human("p0", 1.0)
        assert taken(store)
        first = leased(store, "ann", 3.0)
        assert first.pair == "p0"
        store.submit(first, human("p0", 0.0))
        second = leased(store, "ann", 3.0)
        assert second.pair == "p1"
        store.submit(second, human("p1", 0.5))  # as before: it is there again, once
        assert sorted(label.pair for label in store.labels()) == ["p0", "p1", "p2"]
        assert taken(store)


# ---------------------------------------------------------------- files that will not do


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "rows.jsonl"
    text.write_text('{"prompt": "p"}\n' * 100)
    empty = tmp_path / "empty"
    empty.touch()
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE prompts (a)")
    db.close()
    old = tmp_path / "old.db"
    made(old).close()
    with sqlite3.connect(old) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    for path, create, what in (
        (tmp_path / "none.db", False, "there is no such file"),
        (tmp_path / "no" / "a.db", True, "there is no folder"),
        (text, False, "it is not a store"),
        (empty, False, "it is not a store"),
        (tmp_path, False, "it is not a store"),
        (text, True, "not a database: name another file"),
        (other, True, "belongs to another program"),
        (old, False, "it is of version 99, and this Keel needs 2: name another file"),
    ):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(KeelError, match=what) as caught:
            PreferenceStore(path, create=create)
        assert "\n" not in str(caught.value)
        assert (path.read_bytes() if path.is_file() else None) == before


def test_a_locked_store_is_one_line(tmp_path: Path) -> None:
    made(tmp_path / "a.db", 1).close()
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with PreferenceStore(tmp_path / "a.db", timeout=0.01) as store:
        with pytest.raises(KeelError, match="locked: another process is writing to it: wait"):
            store.add([human("p0", 1.0)])
        assert store.counts()["pairs"] == 1  # reading goes on
        other.execute("ROLLBACK")
        assert store.add([human("p0", 1.0)]).get("labels", 0) == 1
    other.close()


def test_a_store_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    store = made(tmp_path / "a.db", 1)
    store.database.execute("PRAGMA query_only = ON")
    with pytest.raises(KeelError, match="readonly database: make the file and its folder writable"):
        store.add([human("p0", 1.0)])
    store.close()


def test_a_file_that_cannot_grow_loses_nothing(tmp_path: Path) -> None:
    store = made(tmp_path / "a.db", 1)
    big = LabelRecord("p0", 1.0, "human", note="x" * 300_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "a.db-wal").stat().st_size, hard))
    try:
        with pytest.raises(KeelError, match=r"preference store .*a.db cannot be used: ") as caught:
            store.add([human("p0", 0.0), big])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert store.counts()["labels"] == 0
    assert store.add([big]).get("labels", 0) == 1
    store.close()
