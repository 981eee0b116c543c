"""PandaLM's and LLMBar's files: the records that they become, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keel.preferences.store.exports import preference_rows
from keel.preferences.store.formats import Attribution
from keel.preferences.store.imports import ImportReport, import_file
from keel.preferences.store.published import SETS, TEST_SET
from keel.preferences.store.store import PreferenceStore
from keel.types import KeelError
from tests.shared import shared_path

ROW: dict[str, Any] = {
    **{"idx": 4, "instruction": "Say", "input": "it", "response1": "one", "response2": "two"},
    **{"annotator1": 2, "annotator2": 2, "annotator3": 0},
}
BAR = {"input": "Say it", "output_1": "one", "output_2": "two", "label": 2}


def imported(kind: str, path: Path) -> tuple[list[dict[str, Any]], ImportReport]:
    with PreferenceStore(None) as store:
        report = import_file(store, kind, path, Attribution())
        assert {label.shown_first for label in store.labels()} <= {"first", "second"}
        return list(preference_rows(store)), report


def written(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


# ---------------------------------------------------------------- PandaLM


def test_rows_of_pandalm_have_a_label_for_each_vote(tmp_path: Path) -> None:
    rows = [
        {**ROW, "response1": "one \ud800"},
        {**ROW, "idx": 5, "input": "", "response2": True, "annotator1": 0},
        {**ROW, "idx": 6, "response1": " "},
    ]
    path = written(tmp_path / TEST_SET, rows)
    found, report = imported("pandalm", path)
    # A tie is half a vote for each; a lone surrogate has no place in UTF-8.
    assert found == [
        {
            **{"id": "pandalm/4", "prompt": "Say\n\nit", "chosen": "two", "rejected": "one ?"},
            "probability": pytest.approx(5 / 6, abs=1e-15),
        },
        {
            **{"id": "pandalm/5", "prompt": "Say", "chosen": "True", "rejected": "one"},
            "probability": pytest.approx(2 / 3, abs=1e-15),
        },
    ]
    assert (report.rows, [left.why for left in report.left_out]) == (2, ["empty"])
    assert imported("pandalm", tmp_path)[0] == found


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**ROW, "annotator2": 3}, "row 1: column 'annotator2' = 3: give one of 0, 1, 2"),
        ({**ROW, "annotator2": True}, "column 'annotator2' = 'True': give one of 0, 1, 2"),
        ({**ROW, "response1": 7}, "column 'response1' = 7: give a text"),
        ({**ROW, "instruction": "", "input": " "}, "column 'instruction' = '': it is empty"),
        ({k: v for k, v in ROW.items() if k != "input"}, "row 1: unknown column 'input'"),
        ([1], "row 1 is a list, not a dict of columns"),
    ],
)
def test_bad_rows_are_left_out(tmp_path: Path, row: Any, reason: str) -> None:
    path = written(tmp_path / TEST_SET, [row, ROW])
    _, report = imported("pandalm", path)
    (left,) = report.left_out
    assert left.reason.startswith(f"{path}: ")
    assert reason in left.reason


def test_files_that_hold_no_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, what in (
        (None, "No such file or directory: give a file of LLMBar"),
        (b'[{"a": 1},\n oops]', "not JSON: Expecting value at line 2, column 2: give"),
        (b'["\xff"]', "not UTF-8 text"),
        (b'{"rows": []}', "a JSON dict, not a list of rows"),
        (b"[]", "no rows"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(KeelError, match=what):
            imported("llmbar", path)


def test_pandalm_as_published() -> None:
    rows, report = imported("pandalm", shared_path("data/pandalm"))
    assert (report.rows, len(report.left_out)) == (945, 54)
    assert report.added["labels"] + report.repeated == 3 * 945
    assert len(rows) == report.added["pairs"]
    assert sum(row["probability"] not in (0.5, 1.0) for row in rows) > 100


# ---------------------------------------------------------------- LLMBar


def test_rows_of_llmbar_are_named_by_their_set(tmp_path: Path) -> None:
    (tmp_path / "Adversarial").mkdir()
    written(tmp_path / "Natural.json", [BAR])
    written(
        tmp_path / "Adversarial" / "Manual.json",
        [{**BAR, "input": "a", "label": 1}, {**BAR, "input": "b"}, {**BAR, "label": 0}],
    )
    rows, report = imported("llmbar", tmp_path)
    chosen = {row["id"]: row["chosen"] for row in rows}
    assert chosen == {
        **{"llmbar/Manual/0": "one", "llmbar/Manual/1": "two", "llmbar/Natural/0": "two"}
    }
    assert "column 'label' = 0: give one of 1, 2" in report.left_out[0].reason
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeelError, match=r"empty: holds no \*\.json: give LLMBar's folder"):
        imported("llmbar", tmp_path / "empty")


def test_the_published_layout_is_read_without_verdicts(tmp_path: Path) -> None:
    for name in SETS:
        folder = tmp_path / "LLMBar" / ("" if name == "Natural" else "Adversarial") / name
        (folder / "evaluators").mkdir(parents=True)
        written(folder / "dataset.json", [{**BAR, "input": name}])
        written(folder / "evaluators" / "result.json", [{"winner": 1}])
    other = tmp_path / "CaseStudy" / "Negation"
    other.mkdir(parents=True)
    written(other / "dataset.json", [BAR])
    rows, _ = imported("llmbar", tmp_path)
    assert {row["id"] for row in rows} == {f"llmbar/{name}/0" for name in SETS}
    # Its other benchmarks are read if one asks for them.
    assert [row["id"] for row in imported("llmbar", other)[0]] == ["llmbar/Negation/0"]


def test_llmbar_as_published() -> None:
    rows, report = imported("llmbar", shared_path("data/llmbar"))
    assert (report.rows, report.left_out) == (419, ())
    sets = Counter(row["id"].split("/")[1] for row in rows)
    assert sets == {"GPTInst": 92, "GPTOut": 47, "Manual": 46, "Neighbor": 134, "Natural": 100}
    assert {row["probability"] for row in rows} == {1.0}
    # In the adversarial sets the wrong answer was made to look better, by length among others.
    longer = [row for row in rows if len(row["chosen"]) > len(row["rejected"])]
    assert Counter("Natural" in row["id"] for row in longer) == {True: 56, False: 57}
