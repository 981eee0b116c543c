"""The numbered examples run as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.config.entry import load_entry
from tests.shared import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    words = ["steps=2", "threads=1", "--run", str(run), "--quiet"]
    assert main(["train", str(path.relative_to(ROOT)), *words]) == 0
    assert json.loads((run / "run.json").read_text())["finished"] is True
    assert main(["explain", str(path.relative_to(ROOT))]) == 0


def test_the_examples_task_keeps_its_sides_apart() -> None:
    task = load_entry(f"{ROOT}/examples/squares.py:Squares", "task")()
    sides = {
        side: {task.prompt(side, i).content for i in range(task.size(side))}
        for side in ("train", "heldout")
    }
    assert len(sides["train"]) == 90
    assert len(sides["heldout"]) == 10
    assert not sides["train"] & sides["heldout"]
