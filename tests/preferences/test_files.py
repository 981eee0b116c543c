"""Files of every kind into the store and out again; what does not parse is listed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import LABEL_SOURCES, PREFERENCE_KINDS
from keel.config.sources import PreferenceData
from keel.data.preferences import read_pairs, read_steps
from keel.preferences.files import (
    BATCH,
    READERS,
    Attribution,
    ImportReport,
    Selection,
    import_file,
    mean_label,
    preference_rows,
    steps_rows,
    write_left_out,
    write_rows,
)
from keel.preferences.records import SOURCES, LabelRecord
from keel.preferences.store import PreferenceStore
from keel.types import KeelError
from tests.data.made import jsonl
from tests.preferences.made import human, made, pair

CHAT = [{"role": "user", "content": "Hi"}]
TRL: list[dict[str, Any]] = [
    {"prompt": "p0", "chosen": "yes", "rejected": "no"},
    {"prompt": "p1", "chosen": "yes", "rejected": "no", "probability": 0.7, "margin": 1.5},
    {"prompt": "p2", "chosen": "yes", "rejected": "no", "probability": 0.3, "margin": -0.5},
    {"prompt": "p3", "chosen": "yes", "rejected": "no", "probability": 0.5},
    {"prompt": CHAT, "chosen": "Hello é", "rejected": "Bye", "id": "a", "tags": ["x"]},
]
Rows = list[dict[str, Any]]


def imported(
    folder: Path, kind: str, rows: Sequence[Any] | Path, name: str = "a", **by: Any
) -> tuple[PreferenceStore, ImportReport]:
    store = made(folder / f"{name}.db")
    if not isinstance(rows, Path):
        rows = Path(jsonl(folder / f"{name}.jsonl", rows))
    return store, import_file(store, kind, rows, Attribution(**by))


def exported(store: PreferenceStore, **selection: Any) -> Rows:
    """The rows, without the hashes that name them."""
    return [
        {k: v for k, v in row.items() if k != "id" or len(v) < 32}
        for row in preference_rows(store, Selection(**selection))
    ]


def contents(store: PreferenceStore) -> list[Any]:
    iterators = (store.prompts(), store.completions(), store.pairs(), store.labels(), store.steps())
    return [list(found) for found in iterators]


def test_the_command_line_knows_every_kind() -> None:
    assert sorted(PREFERENCE_KINDS) == sorted(READERS)
    assert LABEL_SOURCES == SOURCES


# ---------------------------------------------------------------- TRL


def test_rows_of_trl(tmp_path: Path) -> None:
    store, report = imported(tmp_path, "trl", TRL, source="judge", annotator="m", round=3)
    added = {"prompts": 5, "completions": 10, "pairs": 5, "labels": 5}
    assert (report.rows, report.left_out, report.added) == (5, (), added)
    assert {(label.source, label.annotator, label.round) for label in store.labels()} == {
        ("judge", "m", 3)
    }
    rows = exported(store)
    certain = {"prompt": "p0", "chosen": "yes", "rejected": "no", "probability": 1.0}
    assert rows[0] == certain
    assert rows[1] == {**certain, "prompt": "p1", "probability": 0.7, "margin": 1.5}
    # The preferred answer is the chosen one.
    swapped = {"chosen": "no", "rejected": "yes", "probability": 0.7, "margin": 0.5}
    assert rows[2] == {"prompt": "p2", **swapped}
    assert {rows[3]["chosen"], rows[3]["rejected"]} == {"yes", "no"}
    assert rows[3]["probability"] == 0.5
    assert rows[4] == {**TRL[4], "probability": 1.0}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_trl_round_trip(ending: str, tmp_path: Path) -> None:
    # A Parquet column has one type.
    rows = TRL if ending == "jsonl" else TRL[:4]
    one, _ = imported(tmp_path, "trl", rows)
    out = tmp_path / f"out.{ending}"
    assert write_rows(out, preference_rows(one)) == len(rows)
    two, report = imported(tmp_path, "trl", out, "b")
    assert report.left_out == ()
    assert contents(two) == contents(one)
    assert list(preference_rows(two)) == list(preference_rows(one))
    # And the trainer's reader takes it.
    splits = read_pairs(PreferenceData(name=ending, path=str(out)))
    assert len(splits.train) + len(splits.validation) == len(rows)


def test_parquet_refuses_a_column_of_two_types(tmp_path: Path) -> None:
    store, _ = imported(tmp_path, "trl", TRL)
    with pytest.raises(KeelError, match=r"values of several types .*: name a .jsonl file"):
        write_rows(tmp_path / "out.parquet", preference_rows(store))
    assert not (tmp_path / "out.parquet").exists()


def test_the_side_does_not_tell_the_winner(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "chosen": "yes", "rejected": "no"} for n in range(64)]
    store, _ = imported(tmp_path, "trl", rows)
    first = sum(label.value == 1.0 for label in store.labels())
    # 64 fair coins: outside with probability 2e-4; the ids are hashes, so that this never varies.
    assert 17 < first < 47


def test_rows_that_disagree_are_labels_of_one_pair(tmp_path: Path) -> None:
    rows = [TRL[0], TRL[0], {**TRL[0], "chosen": "no", "rejected": "yes"}]
    store, report = imported(tmp_path, "trl", rows)
    assert report.added == {"prompts": 1, "completions": 2, "pairs": 1, "labels": 2}
    assert report.repeated == 1
    assert exported(store)[0]["probability"] == 0.5


def test_import_again_adds_nothing(tmp_path: Path) -> None:
    rows = [{**TRL[1], "prompt": f"p{n}"} for n in range(BATCH + 1)]
    store, first = imported(tmp_path, "trl", rows)
    before = contents(store)
    again = import_file(store, "trl", tmp_path / "a.jsonl", Attribution())
    assert set(again.added.values()) == {0}
    assert again.repeated == first.rows == BATCH + 1
    assert first.repeated == 0
    assert contents(store) == before


def test_what_does_not_parse_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [
        json.dumps(TRL[0]),
        "{",
        json.dumps({"prompt": "p", "chosen": "a"}),
        json.dumps({"prompt": "p", "chosen": "a", "rejected": " "}),
        json.dumps({"prompt": "p", "chosen": "a", "rejected": "a"}),
    ]
    path.write_text("\n".join(lines))
    store, report = imported(tmp_path, "trl", path)
    assert report.rows == 1
    assert [(left.line, left.why) for left in report.left_out] == [
        *((2, "bad"), (3, "bad"), (4, "empty"), (5, "bad"))
    ]
    listed = write_left_out(store.path, path, report)
    assert listed is not None
    assert listed.parent == tmp_path / "a.db.quarantine"
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [row["line"] for row in found] == [2, 3, 4, 5]
    assert found[1]["source"] == str(path)
    assert found[1]["reason"].startswith(f"{path}:3: unknown column 'rejected'")
    assert found[1]["row"] == {"prompt": "p", "chosen": "a"}
    # A file that was fixed has no list any more.
    path.write_text(lines[0])
    fixed = import_file(store, "trl", path, Attribution())
    assert write_left_out(store.path, path, fixed) is None
    assert not listed.exists()
    path.write_text(lines[2])
    with pytest.raises(KeelError, match="no row of 1 can be read"):
        import_file(store, "trl", path, Attribution())


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(TRL[0]).encode()))
    store, _ = imported(tmp_path, "trl", path)
    assert store.counts()["pairs"] == 1
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(KeelError, match="cannot be read"):
        import_file(store, "trl", path, Attribution())


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_steps_round_trip(ending: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completions": ["a", "b"], "labels": [True, None], "id": "x"},
        {"prompt": "p", "steps": ["a", "c"], "first_error": 1},
    ]
    one, report = imported(tmp_path, "steps", rows)
    assert report.added == {"prompts": 1, "steps": 2}
    assert [record.labels for record in one.steps()] == [(1.0, None), (1.0, 0.0)]
    out = tmp_path / f"out.{ending}"
    assert write_rows(out, steps_rows(one)) == 2
    two, _ = imported(tmp_path, "steps", out, "b")
    assert contents(two) == contents(one)
    assert list(steps_rows(two)) == list(steps_rows(one))
    splits = read_steps(PreferenceData(name=ending, path=str(out)))
    assert len(splits.train) + len(splits.validation) == 2
    assert list(steps_rows(one, Selection(sources=["judge"]))) == []


# ---------------------------------------------------------------- published forms


def hh(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[n % 2]}: {text}" for n, text in enumerate(turns))


def test_hh_is_cut_at_the_last_common_turn(tmp_path: Path) -> None:
    rows = [
        {
            "chosen": hh("Hi", "Hello", "Why?", "So be it"),
            "rejected": hh("Hi", "Hello", "Why?", "So"),
        },
        {"chosen": hh("Hi", "A"), "rejected": hh("Hi", "B", "And?", "C")},
        {"chosen": hh("Hi", "A"), "rejected": hh("Ho", "A")},
        {"chosen": hh("Hi", "A"), "rejected": hh("Hi", "A")},
        {"chosen": "Hi", "rejected": "Ho"},
        {"chosen": hh("Hi", "A"), "rejected": hh("Hi", "")},
        {"chosen": f"System{hh('Hi', 'A')}", "rejected": f"System{hh('Hi', 'B')}"},
        {"chosen": "Assistant: A", "rejected": None},
    ]
    store, report = imported(tmp_path, "hh", rows)
    roles = ["user", "assistant", "user"]
    turns = [
        {"role": role, "content": text}
        for role, text in zip(roles, ["Hi", "Hello", "Why?"], strict=True)
    ]
    row = {"prompt": turns, "chosen": "So be it", "rejected": "So", "probability": 1.0}
    assert exported(store) == [row]
    assert [left.why for left in report.left_out] == [*["bad"] * 4, "empty", "bad", "bad"]
    reasons = [left.reason for left in report.left_out]
    assert "the transcripts differ before their last turn" in reasons[0]
    assert "it shares no '\\n\\nAssistant:' with 'chosen'" in reasons[1]
    assert "it is the same as 'chosen'" in reasons[2]
    assert "begins with '\\n\\nHuman:'" in reasons[5]


def test_ultrafeedback_compares_every_two_completions(tmp_path: Path) -> None:
    def one(model: str, text: str, fine: float | None, overall: float) -> dict[str, Any]:
        score = {} if fine is None else {"fine-grained_score": fine}
        return {"model": model, "response": text, "overall_score": overall, **score}

    answers = [one("m", "best", 5.0, 1.0), one("n", "worst", 1.5, 9.0), one("o", "even", 1.5, 8.0)]
    rows = [
        {"instruction": "Say", "source": "x", "completions": answers},
        {"instruction": "Do", "completions": [one("m", "a", None, 2.0), one("n", "b", None, 7.0)]},
        {"instruction": "Go", "completions": [one("m", "a", 1.0, 2.0), {"response": "b"}]},
        {"instruction": "Go", "completions": "none"},
        {"instruction": "Go", "completions": answers[:1]},
    ]
    store, report = imported(tmp_path, "ultrafeedback", rows, source="judge", annotator="gpt-4")
    assert [left.line for left in report.left_out] == [3, 4, 5]
    assert "completion 2: unknown column 'fine-grained_score'" in report.left_out[0].reason
    found = {frozenset((r["chosen"], r["rejected"])): r for r in exported(store)}
    assert found[frozenset(("best", "worst"))]["chosen"] == "best"
    assert found[frozenset(("best", "even"))]["probability"] == 1.0
    assert found[frozenset(("worst", "even"))]["probability"] == 0.5
    assert found[frozenset("ab")]["chosen"] == "b"
    assert len(found) == 4
    assert {(c.model, c.columns["score"]) for c in store.completions()} >= {("m", 5.0), ("n", 7.0)}
    assert {(label.source, label.annotator) for label in store.labels()} == {("judge", "gpt-4")}


def test_ultrafeedback_binarized(tmp_path: Path) -> None:
    def chat(text: str) -> list[dict[str, str]]:
        return [*CHAT, {"role": "assistant", "content": text}]

    row = {"prompt": "Hi", "chosen": chat("A"), "rejected": chat("B"), "messages": chat("A")}
    rows = [
        {**row, "score_chosen": 8.0, "score_rejected": 3.5},
        {**row, "rejected": chat("C"), "score_chosen": 8.0, "score_rejected": 8.0},
        {**row, "score_chosen": None, "score_rejected": 3.5},
    ]
    store, report = imported(tmp_path, "ultrafeedback", rows)
    assert exported(store)[0] == {
        **{"prompt": CHAT, "chosen": "A", "rejected": "B", "probability": 1.0}
    }
    assert exported(store)[1]["probability"] == 0.5
    assert "column 'score_chosen' = None" in report.left_out[0].reason


def test_helpsteer_pairs_responses_by_helpfulness(tmp_path: Path) -> None:
    def row(prompt: str, response: str, helpfulness: int) -> dict[str, Any]:
        rest = dict.fromkeys(("correctness", "coherence", "complexity", "verbosity"), 2)
        return {"prompt": prompt, "response": response, "helpfulness": helpfulness, **rest}

    several = "A\n\n<extra_id_1>Assistant\nB\n<extra_id_1>User\nC"
    rows = [row("p", "good", 4), row("q", "alone", 1), row("p", "poor", 1), row("p", "fine", 4)]
    rows += [row(several, "x", 0), row(several, "y", 3), {**row("p", "z", 1), "helpfulness": "4"}]
    store, report = imported(tmp_path, "helpsteer", rows)
    found = {frozenset((r["chosen"], r["rejected"])): r for r in exported(store)}
    assert set(map(tuple, map(sorted, found))) == {
        *(("good", "poor"), ("fine", "poor"), ("fine", "good"), ("x", "y"))
    }
    assert found[frozenset(("good", "poor"))]["chosen"] == "good"
    assert found[frozenset(("fine", "good"))]["probability"] == 0.5
    assert found[frozenset("xy")]["chosen"] == "y"
    assert found[frozenset("xy")]["prompt"] == [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant", "user"], "ABC", strict=True)
    ]
    assert report.added["completions"] == 6  # the one alone too
    assert [left.line for left in report.left_out] == [7]


def test_helpsteer_preferences_are_soft(tmp_path: Path) -> None:
    two = {"prompt": "p", "response_1": "a", "response_2": "b", "preference_strength": -3}
    three = {"context": CHAT, "response1": "a", "response2": "b", "overall_preference": 1}
    rows = [two, three, {**two, "preference_strength": 4}, {**three, "overall_preference": 0}]
    store, report = imported(tmp_path, "helpsteer-preference", rows)
    found = exported(store)
    assert (found[0]["chosen"], found[0]["probability"]) == ("a", 1.0)
    assert found[0]["preference_strength"] == -3.0
    # Two labels of one pair: 2/3 for b, and a tie.
    assert (found[1]["prompt"], found[1]["chosen"]) == (CHAT, "b")
    assert found[1]["probability"] == pytest.approx((2 / 3 + 0.5) / 2, abs=1e-15)
    assert "give a number from -3 to 3" in report.left_out[0].reason
    sides = {
        store.judged_pair(label.pair).first.text: label.shown_first for label in store.labels()
    }
    assert all(side == ("first" if text == "a" else "second") for text, side in sides.items())


# ---------------------------------------------------------------- real files


# ---------------------------------------------------------------- aggregation


def test_export_is_the_mean_of_the_labels_that_count(tmp_path: Path) -> None:
    store = made(tmp_path / "a.db")
    for number in range(4):
        store.add(pair(number))
    labels = [
        *(human("p0", 1.0), human("p0", 0.0, "bob"), human("p0", None, "cid")),
        LabelRecord("p0", 0.25, "judge", "m", margin=-2.0, round=1),
        *(human("p1", None), LabelRecord("p2", 0.0, "rule", "r")),
    ]
    store.add(labels)
    assert mean_label([]) is None
    assert mean_label(labels[:1]) == (1.0, 0.0)

    def shares(**which: Any) -> dict[str, tuple[str, float]]:
        rows = preference_rows(store, Selection(**which))
        return {row["id"]: (row["chosen"], row["probability"]) for row in rows}

    assert shares()["p0"] == ("b", pytest.approx(1 - 1.25 / 3, abs=1e-15))
    assert set(shares()) == {"p0", "p2"}  # a skip is no preference
    assert shares(sources=["human"]) == {"p0": ("a", 0.5)}
    assert shares(rounds=[1]) == {"p0": ("b", 0.75)}
    assert shares(annotators=["ann", "r"]) == {"p0": ("a", 1.0), "p2": ("b", 1.0)}
    assert shares(sources=["reward_model"]) == {}
    (row,) = preference_rows(store, Selection(sources=["judge"]))
    assert row["margin"] == 2.0
    with pytest.raises(KeelError, match="nothing to write"):
        write_rows(tmp_path / "out.jsonl", [])
