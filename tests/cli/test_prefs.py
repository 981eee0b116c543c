"""`keel prefs` on a store: what its actions print, write and refuse."""

from __future__ import annotations

import json
import random
import socket
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from keel.cli.main import main
from keel.models.reward import reward_model_from
from keel.platform.extras import install_command
from keel.platform.listen import TOKEN
from keel.preferences.records import (
    CompletionRecord,
    CostRecord,
    LabelRecord,
    StepsRecord,
)
from keel.preferences.store import PreferenceStore
from tests.cli.test_wrong_inputs import tried
from tests.data.made import jsonl
from tests.models import tiny
from tests.preferences.made import human, made, pair

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
    for (out, *options), what in (
        (["x.jsonl", "--source", "rule"], "nothing to write"),
        (["x.jsonl", "--steps"], "nothing to write"),
        (["all.jsonl"], "is there already"),
        (["no/x.jsonl"], "there is no folder"),
        (["/proc/x.jsonl"], "cannot write /proc/x.jsonl"),
    ):
        assert what in tried([*words, out, *options], capsys)


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
    names = ("source", "labels", "ties", "skips", "seconds_per_label", "cost", "sided")
    assert [tuple(row[name] for name in names) for row in by["source"]] == [
        ("human", 8, 1, 0, 6.0, 1.0, 0),
        ("judge", 1, 0, 1, None, None, 0),
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


def spent(path: Path) -> None:
    """Two rounds: labels of four sources, completions, steps, and entries of the ledger."""
    with made(path, 4) as store:
        human: dict[str, Any] = {"source": "human", "seconds": 90.0, "cost": 0.5}
        store.add([LabelRecord(f"p{n}", 1.0, annotator="ann", **human) for n in range(3)])
        store.add([LabelRecord("p3", None, "human", "ann", seconds=30.0)])  # a skip
        store.add([LabelRecord("p0", 1.0, "judge", "m", round=1, cost=0.02, seconds=3.0)])
        store.add([LabelRecord("p1", 0.0, "judge", "m", round=1, cost=0.03)])
        store.add([LabelRecord("p2", 1.0, "reward_model", "r", round=1, seconds=7200.0)])
        store.add([CompletionRecord("q0", "c", "m", round=1, cost=0.25, seconds=9.0)])
        store.add([StepsRecord("q0", ("a",), (1.0,), "judge", round=1, cost=0.05)])
        store.add(
            [
                CostRecord("f1", "api", 2.0, "dollars", "judging", 1, forecast=True),
                CostRecord("f2", "human", 3.0, "hours", "labels", 0, forecast=True),
                CostRecord("a1", "gpu", 1.5, "hours", "reward model", 1),
                CostRecord("a2", "gpu", 4.5, "dollars", "reward model", 1),
            ]
        )


def test_each_amount_is_in_one_cell(here: Path, capsys: Capture) -> None:
    spent(here / "a.db")
    found = printed(["prefs", "costs", "a.db"], capsys)
    table = {(row.pop("round"), row.pop("kind")): row for row in found["table"]}
    # Round 0: three labels at $0.50 of 90 s each, and 30 s of a skip.
    assert table[0, "human"] == {
        **{"forecast_dollars": None, "actual_dollars": pytest.approx(1.5)},
        **{"forecast_hours": 3.0, "actual_hours": pytest.approx(300 / 3600)},
    }
    # Round 1: judge 0.02 + 0.03, completion 0.25, steps 0.05. Seconds of an API are no hours.
    assert table[1, "api"] == {
        **{"forecast_dollars": 2.0, "actual_dollars": pytest.approx(0.35)},
        **{"forecast_hours": None, "actual_hours": None},
    }
    # The reward model's own two hours of labelling and an entry of 1.5 hours.
    assert table[1, "gpu"]["actual_hours"] == pytest.approx(3.5)
    assert table[1, "gpu"]["actual_dollars"] == 4.5
    assert set(table) == {
        *((0, "api"), (0, "human"), (1, "api"), (1, "gpu")),
        *((None, "api"), (None, "human"), (None, "gpu"), (None, None)),
    }
    every = table[None, None]
    assert every["actual_dollars"] == pytest.approx(1.5 + 0.35 + 4.5)
    assert (every["forecast_dollars"], every["actual_hours"]) == (2.0, None)
    for name in ("forecast_dollars", "actual_dollars"):
        kinds = [table[None, kind][name] or 0 for kind in ("api", "human", "gpu")]
        assert sum(kinds) == pytest.approx(every[name])
        rounds = [row[name] or 0 for (round, _), row in table.items() if round is not None]
        assert sum(rounds) == pytest.approx(every[name])
    assert main(["prefs", "costs", "a.db"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "round  kind     forecast $     actual $   forecast h     actual h"
    assert "    1  api            2.00         0.35            –            –" in lines
    assert "    0  human             –         1.50        3.000        0.083" in lines
    assert "  round 1, api, actual: $0.05, 2 labels by judge" in lines
    assert "  round 1, gpu, actual: $4.50, 1.500 h, 2 entries for reward model" in lines


def test_entries_by_hand_are_counted_once(here: Path, capsys: Capture) -> None:
    made(here / "a.db", 1).close()
    words = ["prefs", "costs", "a.db", "--add", "fee", "--kind", "human", "--amount", "12.5"]
    more = ["--purpose", "platform", "--round", "2"]
    for added in (1, 0):
        found = printed([*words, *more], capsys)
        assert found["added"] == added
        assert found["table"][-1]["actual_dollars"] == 12.5
    with PreferenceStore(here / "a.db") as store:
        (entry,) = store.costs()
    assert entry == CostRecord("fee", "human", 12.5, "dollars", "platform", 2)
    assert "another cost has the id 'fee'" in tried([*words[:-1], "13", *more], capsys)
    hours = ["prefs", "costs", "a.db", "--add", "g", "--kind", "gpu", "--amount", "2"]
    assert main([*hours, "--unit", "hours", "--forecast"]) == 0
    assert "added 1 entry" in capsys.readouterr().out
    row = printed(["prefs", "costs", "a.db"], capsys)["table"][-2]
    assert (row["kind"], row["forecast_hours"], row["actual_hours"]) == ("gpu", 2.0, None)


def test_what_costs_refuses(here: Path, capsys: Capture) -> None:
    made(here / "a.db").close()
    costs = ["prefs", "costs"]
    assert main([*costs, "a.db"]) == 0
    assert "nothing is recorded" in capsys.readouterr().out
    for words, what in (
        (costs, "STORE"),
        ([*costs, "none.db"], "there is no such file"),
        ([*costs, "a.db", "--kind", "api"], "--kind is of an entry that is added: give --add ID"),
        ([*costs, "a.db", "--forecast"], "--forecast is of an entry"),
        ([*costs, "a.db", "--add", "x", "--kind", "api"], "--add x: give --amount too"),
        ([*costs, "a.db", "--add", "x", "--amount", "1"], "--add x: give --kind too"),
        ([*costs, "a.db", "--add", "", "--kind", "api", "--amount", "1"], "id is empty"),
        ([*costs, "a.db", "--add", "x", "--kind", "api", "--amount", "-1"], "--amount"),
        ([*costs, "a.db", "--add", "x", "--kind", "api", "--amount", "inf"], "--amount"),
    ):
        assert what in tried(words, capsys), words
    with PreferenceStore(here / "a.db") as store:
        assert store.counts()["costs"] == 0


def test_select_prints_and_writes(here: Path, capsys: Capture) -> None:
    made(here / "a.db", 30).close()
    words = ["prefs", "select", "a.db", "--count", "25", "--out", "chosen.jsonl"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "a.db: 0 labelled pairs to learn from, 30 without a person's label to choose from",
        "by random",
    ]
    assert sum(line.startswith("p") and line.endswith("–") for line in lines) == 20
    assert lines[-3:] == [
        "… and 5 more (--out FILE, --json)",
        "25 pairs are first in people's queue, in this order",
        "chosen.jsonl: 25 rows",
    ]
    rows = [json.loads(line) for line in Path("chosen.jsonl").read_text().splitlines()]
    assert [row["priority"] for row in rows] == list(range(25, 0, -1))
    again = printed(words[:-2], capsys)
    assert [row["pair"] for row in again["chosen"]] == [row["pair"] for row in rows]


@pytest.mark.slow
def test_hidden_states_of_a_reward_model(here: Path, capsys: Capture) -> None:
    """What the model's own head says is learned from its hidden states."""
    model = reward_model_from(tiny.policy(), "outcome", 0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    model.save(here / "model")
    generator, reader = random.Random(0), model.reader()
    with PreferenceStore(here / "a.db", create=True) as store:
        for n in range(300):
            texts = ["".join(generator.choices("0123456789", k=4)) for _ in range(2)]
            store.add(pair(n, texts=texts, prompt=f"{n}="))
            if n < 240:
                scores = model.judge([reader.answer(f"{n}=", t, "x") for t in texts], 1000)
                store.add([human(f"p{n}", float(scores[0][0] > scores[1][0]))])
        store.add(pair(300, texts="01", prompt="1" * 400))
    capsys.readouterr()
    words = ["prefs", "select", "a.db", "--model", "model", "--count", "5"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out_long"] == 1
    assert (found["labelled"], found["unlabelled"], len(found["chosen"])) == (240, 60, 5)
    assert found["held_out"]["pairs"]["accuracy"]["mean"] > 0.8
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "left out: 1 pairs longer than the model's context"
    assert lines[2].startswith("on 48 held-out labelled pairs: accuracy ")
    assert lines[3] == "by d_optimal"


def test_what_select_refuses(here: Path, capsys: Capture) -> None:
    made(here / "a.db", 4).close()
    made(here / "empty.db").close()
    (here / "there.jsonl").write_text("kept")
    (here / "folder").mkdir()
    select: list[Any] = ["prefs", "select", "a.db"]
    for words, what in (
        (["prefs", "select", "none.db"], "there is no such file"),
        (["prefs", "select", "empty.db"], "there is no pair: add pairs first"),
        ([*select, "--by", "entropy"], "invalid choice: 'entropy'"),
        ([*select, "--by", "bald"], "--by bald goes by the features of a reward model: give"),
        ([*select, "--count", "0"], "--count"),
        ([*select, "--stage", "rm"], "--stage has no effect without a model"),
        ([*select, "--by", "random", "--model", "m"], "--model has no effect with --by random"),
        ([*select, "--model", "folder"], "folder"),
        ([*select, "--out", "there.jsonl"], "is there already"),
        ([*select, "--out", "no/x.jsonl"], "there is no folder"),
        ([*select, "--out", "/proc/x.jsonl"], "cannot write /proc/x.jsonl"),
    ):
        assert what in tried(words, capsys), words
    assert (here / "there.jsonl").read_text() == "kept"


WORDS = ["prefs", "annotate", "a.db"]


@pytest.fixture
def stores(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(TOKEN, raising=False)
    made(here / "a.db", 2).close()
    made(here / "empty.db").close()
    (here / "text.db").write_text("no store")
    (here / "empty.md").write_text("\n")
    (here / "gold.jsonl").write_text('{"prompt": "p", "chosen": "c"}\n')
    return here


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["prefs", "annotate"], ["STORE"]),
        (["prefs", "annotate", "none.db"], ["none.db", "no such file"]),
        (["prefs", "annotate", "text.db"], ["text.db", "it is not a store"]),
        (["prefs", "annotate", "empty.db"], ["there is no pair", "keel prefs import"]),
        ([*WORDS, "--round", "3"], ["no pair in round 3"]),
        ([*WORDS, "--overlap", "0"], ["--overlap", "0"]),
        ([*WORDS, "--gold-rate", "1.5"], ["--gold-rate", "1.5"]),
        ([*WORDS, "--wage", "nan"], ["--wage", "nan"]),
        ([*WORDS, "--rubric", "none.md"], ["--rubric none.md", "No such file"]),
        ([*WORDS, "--rubric", "empty.md"], ["--rubric empty.md", "empty"]),
        ([*WORDS, "--rubric", "a.db"], ["--rubric a.db", "text"]),
        ([*WORDS, "--gold", "none.jsonl"], ["--gold none.jsonl", "no such file"]),
        ([*WORDS, "--gold", "gold.jsonl"], ["gold.jsonl:1", "rejected"]),
    ],
)
def test_what_annotate_refuses(
    words: list[str], parts: list[str], stores: Path, capsys: Capture
) -> None:
    line = tried(words, capsys)
    assert [part for part in parts if part not in line] == [], line
    with PreferenceStore(stores / "a.db") as store:
        assert store.counts()["pairs"] == 2
        assert store.counts()["labels"] == 0


def test_taken_port_short_token_and_missing_nicegui_are_named(
    stores: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = tried([*WORDS, "--port", port], capsys)
        assert f"cannot serve on 127.0.0.1:{port}" in line
    monkeypatch.setenv(TOKEN, "short")
    line = tried([*WORDS, "--host", "0.0.0.0"], capsys)
    assert f"{TOKEN}: use 16 or more" in line
    assert "short" not in line
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert install_command("view") in tried(WORDS, capsys)
