"""`keel prefs`: files written whole, read back by the reader, and summarised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.cli.main import main
from keel.config.sources import PreferenceData
from keel.data.preferences.dataset import read_pairs
from keel.data.preferences.schema import Preference
from tests.cli.test_wrong_inputs import tried
from tests.data.tasks.made import jsonl
from tests.shared import shared_path

Capture = pytest.CaptureFixture[str]
PAIRS = [{"prompt": f"p{n}", "chosen": "yes, so it is", "rejected": "no"} for n in range(4)]
PANDA = {
    **{"instruction": "Say", "input": "it", "response1": "one \ud800", "response2": "two"},
    **{"annotator1": 2, "annotator2": 2, "annotator3": 0},
}


def printed(words: list[str], capsys: Capture) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def every(path: Path | str, **keys: Any) -> dict[str, Preference]:
    splits = read_pairs(PreferenceData(name="jsonl", path=str(path), **keys))
    assert splits.overlap == 0
    return {pair.id: pair for pair in (*splits.train, *splits.validation)}


def panda(folder: Path) -> Path:
    """A test set of PandaLM's form: a tie, an empty answer, a JSON true, and a judge's verdicts."""
    rows = [
        {**PANDA, "idx": 0},
        {**PANDA, "idx": 1, "annotator1": 0, "annotator2": 0},
        {**PANDA, "idx": 2, "response1": ""},
        {**PANDA, "idx": 3, "input": "", "response2": True, "annotator3": 2},
    ]
    folder.mkdir()
    (folder / "testset-v1.json").write_text(json.dumps(rows))
    verdicts = [{"idx": n, "j_result": v} for n, v in enumerate([2, 1, "2", "garbage"])]
    (folder / "j-testset-v1.json").write_text(json.dumps(verdicts))
    return folder


def test_import_writes_rows_that_are_read(tmp_path: Path, capsys: Capture) -> None:
    folder, out = panda(tmp_path / "panda"), tmp_path / "rows.jsonl"
    result = printed(["prefs", "import", "pandalm", str(folder), "--out", str(out)], capsys)
    assert result == {
        **{"out": str(out), "rows": 3, "ties": 1, "soft": 1},
        **{"left_out_empty": 1, "read_as_text": 1},
    }
    rows = every(out)
    assert set(rows) == {"pandalm/0", "pandalm/1", "pandalm/3"}
    # A lone surrogate has no place in UTF-8.
    assert rows["pandalm/0"] == Preference("pandalm/0", "Say\n\nit", "two", "one ?", 5 / 6)
    assert rows["pandalm/1"].probability == 0.5
    assert rows["pandalm/3"] == Preference("pandalm/3", "Say", "True", "one ?", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["panda", "rows.jsonl"]


def test_import_keeps_empty_answers_where_one_says_so(tmp_path: Path, capsys: Capture) -> None:
    folder, out = panda(tmp_path / "panda"), tmp_path / "rows.jsonl"
    words = ["prefs", "import", "pandalm", f"{folder}/testset-v1.json", "--out", str(out)]
    assert printed([*words, "--keep-empty"], capsys)["left_out_empty"] == 0
    assert len(every(out, empty="keep")) == 4
    before = out.read_bytes()
    assert "is there already: give another --out" in tried(words, capsys)
    assert out.read_bytes() == before
    out.unlink()
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{out}: 3 rows, 1 ties, 1 soft labels",
        "left out: 1 rows with an empty answer (--keep-empty)",
        "read as text: 1 answers that were a JSON true or false",
    ]


def test_what_import_refuses(tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "rows.jsonl")
    line = tried(["prefs", "import", "pandalm", str(tmp_path), "--out", out], capsys)
    assert "testset-v1.json: there is no such file" in line
    assert "invalid choice: 'panda'" in tried(["prefs", "import", "panda", "x"], capsys)
    line = tried(["prefs", "import", "llmbar", "x"], capsys)
    assert "one of the arguments --store --out is required" in line
    assert "arguments are required: ACTION" in tried(["prefs"], capsys)
    words = ["prefs", "import", "llmbar", "x", "--out", str(tmp_path / "no" / "rows.jsonl")]
    assert "there is no folder" in tried(words, capsys)
    assert list(tmp_path.iterdir()) == []


def test_import_to_where_nothing_can_be_written(tmp_path: Path, capsys: Capture) -> None:
    folder = panda(tmp_path / "panda")
    # The second name leaves no room for that of the file next to it, which is renamed.
    for out in ("/proc/rows.jsonl", str(tmp_path / ("x" * 252))):
        line = tried(["prefs", "import", "pandalm", str(folder), "--out", out], capsys)
        assert line.startswith(f"keel: error: cannot write {out}: ")
        assert line.endswith(": give another --out")
        assert "--resume" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["panda"]


def test_stats_of_rows(tmp_path: Path, capsys: Capture) -> None:
    rows = [*PAIRS, {**PAIRS[0], "rejected": ""}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = printed(["prefs", "stats", path, str(tmp_path / "rows.parquet")], capsys)
    assert [one.pop("file") for one in found] == [path, str(tmp_path / "rows.parquet")]
    assert found[0] == found[1]
    assert (found[0]["rows"], found[0]["prompts"], found[0]["empty_answers"]) == (5, 4, 1)
    assert found[0]["longer_preferred"]["mean"] == 1.0
    assert "people" not in found[0]
    assert main(["prefs", "stats", path, path]) == 0
    text = capsys.readouterr().out
    # Four prompts that all say 1: 4 / (4 + t²) with Student's t of three degrees, 3.182.
    assert text.count("longer preferred     1.000   [0.283, 1.000]   n = 5") == 2
    assert "read_as_text" not in text


def test_stats_of_votes(tmp_path: Path, capsys: Capture) -> None:
    votes = [[1, 1, 1], [2, 2, 2], [1, 1, 2], [1, 1, 1]]
    rows = [{**row, "votes": vote} for row, vote in zip(PAIRS, votes, strict=True)]
    (found,) = printed(["prefs", "stats", jsonl(tmp_path / "a.jsonl", rows)], capsys)
    assert (found["people"]["judges"], found["people"]["unanimous"]) == (3, 3)
    # By hand: P̄ = 10/12, P̄_e = (8/12)² + (4/12)² = 5/9.
    assert found["people"]["fleiss_kappa"]["value"] == pytest.approx(0.625, abs=1e-12)
    # Drawn over prompts: the rows of one prompt alone give no interval.
    alone = jsonl(tmp_path / "one.jsonl", [{**row, "prompt": "p"} for row in rows])
    kappa = printed(["prefs", "stats", alone], capsys)[0]["people"]["fleiss_kappa"]
    assert kappa == {"value": pytest.approx(0.625, abs=1e-12), "low": None, "high": None, "n": 4}
    assert main(["prefs", "stats", alone]) == 0
    assert "Fleiss' κ            0.625   –   n = 4" in capsys.readouterr().out
    same = [{**row, "votes": ["tie", "tie"]} for row in PAIRS]
    path = jsonl(tmp_path / "b.jsonl", same)
    (found,) = printed(["prefs", "stats", path], capsys)
    assert found["people"]["fleiss_kappa"]["value"] is None
    assert main(["prefs", "stats", path]) == 0
    assert "Fleiss' κ         undefined   n = 4" in capsys.readouterr().out
    for wrong, line in (
        ([1, 1], "column 'votes': 2 ratings of one item and 3 of another: give every row as many"),
        ("12", ".jsonl:4: column 'votes' = '12': give a list with each judge's verdict"),
        ([], "column 'votes' = []: give a list with each judge's verdict"),
        ([1, [2], 1], "give a list with each judge's verdict"),
        (None, ".jsonl:4: column 'votes' = None: other rows have votes"),
    ):
        path = jsonl(tmp_path / "c.jsonl", [*rows[:3], {**rows[3], "votes": wrong}])
        assert line in tried(["prefs", "stats", path], capsys)


def test_stats_of_a_published_folder(tmp_path: Path, capsys: Capture) -> None:
    folder = str(panda(tmp_path / "panda"))
    (found,) = printed(["prefs", "stats", folder], capsys)
    assert (found["rows"], found["empty_answers"], found["read_as_text"]) == (4, 1, 1)
    assert found["people"]["unanimous"] == 2
    judge = found["judges"]["j"]
    assert (judge["unusable"], judge["no_majority"]) == (1, 0)
    assert judge["accuracy"]["value"] == pytest.approx(2 / 3, abs=1e-12)
    assert judge["accuracy_of_all"]["value"] == 0.5
    assert main(["prefs", "stats", folder]) == 0
    text = capsys.readouterr().out
    assert "j, compared with the majority; 1 verdicts unusable" in text
    assert "these as wrong     0.500" in text


def test_what_stats_refuses(tmp_path: Path, capsys: Capture) -> None:
    assert "there is no such file" in tried(["prefs", "stats", str(tmp_path / "x.jsonl")], capsys)
    line = tried(["prefs", "stats", str(tmp_path)], capsys)
    assert "holds neither PandaLM's testset-v1.json nor LLMBar: give a file of rows" in line
    (tmp_path / "a.json").write_text("[]")
    line = tried(["prefs", "stats", str(tmp_path / "a.json")], capsys)
    assert "not rows, one a line: run keel prefs import first" in line
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "a"}])
    assert "a.jsonl:1: chosen and rejected are the same" in tried(["prefs", "stats", path], capsys)


def test_pandalm_as_published(tmp_path: Path, capsys: Capture) -> None:
    folder, out = shared_path("data/pandalm"), tmp_path / "rows.jsonl"
    words = ["prefs", "import", "pandalm", str(folder), "--out", str(out), "--keep-empty"]
    assert printed(words, capsys)["rows"] == 999
    raw, rows = printed(["prefs", "stats", str(folder), str(out)], capsys)
    for found in (raw, rows):
        assert (found["rows"], found["prompts"], found["ties"]) == (999, 170, 85)
        assert found["people"]["unanimous"] == 879
        assert found["people"]["fleiss_kappa"]["value"] == pytest.approx(0.864, abs=5e-4)
    # The votes keep the order in which the answers were shown, so nothing is lost by the import.
    assert raw["people"] == rows["people"]
    assert raw["longer_preferred"] == rows["longer_preferred"]
    pairs = every(out, empty="keep")
    assert len(pairs) == 999
    assert sum(0.5 < pair.probability < 1 for pair in pairs.values()) == 120


def test_llmbar_as_published(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["prefs", "import", "llmbar", str(shared_path("data/llmbar")), "--out", str(out)]
    assert printed(words, capsys)["rows"] == 419
    assert {pair.probability for pair in every(out).values()} == {1.0}
    (found,) = printed(["prefs", "stats", str(shared_path("data/llmbar"))], capsys)
    assert found["rows"] == 419
    assert "people" not in found


def test_the_verb_needs_no_torch(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", PAIRS)
    code = (
        "import sys; from keel.cli.main import main; "
        f"code = main(['prefs', 'stats', {path!r}]); "
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["0", "False"]
