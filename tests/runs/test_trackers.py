from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.config.stage import Trackers
from keel.platform.extras import install_command
from keel.runs.layout import RunFolder
from keel.runs.trackers import TensorBoard, open_trackers
from keel.runs.writer import Tracker
from keel.types import KeelError
from tests.runs.example import row, two_stages


def start(wanted: Trackers, folder: RunFolder) -> list[Tracker]:
    return open_trackers(wanted, folder, name="sort-1", recipe={"seed": 3})


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
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
        tracker.close()
        identities.append(run.id)
    assert identities[0] == identities[1]
    assert list(folder.trackers.glob("wandb/wandb/offline-run-*"))
    (file,) = (Path(run.dir) / "media" / "table").rglob("*.table.json")
    shown = json.loads(file.read_text())
    assert shown["columns"] == ["step", "prompt", "completion", "reward"]
    assert [entry[2:] for entry in shown["data"]] == [["a", 1.0], ["b", 1.0]]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    for module in ("tensorboard", "wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KeelError, match=rf"trackers\.{name} = true needs") as caught:
        start(Trackers.model_validate({name: True}), two_stages(tmp_path))
    assert install_command(name) in str(caught.value)
