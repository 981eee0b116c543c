"""Records of a run: written, read, and read as their file grows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from keel.runs import reader as read
from keel.runs.layout import Place, RunFolder
from keel.runs.reader import FollowedFile
from keel.runs.rows import encode, table
from keel.runs.writer import JsonlWriter, Recorder, truncate_after, update_run_json
from keel.types import KeelError
from tests.runs.example import one_stage, row, two_stages


def fill(folder: RunFolder) -> None:
    with Recorder(folder, clock=lambda: 1.5) as recorder:
        for stage, steps in ((0, 2), (1, 3)):
            for step in range(1, steps + 1):
                recorder.metrics(stage, step, {"reward": step / 3, "loss": 0.1})
                recorder.timings(stage, step, {"seconds": 0.5})
                recorder.rollouts(stage, step, [row()])
        recorder.event("checkpoint", step=3)
        recorder.sync()


def test_record_is_one_line_in_a_fixed_order(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    with Recorder(folder) as recorder:
        recorder.metrics(0, 1, {"b": 0.1, "a": np.float32(0.5), "c": np.int64(3)})
        # Each line is with the kernel once it is written, before anything is closed.
        assert folder.metrics.read_text() == (
            '{"stage": "rl", "step": 1, "a": 0.5, "b": 0.1, "c": 3}\n'
        )


@pytest.mark.parametrize("value", [-math.inf, np.float32("nan")])
def test_non_finite_numbers_are_null(tmp_path: Path, value: Any) -> None:
    folder = one_stage(tmp_path)
    with Recorder(folder) as recorder:
        recorder.metrics(0, 1, {"kl": value})
    assert json.loads(folder.metrics.read_text())["kl"] is None
    steps, values = read.load(folder.path).column("kl")
    assert steps.tolist() == [1]
    assert np.isnan(values).all()


def test_metric_may_not_have_the_name_of_a_key(tmp_path: Path) -> None:
    with Recorder(one_stage(tmp_path)) as recorder, pytest.raises(ValueError, match='"step"'):
        recorder.metrics(0, 1, {"step": 7})


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    with Recorder(folder) as recorder:
        recorder.event("note", text="a\ud800b")
        recorder.rollouts(0, 1, [row(prompt="a\ud800b", completion="c\udfff")])
    run = read.load(folder.path)
    assert run.events()[0]["text"] == "a?b"
    assert run.rollouts(1)[0]["completion"] == "c?"


def test_incomplete_last_line_is_removed_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    whole = b'{"step": 1}\n' + b'{"x": "' + b"y" * 200_000 + b'"}\n'
    for torn in (b'{"step": 2, "rew', b"z" * 200_000):
        path.write_bytes(whole + torn)
        writer = JsonlWriter(path)
        writer.write({"step": 2}, {})
        writer.close()
        assert path.read_bytes() == whole + b'{"step": 2}\n'
    path.write_bytes(b"incomplete from the start")
    JsonlWriter(path).close()
    assert path.read_bytes() == b""


# ---------------------------------------------------------------- truncation


def test_truncation_deletes_what_follows_the_checkpoint(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    fill(folder)
    folder.checkpoint(1, 1).mkdir()
    folder.checkpoint(1, 3).mkdir()
    (folder.checkpoints_folder / ".tmp-rl-step-000003").mkdir()
    (folder.rollouts_folder / ".tmp-rl-step-000004.parquet").write_text("half")
    for inside in ("faults", "pictures", "models", "rows", "quarantine", "rewards"):
        (folder.path / inside).mkdir()
        (folder.path / inside / ".tmp-half").write_text("half")
        (folder.path / inside / "whole").write_text("whole")
    before = folder.metrics.read_bytes().splitlines(keepends=True)
    timings = folder.timings.read_bytes()
    truncate_after(folder, 1, 1)
    assert folder.metrics.read_bytes() == b"".join(before[:3])
    assert folder.timings.read_bytes() == timings
    expected = [Place(0, 1), Place(0, 2), Place(1, 1)]
    assert [entry.place for entry in folder.list_rollouts()] == expected
    assert [path.name for path in folder.checkpoints_folder.iterdir()] == ["rl-step-000001"]
    assert not list(folder.path.rglob(".tmp-*"))
    assert len(list(folder.path.rglob("whole"))) == 6


# ---------------------------------------------------------------- run.json


def test_run_json_is_updated_key_by_key(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    update_run_json(folder, {"seed": 3, "objective": "J(θ)", "film": {"steps": 2}})
    whole = update_run_json(folder, {"film": {"mean": math.nan}, "tokens": 9})
    assert json.loads(folder.run_json.read_text()) == whole
    assert list(whole) == ["seed", "objective", "film", "tokens"]
    assert whole["film"] == {"mean": None}
    assert "θ" in folder.run_json.read_text()
    assert not list(folder.path.glob(".tmp-*"))


# ---------------------------------------------------------------- rollouts


def test_rollouts_read_back_as_written(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    messages = [{"role": "user", "content": "Sortiere »3 1 2«"}]
    rows = [
        row(extras={"parsed": "1 2 3", "tries": 2, "trace": ["a", 1]}),
        row(
            group=1,
            prompt=messages,
            values={},
            reward=None,
            components={"format": None},
            finish="length",
        ),
    ]
    with Recorder(folder) as recorder:
        recorder.rollouts(0, 4, rows)
    schema = pq.read_schema(folder.rollouts(0, 4))
    for name, kind in (("tokens", "int32"), ("written", "bool"), ("old_log_probs", "float")):
        assert str(schema.field(name).type).endswith(f"{kind}>"), name
    first, second = read.load(folder.path).rollouts(4)
    assert (first["stage"], first["step"], first["prompt"]) == ("rl", 4, "3 1 2 =")
    assert first["tokens"] == [5, 6, 7]
    assert first["log_probs"] == [-0.5, 0.0, -0.25]
    assert first["old_log_probs"] == [-0.5, 0.0, -0.125]
    assert first["advantages"] == [1.5, 0.0, 1.5]
    assert first["written"] == [True, False, True]
    assert first["pieces"] == ["1 ", "2 ", "3"]
    assert (first["reward"], first["reward/format"], first["reward/correct"]) == (0.75, 1.0, 0.5)
    assert (first["extra/parsed"], first["extra/tries"]) == ("1 2 3", 2.0)
    assert json.loads(first["extra/trace"]) == ["a", 1]
    assert second["prompt"] == messages
    nulls = ("old_log_probs", "advantages", "reward", "reward/format", "reward/correct")
    assert all(second[name] is None for name in nulls)
    assert (second["group"], second["finish"]) == (1, "length")


def test_evaluations_read_back_and_are_removed_with_their_step(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    with Recorder(folder) as recorder:
        recorder.evaluation(0, 0, [row(mode="greedy", passed=True)])
        recorder.evaluation(0, 3, [row(mode="sampled", passed=None)])
    run = read.load(folder.path)
    assert [(one["mode"], one["passed"]) for one in run.evaluation(0)] == [("greedy", True)]
    assert run.evaluation(3)[0]["passed"] is None
    assert run.evaluation(2) == []
    truncate_after(folder, 0, 2)
    assert [place.step for place in run.evaluation_places()] == [0]


def test_parquet_bytes_are_a_function_of_the_rows() -> None:
    rows = [row(components={"b": 1.0, "a": 0.0}), row(group=1)]
    same = [row(components={"a": 0.0, "b": 1.0}), row(group=1)]
    assert encode("rl", 1, rows) == encode("rl", 1, same)
    assert encode("rl", 1, rows) != encode("rl", 2, rows)
    # Order of columns comes from their names, not from this process's hashes.
    names = [f"{letter}{number}" for number in range(5) for letter in "zyx"]
    made = table("rl", 1, [row(components=dict.fromkeys(names, 1.0))]).column_names
    assert made[-15:] == sorted(f"reward/{name}" for name in names)


def test_missing_or_damaged_rollouts_are_named(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    run = read.load(folder.path)
    with pytest.raises(KeelError, match="no rollouts of step 9"):
        run.rollouts(9)
    folder.rollouts(1, 9).write_bytes(b"PAR1 no parquet")
    with pytest.raises(KeelError, match="cannot read"):
        run.rollouts(9)
    with pytest.raises(KeelError, match='no stage "x"'):
        run.rollouts(9, stage="x")


# ---------------------------------------------------------------- reading


def test_run_is_read_by_stage(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    fill(folder)
    run = read.load(folder.path)
    assert run.events() == [{"time": 1.5, "event": "checkpoint", "step": 3}]
    assert "time" not in folder.metrics.read_text()
    assert run.stages == ("warmup", "rl")
    assert run.recipe()["name"] == "sort"
    assert run.info() == {}
    assert run.names("rl") == ["loss", "reward"]
    assert len(run.metrics()) == 5
    steps, values = run.column("reward", stage="rl")
    assert steps.tolist() == [1, 2, 3]
    assert values.tolist() == [1 / 3, 2 / 3, 1.0]
    assert len(run.timings("warmup")) == 2
    assert run.rollout_places()[-1] == Place(1, 3)
    with pytest.raises(KeelError, match="name the stage"):
        run.rollouts(1)


# ---------------------------------------------------------------- followed


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
