"""What annotators are shown and what is stored, without a browser."""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keel.preferences.annotation import (
    AnnotationProject,
    AnnotationSession,
    AnnotationSettings,
    ShownPair,
    add_gold,
    annotator_name,
    gold_labels,
    progress,
    read_rubric,
    summarise_annotation,
)
from keel.preferences.store import PreferenceStore
from keel.types import KeelError
from tests.preferences.made import human, made, pair, taken


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def session(
    store: PreferenceStore, name: str = "ann", clock: Clock | None = None, **settings: object
) -> AnnotationSession:
    time = clock or Clock()
    found = AnnotationSettings(**settings)  # type: ignore[arg-type]
    return AnnotationSession(store, found, gold_labels(store), name, clock=time, now=time)


def shown(one: AnnotationSession) -> ShownPair:
    found = one.current()
    assert found is not None
    return found


def write_gold(path: Path, count: int) -> Path:
    rows = [{"prompt": f"gold {n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- sides


def test_sides_are_shuffled_by_seed_annotator_and_pair(tmp_path: Path) -> None:
    sides: list[list[str | None]] = []
    for at, (name, seed) in enumerate((("ann", 0), ("bob", 0), ("ann", 1))):
        with made(tmp_path / f"{at}.db", 100) as store:
            one, found_sides = session(store, name, seed=seed), []
            while (found := one.current()) is not None:
                # A reload, or another server, shows the same.
                assert session(store, name, seed=seed).current() == found
                label = one.submit(found, "left")
                first = found.shown_first == "first"
                assert (found.left, found.right) == (("a", "b") if first else ("b", "a"))
                assert (label.shown_first, label.value) == (found.shown_first, float(first))
                found_sides.append(label.shown_first)
            assert 35 <= found_sides.count("first") <= 65
            sides.append(found_sides)
    for others in sides[1:]:
        assert 35 <= sum(a != b for a, b in zip(sides[0], others, strict=True)) <= 65


@pytest.mark.parametrize("name", ["ann", "bob"])
def test_each_choice_has_its_value(name: str, tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 12) as store:
        one = session(store, name)
        for choice in ("left", "right", "tie", "skip") * 3:
            found = shown(one)
            value = one.submit(found, choice).value  # type: ignore[arg-type]
            first = found.shown_first == "first"
            wanted = {"left": float(first), "right": float(not first), "tie": 0.5, "skip": None}
            assert value == wanted[choice]
        with pytest.raises(KeelError, match="choice = 'both'"):
            one.submit(found, "both")  # type: ignore[arg-type]


# ---------------------------------------------------------------- time, note, undo


def test_time_counts_while_a_window_shows_the_pair(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 3) as store:
        clock = Clock()
        one = session(store, clock=clock, wage=36.0)
        found = shown(one)
        clock.seconds += 100  # no window yet
        one.connect("tab 1")
        clock.seconds += 4
        one.connect("tab 2")
        one.disconnect("tab 1")
        clock.seconds += 3
        one.disconnect("tab 2")
        one.disconnect("tab 2")
        clock.seconds += 1000  # the browser is closed
        one.connect("tab 3")
        clock.seconds += 0.5
        label = one.submit(found, "tie")
        assert label.seconds == 7.5
        assert label.cost == pytest.approx(7.5 * 36 / 3600)
        assert label.at == clock.seconds
        found = shown(one)
        clock.seconds += 2
        assert one.submit(found, "left").seconds == 2
        assert session(store).settings.wage is None
        # Of a label that is taken back the time counts on.
        found = shown(one)
        clock.seconds += 9
        assert one.undo() is not None
        found = shown(one)
        clock.seconds += 5
        assert one.submit(found, "right").seconds == 2 + 5
        found = shown(one)
        assert one.submit(found, "left").seconds == 9


def test_note_is_stored_and_comes_back_by_undo(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 2) as store:
        one = session(store)
        one.set_note(shown(one), "  typed by mistake \n")
        assert shown(one).note == one.note(shown(one)) == "typed by mistake"
        assert one.submit(shown(one), "left").note == "typed by mistake"
        assert shown(one).note == ""
        undone = one.undo()
        assert undone is not None
        assert list(store.labels()) == []
        assert (shown(one).lease.pair, shown(one).note) == (undone.pair, "typed by mistake")
        one.set_note(shown(one), "")
        assert one.submit(shown(one), "left").note == ""
        with pytest.raises(KeelError, match="2,001 characters"):
            one.set_note(shown(one), "x" * 2001)
        assert one.undo() is not None
        assert one.undo() is None
        assert taken(store)


def test_two_windows_label_a_pair_once(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 2) as store:
        project = AnnotationProject(store, AnnotationSettings())
        one, two = project.session("ann"), project.session(" ann ")
        assert one is two
        found = shown(one)
        assert shown(two).lease.id == found.lease.id
        label = one.submit(found, "tie")
        assert two.submit(found, "tie").id == label.id
        with pytest.raises(KeelError, match="has labelled it"):
            two.submit(found, "left")
        assert [one.id for one in store.labels()] == [label.id]


def test_rubric_and_round_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "rubric.md"
    path.write_text("# Better\nis true", encoding="utf-8")
    rubric = read_rubric(path)
    with made(tmp_path / "a.db", 1) as store:
        store.add(pair(5, round=2))
        one = session(store, rubric=rubric, round=2)
        label = one.submit(shown(one), "left")
        assert (label.pair, label.round, label.rubric) == ("p5", 2, rubric.id)
        assert one.current() is None
    assert rubric.id.startswith("rubric.md sha256:")
    path.write_text("# Better\nis short", encoding="utf-8")
    assert read_rubric(path).id != rubric.id


# ---------------------------------------------------------------- several people


def test_threads_of_several_annotators_label_each_pair_once(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 60) as store:
        add_gold(store, write_gold(tmp_path / "gold.jsonl", 4), 0)
        project = AnnotationProject(store, AnnotationSettings(gold_rate=0.2))

        def work(name: str) -> int:
            one, count = project.session(name), 0
            while (found := one.current()) is not None:
                one.submit(found, "left")
                count += 1
            return count

        with ThreadPoolExecutor(6) as pool:
            counts = list(pool.map(work, [f"a{n}" for n in range(6)]))
        people = Counter(label.pair for label in store.labels(source="human"))
        regular = {f"p{n}" for n in range(60)}
        assert {pair: people[pair] for pair in regular} == dict.fromkeys(regular, 1)
        assert sum(people.values()) == sum(counts)
        assert taken(store)


def test_gold_is_mixed_in_at_its_rate_for_everyone(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 200) as store:
        assert add_gold(store, write_gold(tmp_path / "gold.jsonl", 80), 0) == 80
        assert add_gold(store, tmp_path / "gold.jsonl", 0) == 80  # again: nothing new
        gold = gold_labels(store)
        assert len(gold) == 80
        places: dict[str, list[int]] = {}
        for name in ("ann", "bob"):
            one = session(store, name, gold_rate=0.25, overlap=2)
            seen: list[str] = []
            while (found := one.current()) is not None:
                seen.append(one.submit(found, "tie").pair)
            places[name] = [at for at, pair in enumerate(seen) if pair in gold]
            assert len(set(seen)) == len(seen)
            assert len(seen) - len(places[name]) == 200
            assert 0.2 < len(places[name]) / len(seen) < 0.3
        assert places["ann"] != places["bob"]
        # At a rate of 0 none is shown, though it lacks labels.
        one = session(store, "cid", gold_rate=0.0, overlap=3)
        assert all(one.submit(shown(one), "tie").pair not in gold for _ in range(20))


def test_open_gold_pair_comes_back_whatever_its_round(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 3) as store:
        add_gold(store, write_gold(tmp_path / "gold.jsonl", 1), 7)
        store.add(pair(9, round=1))
        found = shown(session(store, gold_rate=1.0, round=1))
        assert found.lease.pair in gold_labels(store)
        assert shown(session(store, gold_rate=0.0, round=1)) == found


# ---------------------------------------------------------------- summary


def test_summary_counts_gold_agreement_and_progress(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 20) as store:
        add_gold(store, write_gold(tmp_path / "gold.jsonl", 4), 0)
        project = AnnotationProject(store, AnnotationSettings(overlap=2))
        for name in ("ann", "bob"):
            # Bob finds two of four known labels; they agree on "a" but for p0, a tie to him.
            store.add(
                human(pair, 1 - value if name == "bob" and at < 2 else value, name)
                for at, (pair, value) in enumerate(project.gold.items())
            )
            tie = name == "bob"
            store.add(human(f"p{n}", 0.5 if tie and n == 0 else 1.0, name) for n in range(20))
        found = summarise_annotation(project)
        assert (found.made, found.wanted) == (40, 40)
        by_name = {one["annotator"]: one for one in found.annotators}
        assert [(one["gold"].mean, one["gold"].n) for one in by_name.values()] == [(1, 4), (0.5, 4)]
        assert (found.gold.mean, found.gold.n) == (6 / 8, 8)
        assert [by_name[name]["ties"] for name in ("ann", "bob")] == [0, 1]
        assert by_name["ann"]["labels"] == 24
        (size,) = found.agreement
        # 20 pairs and 4 gold ones, of which they disagree on p0 and two of gold.
        assert size["pairs"] == 24
        assert size["pairwise"]["mean"] == pytest.approx(21 / 24)
        # A third label of a pair, or a skip, is one more of this person, and no more of the work.
        store.add([human("p1", None, "cid"), human("p2", 1.0, "cid")])
        at = progress(project, "cid")
        assert (at.made, at.wanted, at.own) == (40, 44, 2)
        at = progress(project, "ann")
        assert (at.made, at.wanted, at.own) == (44, 44, 24)


def test_empty_summary_has_no_figures(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", 2) as store:
        found = summarise_annotation(AnnotationProject(store, AnnotationSettings(round=3)))
        assert (found.made, found.wanted, found.annotators, found.agreement) == (0, 0, (), ())
        assert found.gold.n == 0


# ---------------------------------------------------------------- bad inputs


@pytest.mark.parametrize("name", ["", "  \n ", "x" * 61, "a\u202eb", "a\x00b"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(KeelError, match="the name"):
        annotator_name(name)


def test_a_rubric_has_a_longest_length(tmp_path: Path) -> None:
    (tmp_path / "rubric.md").write_bytes(b"x" * 100_001)
    with pytest.raises(KeelError, match="100,001"):
        read_rubric(tmp_path / "rubric.md")


def test_an_unwritten_label_can_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    made(path, 1).close()
    with PreferenceStore(path, timeout=0.05) as store, PreferenceStore(path) as other:
        clock = Clock()
        one = session(store, clock=clock)
        found = shown(one)
        one.connect("tab")
        one.set_note(found, "kept")
        clock.seconds += 2
        with other.database.transaction():
            with pytest.raises(KeelError, match="another process is writing"):
                one.submit(found, "left")
            one.connect("second tab")  # does not wait for the store
        clock.seconds += 3
        label = one.submit(shown(one), "left")
        assert (label.note, label.seconds) == ("kept", 5)
        assert [one.id for one in store.labels()] == [label.id]


def test_a_rubric_may_come_through_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "rubric.md").write_text("short answers\n")
    read, write = os.pipe()
    os.write(write, b"short answers\n")
    os.close(write)
    piped, file = read_rubric(Path(f"/dev/fd/{read}")), read_rubric(tmp_path / "rubric.md")
    os.close(read)
    assert piped.text == "short answers"
    assert piped.id.split()[-1] == file.id.split()[-1]
