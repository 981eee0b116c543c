from __future__ import annotations

import importlib.util
import json
import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.config.stage import Trackers
from keel.platform.extras import install_command
from keel.platform.signals import Interrupt
from keel.runs.callbacks import Callbacks
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.runs.trackers import EXTRAS, TensorBoard, open_trackers
from keel.runs.writer import Recorder, RunWriter, Tracker
from keel.types import KeelError
from tests.runs.example import Progress, one_stage, row, two_stages


def start(wanted: Trackers, folder: RunFolder) -> list[Tracker]:
    return open_trackers(wanted, folder, name="sort-1", recipe={"seed": 3})


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = events_of(folder)
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def test_tensorboard_gets_the_metrics_of_each_stage(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = two_stages(tmp_path)
    (tracker,) = start(Trackers(tensorboard=True), folder)
    assert isinstance(tracker, TensorBoard)
    tracker.log("warmup", 1, {"loss": 2.5})
    for step in (1, 2, 3):
        values = {"reward": step / 4, "kl": math.nan, "note": "x", "epoch": np.float32(0.5)}
        tracker.log("rl", step, values)
    tracker.close()
    assert scalars(folder.trackers / "tensorboard" / "warmup") == {"loss": [(1, 2.5)]}
    assert scalars(folder.trackers / "tensorboard" / "rl") == {
        "reward": [(1, 0.25), (2, 0.5), (3, 0.75)],
        "epoch": [(1, 0.5), (2, 0.5), (3, 0.5)],
    }


@pytest.mark.parametrize("on", [True, False])
def test_tensorboard_gets_histograms_of_rewards_and_lengths(tmp_path: Path, on: bool) -> None:
    pytest.importorskip("tensorboard")
    folder = two_stages(tmp_path)
    (tracker,) = start(Trackers(tensorboard=True, histograms=on), folder)
    rows = [row(reward=reward) for reward in (0.0, None, 1.0)]
    tracker.log("rl", 1, {}, rows)
    tracker.close()
    shown = events_of(folder.trackers / "tensorboard" / "rl")
    assert shown.Tags()["histograms"] == ["histograms/reward", "histograms/length"][: 2 * on]
    if on:  # of the three tokens of a completion the policy wrote two
        rewards, lengths = (shown.Histograms(tag)[0] for tag in shown.Tags()["histograms"])
        assert (rewards.step, rewards.histogram_value.num, rewards.histogram_value.sum) == (1, 2, 1)
        assert (lengths.histogram_value.num, lengths.histogram_value.sum) == (3, 6)


def test_tensorboard_shows_a_resumed_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = two_stages(tmp_path)
    for steps in ((1, 2, 3), (2, 3, 4)):  # killed after 3, resumed from 1
        (tracker,) = start(Trackers(tensorboard=True), folder)
        for step in steps:
            tracker.log("rl", step, {"reward": float(step)})
        tracker.close()
    shown = scalars(folder.trackers / "tensorboard" / "rl")["reward"]
    assert [step for step, _ in shown] == [1, 2, 3, 4]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for place in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / place))


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb_logs_offline_and_resumes_its_run(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    identities, rows = [], [row(completion=text, reward=1.0) for text in ("a", "b", "c")]
    for step, (name, group) in enumerate(((None, None), ("seed-3", "grpo")), 1):
        wanted = Trackers(
            wandb=True, project="keel-test", run_name=name, group=group, completions=2
        )
        (tracker,) = start(wanted, folder)
        tracker.log("rl", step, {"reward": 0.5, "kl": math.inf}, rows)
        run = tracker._run  # type: ignore[attr-defined]
        assert dict(run.config) == {"seed": 3}
        assert (run.project, run.name, run.group) == ("keel-test", name or "sort-1", group or "")
        assert run.summary["rl/reward"] == 0.5
        assert run.summary["rl/step"] == step
        assert "rl/kl" not in run.summary.keys()  # noqa: SIM118
        assert sum(run.summary["rl/histograms/reward"]["values"]) == 3
        tracker.close()
        identities.append(run.id)
    assert identities[0] == identities[1]
    assert list(folder.trackers.glob("wandb/wandb/offline-run-*"))
    (file,) = (Path(run.dir) / "media" / "table").rglob("*.table.json")
    shown = json.loads(file.read_text())
    assert shown["columns"] == ["step", "prompt", "completion", "reward"]
    assert [entry[2:] for entry in shown["data"]] == [["a", 1.0], ["b", 1.0]]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # connections of its own
def test_mlflow_keeps_one_run_in_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = two_stages(tmp_path / "a b%41?c")
    wanted = Trackers(mlflow=True, project="sums", group="grpo")
    for stage, steps in (("warmup", (1, 2)), ("rl", (1, 2)), ("rl", (3,))):  # the last resumes
        (tracker,) = start(wanted, folder)
        for step in steps:
            tracker.log(stage, step, {"eval/pass@1": step / 4, "kl": math.inf}, [row()])
        tracker.close()
    with sqlite3.connect(folder.trackers / "mlflow" / "mlflow.db") as database:
        logged = database.execute("select key, step, value from metrics order by key, step")
        assert logged.fetchall() == [
            *(("rl/eval/pass_1", step, step / 4) for step in (1, 2, 3)),
            *(("warmup/eval/pass_1", step, step / 4) for step in (1, 2)),
        ]
        runs = database.execute("select r.name, status, e.name from runs r, experiments e "
            "where r.experiment_id = e.experiment_id")  # fmt: skip
        assert runs.fetchall() == [("sort-1", "FINISHED", "sums")]
        (tracker,) = start(wanted, folder)
        tracker.close(failed=True)
        assert database.execute("select status from runs").fetchall() == [("FAILED",)]
        assert database.execute("select key, value from params").fetchall() == [("seed", "3")]
        assert ("group", "grpo") in database.execute("select key, value from tags").fetchall()


@pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None,
    reason="trackio needs pillow<13: install it in an environment of its own",
)
def test_trackio_keeps_one_run_in_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio.sqlite_storage as storage

    # Its folder is set when it is imported.
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    folder = two_stages(tmp_path)
    wanted = Trackers(trackio=True, project="sums", completions=1)
    rows = [row(reward=reward) for reward in (0.0, 1.0, 1.0)]
    for stage, steps in (("warmup", (1, 2)), ("rl", (1, 2)), ("rl", (3,))):  # the last resumes
        (tracker,) = start(wanted, folder)
        for step in steps:
            tracker.log(stage, step, {"reward": step / 4, "kl": math.inf}, rows)
        tracker.close()
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as database:
        found = database.execute("select distinct run_id, step, metrics from metrics").fetchall()
    logged = [(step, json.loads(text)) for _, step, text in found]
    assert len({identity for identity, _, _ in found}) == 1
    assert sorted((step, one["rl/reward"]) for step, one in logged if "rl/reward" in one) == [
        (1, 0.25), (2, 0.5), (3, 0.75)
    ]  # fmt: skip
    assert sum("warmup/reward" in one for _, one in logged) == 2
    last = next(one for step, one in logged if step == 3)
    assert last["rl/histograms/reward"]["values"][0] == 1
    assert sum(last["rl/histograms/reward"]["values"]) == 3
    assert last["rl/completions"]["_value"][0]["completion"] == "1 2 3"


def test_a_tracker_that_fails_is_left_out(tmp_path: Path) -> None:
    class Failing:
        calls = 0

        def log(self, *values: Any) -> None:
            self.calls += 1
            raise ConnectionError("refused")

        def close(self, failed: bool = False) -> None: ...

    failing, folder = Failing(), one_stage(tmp_path)
    with Recorder(folder) as recorder:
        called = Callbacks(folder.path, (), print, recorder.event)
        writer = RunWriter(folder, recorder, called, Interrupt(), trackers=[failing])
        for step in (1, 2):
            writer.recorded(Progress(0, step), {"reward": 0.5}, (), 0.1)
    assert failing.calls == 1
    (event,) = load(folder.path).events()
    assert event["text"] == "Failing gets no more metrics: ConnectionError: refused"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    for module in (*EXTRAS, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KeelError, match=rf"trackers\.{name} = true needs") as caught:
        start(Trackers.model_validate({name: True}), two_stages(tmp_path))
    assert install_command(name) in str(caught.value)
