"""Answers as models write them, labelled by hand: `corpus.jsonl`.

A line holds the `grader`, the `gold` answer (a value of an answer column; for code, the tests) and
a completion, `answer`, that is `right` or not; `kind` is the part of the corpus. `stop`, `tag` (the
grader's option) and `opening` (what the chat template opened) may be missing. Labels say what a
careful person would decide, not what a grader does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.config.sources import RewardSource, TaskSource
from keel.data.tasks import data_task
from keel.rewards import Scorer, load_reward
from keel.types import Completion, Group
from tests.shared import needs_bubblewrap

CORPUS: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "corpus.jsonl").read_text("utf-8").splitlines()
]
REFUSED = 0.02
"""The share of a grader's right answers of which no more may be refused; of few answers, one."""


@pytest.mark.parametrize(
    "grader",
    [
        "numeric_match",
        "choice",
        pytest.param("math", marks=[needs_bubblewrap, pytest.mark.slow]),
        pytest.param("code", marks=[needs_bubblewrap, pytest.mark.slow]),
    ],
)
def test_no_false_accepts_and_few_false_refusals(grader: str, tmp_path: Path) -> None:
    parts: dict[tuple[str | None, str], list[dict[str, Any]]] = {}
    for row in CORPUS:
        if row["grader"] == grader:
            column = "answer.text" if isinstance(row["gold"], dict) else "answer"
            parts.setdefault((row.get("tag"), column), []).append(row)
    scored: list[tuple[Mapping[str, Any], bool]] = []
    for (tag, column), rows in parts.items():
        scored += zip(rows, _accepts(grader, tag, column, rows, tmp_path), strict=True)
    accepted = [_shown(row) for row, accepts in scored if accepts and not row["right"]]
    refused = [_shown(row) for row, accepts in scored if row["right"] and not accepts]
    right = sum(row["right"] for row, _ in scored)
    found = [f"{len(accepted)} false accepts", *accepted]
    found += [f"{len(refused)} of {right} right answers refused", *refused]
    assert not accepted, "\n".join(found)
    assert len(refused) <= max(1, REFUSED * right), "\n".join(found)


def test_each_part_has_right_and_wrong_answers() -> None:
    for kind in {row["kind"] for row in CORPUS}:
        labels = [row["right"] for row in CORPUS if row["kind"] == kind]
        assert len(labels) >= 40, kind
        assert 0.4 <= np.mean(labels) <= 0.6, kind
    assert len({json.dumps({**row, "note": ""}) for row in CORPUS}) == len(CORPUS)


def _accepts(
    grader: str, tag: str | None, answer: str, rows: Sequence[Mapping[str, Any]], folder: Path
) -> list[bool]:
    """Whether each answer gets the full reward, from a data file to the results of the scorer."""
    column = "tests" if grader == "code" else "answer"
    lines = [{"prompt": row["prompt"], column: row["gold"]} for row in rows]
    path = str(folder / "rows.jsonl")
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    named = None if grader == "code" else answer
    task = data_task(TaskSource(name="jsonl", path=path, answer=named, bad_rows="quarantine"))
    task.validate_on_all()
    groups: dict[tuple[str, ...], list[tuple[int, Group]]] = {}
    for at, entry in enumerate(task.splits["validation"]):
        row = rows[entry.row.number]
        prompt = replace(task.prompt("validation", at), opening=row.get("opening", ""))
        stop = tuple(row.get("stop", ()))
        groups.setdefault(stop, []).append((entry.row.number, Group(prompt, (_completion(row),))))
    options: dict[str, Any] = {"timeout": 60.0} if grader in ("math", "code") else {}
    options |= {} if tag is None else {"tag": tag}
    reward = load_reward(RewardSource(function=grader, options=options))
    accepted = set[int]()
    try:
        for stop, numbered in groups.items():
            scorer = Scorer([reward], timeout=300, on_error="skip", stop=stop)
            results = scorer([group for _, group in numbered], 1).results
            for (number, _), (result,) in zip(numbered, results, strict=True):
                accepted |= {number} if result.reward == 1 else set()
    finally:
        getattr(reward.function, "close", lambda: None)()
    return [number in accepted for number in range(len(rows))]


def _completion(row: Mapping[str, Any]) -> Completion:
    return Completion(
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        written=np.ones(1, np.bool_),
        finish="stop" if "stop" in row else "eos",
        text=row["answer"],
    )


def _shown(row: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if k != "prompt"}, ensure_ascii=False)
