"""Metrics read as their file grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keel.runs.reader import FollowedFile
from keel.runs.writer import Recorder, truncate_after
from keel.types import KeelError
from tests.runs.example import two_stages


def test_each_update_reads_what_was_added(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    file = FollowedFile(folder.metrics)
    assert file.update() == 0
    with Recorder(folder) as recorder:
        recorder.metrics(0, 1, {"loss": 2.0})
        assert file.update() == file.update() == 1
        recorder.metrics(0, 2, {"loss": float("nan"), "note": "text"})
        recorder.metrics(1, 1, {"reward": 1})
        assert file.update() == 2
    assert file.stages() == ["warmup", "rl"]
    loss = file.columns("warmup")["loss"]
    np.testing.assert_array_equal(loss.steps, [1, 2])
    np.testing.assert_array_equal(loss.values, [2.0, np.nan])
    assert list(file.columns("warmup")) == ["loss"]
    assert file.columns("other") == {}


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path)
    path.write_text('{"stage": "rl", "step": 1, "x": 1}\n{"stage": "rl", "st')
    assert file.update() == 1
    with path.open("a") as more:
        more.write('ep": 2, "x": 3}\n')
    assert file.update() == 2
    assert file.columns("rl")["x"].values.tolist() == [1, 3]


def test_records_after_a_checkpoint_are_replaced_when_a_run_resumes(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    file = FollowedFile(folder.metrics)
    with Recorder(folder) as recorder:
        for step in (1, 2, 3):
            recorder.metrics(0, step, {"loss": float(step)})
    before = file.update()
    truncate_after(folder, 0, 1)
    with Recorder(folder) as recorder:
        for step in (2, 3, 4):  # more than before, so that the file is not shorter
            recorder.metrics(0, step, {"loss": float(10 * step)})
    assert file.update() > before
    assert file.columns("warmup")["loss"].values.tolist() == [1, 20, 30, 40]
    folder.metrics.write_text("")
    assert file.update() > before + 2
    assert file.columns("warmup") == {}


RECORD = '{"stage": "rl", "step": 1, "x": 1}\n'


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(RECORD)
    file = FollowedFile(path)
    file.update()
    path.write_text(2 * RECORD + "no json\n")
    for _ in range(2):
        with pytest.raises(KeelError, match=r"metrics\.jsonl:3 is damaged .*: fix or delete"):
            file.update()
    assert file.columns("rl")["x"].values.tolist() == [1], "kept from a part that is read again"
