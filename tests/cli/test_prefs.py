"""`keel prefs`: import, export and statistics of a store, and what they refuse."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.cli.main import main
from keel.preferences.records import CostRecord, LabelRecord
from keel.preferences.store import PreferenceStore
from tests.cli.test_wrong_inputs import tried
from tests.data.tasks.made import jsonl
from tests.preferences.made import human, made

Capture = pytest.CaptureFixture[str]
PAIRS = [{"prompt": f"p{n}", "chosen": "yes, so it is", "rejected": "no"} for n in range(4)]


def printed(words: list[str], capsys: Capture) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "rows.jsonl", [*PAIRS, {"prompt": "p"}])
    return tmp_path


def test_import_into_a_store(here: Path, capsys: Capture) -> None:
    words = ["prefs", "import", "trl", "rows.jsonl", "--store", "a.db"]
    more = ["--source", "judge", "--annotator", "m", "--round", "2"]
    result = printed([*words, *more], capsys)
    quarantine = result.pop("quarantine")
    assert result == {
        **{"store": "a.db", "rows": 4, "left_out": 1, "repeated": 0},
        "added": {"prompts": 4, "completions": 8, "pairs": 4, "labels": 4},
    }
    assert json.loads(Path(quarantine).read_text())["line"] == 5
    with PreferenceStore(here / "a.db") as store:
        (label, *_) = store.labels()
    assert (label.source, label.annotator, label.round) == ("judge", "m", 2)
    assert main([*words, *more]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.db: 4 rows read; new: 0 prompts, 0 completions, 0 pairs, 0 labels",
        "there already, or twice in the file: 4 labels",
        f"left out: 1 that cannot be read, listed in {quarantine}",
    ]


def test_export_selects_labels(here: Path, capsys: Capture) -> None:
    with made(here / "a.db", 3) as store:
        store.add([human("p0", 1.0), human("p1", 0.0, "bob"), human("p2", None)])
        store.add([LabelRecord("p1", 0.75, "judge", "m", round=1)])
    words = ["prefs", "export", "a.db", "--out"]
    assert printed([*words, "all.jsonl"], capsys) == {"out": "all.jsonl", "rows": 2}
    rows = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [(row["id"], row["chosen"], row["probability"]) for row in rows] == [
        *(("p0", "a", 1.0), ("p1", "b", 0.625))
    ]
    for options, count in (
        (["--source", "human"], 2),
        (["--source", "judge", "--source", "rule"], 1),
        (["--round", "1"], 1),
        (["--annotator", "bob"], 1),
        (["--annotator", "bob", "--round", "0", "--source", "human"], 1),
    ):
        out = "-".join(("out", *options)) + ".parquet"
        assert printed([*words, out, *options], capsys)["rows"] == count
    assert main([*words, "text.jsonl"]) == 0
    assert capsys.readouterr().out == "text.jsonl: 2 rows\n"
    assert "nothing to write" in tried([*words, "x.jsonl", "--source", "rule"], capsys)
    assert "nothing to write" in tried([*words, "x.jsonl", "--steps"], capsys)
    assert "is there already" in tried([*words, "all.jsonl"], capsys)
    assert "there is no folder" in tried([*words, "no/x.jsonl"], capsys)
    assert "cannot write /proc/x.jsonl" in tried([*words, "/proc/x.jsonl"], capsys)


def test_steps_through_the_command_line(here: Path, capsys: Capture) -> None:
    rows = [{"prompt": "p", "completions": ["a", "b"], "labels": [1, 0]}]
    path = jsonl(here / "steps.jsonl", rows)
    assert printed(["prefs", "import", "steps", path, "--store", "a.db"], capsys)["rows"] == 1
    assert (
        printed(["prefs", "export", "a.db", "--steps", "--out", "out.jsonl"], capsys)["rows"] == 1
    )
    assert json.loads(Path("out.jsonl").read_text()) == rows[0]


def test_stats_of_a_store(here: Path, capsys: Capture) -> None:
    with made(here / "a.db", 4) as store:
        for number in range(3):
            store.add([human(f"p{number}", 1.0), human(f"p{number}", 1.0, "bob")])
        took: dict[str, Any] = {"seconds": 4.0, "cost": 0.5}
        store.add([LabelRecord("p3", 0.5, "human", "ann", **took)])
        store.add([LabelRecord("p3", 0.9, "human", "bob", **{**took, "seconds": 8.0})])
        store.add([LabelRecord("p3", None, "judge", "m", round=1)])
        store.add([CostRecord("a", "api", 1.5, "dollars"), CostRecord("b", "api", 1, "dollars")])
        store.add([CostRecord("c", "gpu", 2.0, "hours", forecast=True)])
    (found,) = printed(["prefs", "stats", "a.db"], capsys)
    assert (found["pairs"], found["labels"], found["costs"]) == (4, 9, 3)
    by = found["labels_by"]
    assert by["source"] == [
        {
            **{"source": "human", "labels": 8, "ties": 1, "skips": 0},
            **{"seconds_per_label": 6.0, "cost": 1.0, "sided": 0, "first_shown": 0},
        },
        {
            **{"source": "judge", "labels": 1, "ties": 0, "skips": 1},
            **{"seconds_per_label": None, "cost": None, "sided": 0, "first_shown": 0},
        },
    ]
    assert [(row["source"], row["annotator"], row["labels"]) for row in by["annotator"]] == [
        *(("human", "ann", 4), ("human", "bob", 4), ("judge", "m", 1))
    ]
    assert [(row["round"], row["labels"]) for row in by["round"]] == [(0, 8), (1, 1)]
    # Three pairs of people agree, and a tie is not the first answer.
    (size,) = found["agreement"]["human"]
    assert (size["pairs"], size["judges"], size["pairwise"]["mean"]) == (4, 2, 0.75)
    assert list(found["agreement"]) == ["human"]
    assert main(["prefs", "stats", "a.db"]) == 0
    text = capsys.readouterr().out
    assert "  source human                     8 labels, 1 ties, 0 skips, 6.0 s a label, $1" in text
    assert "  human, 2 labels a pair: 4 pairs, 0.750 [" in text


def test_stats_of_rows(tmp_path: Path, capsys: Capture) -> None:
    rows = [*PAIRS, PAIRS[0], {**PAIRS[0], "rejected": ""}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = printed(["prefs", "stats", path, str(tmp_path / "rows.parquet")], capsys)
    assert [one.pop("file") for one in found] == [path, str(tmp_path / "rows.parquet")]
    assert found[0] == found[1]
    assert (found[0]["rows"], found[0]["repeated"], found[0]["prompts"]) == (6, 1, 4)
    assert (found[0]["labelled"]["pairs"], found[0]["labelled"]["empty"]) == (5, 1)
    assert main(["prefs", "stats", path, path]) == 0
    text = capsys.readouterr().out
    # Four prompts that all say 1: 4 / (4 + t²) with Student's t of three degrees, 3.182.
    assert text.count("  longer preferred  1.000 [0.283, 1.000]") == 2
    assert "  rows                     6   1 repeated" in text


def test_what_the_commands_refuse(here: Path, capsys: Capture) -> None:
    trl = ["prefs", "import", "trl", "rows.jsonl"]
    (here / "a.json").write_text("[]")
    for words, what in (
        (["prefs"], "arguments are required: ACTION"),
        (trl, "arguments are required: --store"),
        (["prefs", "import", "panda", "x"], "invalid choice: 'panda'"),
        ([*trl, "--store", "no/a.db"], "there is no folder"),
        ([*trl, "--store", "rows.jsonl"], "file is not a database"),
        ([*trl, "--store", "a.db", "--round", "-1"], "-1"),
        (["prefs", "import", "trl", "none.jsonl", "--store", "a.db"], "there is no such file"),
        (["prefs", "export", "none.db", "--out", "x"], "there is no such file"),
        (["prefs", "export", "rows.jsonl", "--out", "x"], "it is not a store"),
        (["prefs", "stats", "x.jsonl"], "there is no such file"),
        (["prefs", "stats", "a.json"], "run keel prefs import into a store first"),
        (["prefs", "stats", "."], "run keel prefs import into a store first"),
        (["prefs", "stats", "rows.jsonl"], "rows.jsonl:5: unknown column 'chosen'"),
    ):
        assert what in tried(words, capsys), words
    assert sorted(path.name for path in here.iterdir()) == ["a.json", "rows.jsonl"]
    with sqlite3.connect(here / "other.db") as db:
        db.execute("CREATE TABLE a (b)")
    db.close()
    assert "belongs to another program" in tried(["prefs", "stats", "other.db"], capsys)
