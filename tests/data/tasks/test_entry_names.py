"""Prompts of a function in a file are the same wherever the file lies."""

from __future__ import annotations

import shutil
from pathlib import Path

from keel.config.sources import PreferenceData, TaskSource
from keel.data.preferences import READERS
from keel.data.tasks import build_tasks

ROWS = """
def rows():
    return [
        {"prompt": str(n), "answer": "1", "chosen": "1", "rejected": "2"} for n in range(20)
    ]
"""


def test_prompts_do_not_depend_on_the_folder_of_their_file(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b/c"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "own.py").write_text(ROWS)
        entry = f"{folder}/own.py:rows"
        (task,) = build_tasks([TaskSource(name=entry)], 0)
        pairs = READERS["pairs"](PreferenceData(name=entry), 0)
        ids.append((task.name, task.prompt("train", 3).id, pairs.train[3].id))
        shutil.rmtree(folder)
    assert ids[0] == ids[1]
    assert ids[0][0] == "own.py:rows"
