"""A run that was stopped goes on where its newest whole checkpoint is, and ends the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from keel.config.load import to_toml
from keel.platform.signals import Interrupted
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.run import train
from keel.types import KeelError
from tests.shared import ROOT
from tests.soak.killing import differences
from tests.training import judged
from tests.training.small import Notes, Stop, small

CASES = {
    "grpo": ["algorithm=grpo"],
    "ppo-critic": ["algorithm=ppo"],
    "ppo-head": ["algorithm=ppo", "value.kind=head", "minibatches=2"],
    "value-warm-up": ["algorithm=ppo", "value.kind=head", "value.warmup_steps=2"],
    "value-baseline": [
        "algorithm={preset='gspo', advantage={kind='value_baseline'}, value={coefficient=0.1}}"
    ],
    "adaptive": ["algorithm=ppo_kl_penalty", "algorithm.divergence.adaptive.target=1e-6"],
    "lora": ["algorithm=grpo", "model.lora.rank=4", "optimizer.learning_rate=1e-2"],
    "ziegler": [
        "algorithm=ppo",
        "algorithm.divergence.adaptive={rule='ziegler', target=0.001, horizon=10}",
    ],
    "lora-reset": [
        "algorithm=grpo",
        "model.lora.rank=4",
        "reference.reset_every=1",
        "minibatches=2",
    ],
    "dynamic": ["algorithm=dapo", "rollout.max_refills=2"],
    "bfloat16": [
        "algorithm=grpo",
        "rollout.dtype=bfloat16",
        "algorithm.correction.kind=truncate",
        "minibatches=2",
    ],
}
DENSE = "rewards.functions=[{function='place_match'}]"
SAME = ("metrics.jsonl", "recipe.toml")


def same(a: RunFolder, b: RunFolder) -> None:
    """Rows, rollouts and the last weights and moments are byte for byte the same."""
    for name in SAME:
        assert (a.path / name).read_bytes() == (b.path / name).read_bytes(), name
    files = [p.name for p in sorted(a.rollouts_folder.iterdir())]
    assert files == [p.name for p in sorted(b.rollouts_folder.iterdir())]
    for name in files:
        left, right = (f.rollouts_folder / name for f in (a, b))
        assert left.read_bytes() == right.read_bytes(), name
    ends = [load(folder.path).checkpoints()[-1].path for folder in (a, b)]
    tensors = sorted(p.name for p in ends[0].glob("*.safetensors"))
    assert "trainable.safetensors" in tensors
    for name in tensors:
        left, right = (load_file(end / name) for end in ends)
        assert left.keys() == right.keys()
        assert all((left[k] == right[k]).all() for k in left), name


def damage(folder: RunFolder, stage: int, step: int) -> None:
    """Tear a file of a checkpoint."""
    path = folder.checkpoint(stage, step) / "trainable.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.quick("ppo-head", "lora-reset", "bfloat16")
@pytest.mark.parametrize("case", CASES)
def test_resume_ends_as_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    """The last checkpoint is damaged, so that the run goes on from the one before."""
    recipe = small(DENSE, *CASES[case])
    whole = train(recipe, tmp_path / "whole")
    again = train(recipe, tmp_path / "again")
    same(whole, again)
    damage(again, 0, 4)
    callback = Notes()
    train(None, again.path, resume=True, callbacks=[callback])
    assert "is damaged" in callback.notes[0]
    same(whole, again)
    assert json.loads(again.run_json.read_text())["finished"] is True


def test_resume_from_within_the_first_of_two_stages(tmp_path: Path) -> None:
    overrides = ["sft.steps=3", "sft.checkpoints.every=2", "sft.checkpoints.keep=9"]
    recipe = small(DENSE, "steps=2", *overrides, recipe="quickstart")
    whole = train(recipe, tmp_path / "whole")
    again = train(recipe, tmp_path / "again")
    for stage, step in ((1, 2), (0, 3)):
        damage(again, stage, step)
    train(None, again.path, resume=True)
    same(whole, again)


def test_resume_of_a_stopped_run_gives_the_same_files(tmp_path: Path) -> None:
    """Stopped before its first step and amid: every file but those of times is the same."""
    recipe = small(
        DENSE, "evaluation.prompts=4", "checkpoints.every=2", "checkpoints.keep=1", "steps=5"
    )
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(recipe, whole)
    for at, stop in enumerate((Stop(evaluation=0), Stop(1), Stop(3, signum=signal.SIGINT))):
        with pytest.raises(Interrupted):
            train(recipe if at == 0 else None, again, resume=at > 0, callbacks=[stop])
    assert [entry.place.step for entry in load(again).checkpoints()][-1] == 3
    train(None, again, resume=True)
    assert differences(whole, again) == []


def test_stop_in_the_first_evaluation_saves_its_result(tmp_path: Path) -> None:
    stage = {"stage": "dpo", "steps": 2, "batch_size": 4, "checkpoints": {"every": 1}}
    stage["data"] = judged.data(tmp_path, judged.ones(24, 1), judged.ones(8, 2))
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(judged.recipe(stage), whole)
    with pytest.raises(Interrupted):
        train(judged.recipe(stage), again, callbacks=[Stop(evaluation=0)])
    assert [entry.place.step for entry in load(again).checkpoints()] == [0]
    measured = json.loads((again / "run.json").read_text())["measured"]
    train(None, again, resume=True)
    assert measured["dpo"].keys() == {"before"}
    assert differences(whole, again) == []


def start(tmp_path: Path, folder: Path) -> subprocess.Popen[str]:
    recipe = tmp_path / "long.toml"
    recipe.write_text(to_toml(small(DENSE, "steps=300", "rollouts_every=0")))
    return subprocess.Popen(
        [sys.executable, "-m", "keel", "train", str(recipe), "--run", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def until(process: subprocess.Popen[str], folder: Path, rows: int) -> None:
    """Wait until the run has recorded so many steps."""
    path = folder / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= rows:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_a_checkpoint_and_prints_how_to_resume(
    signum: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(tmp_path, folder)
    until(process, folder, 3)
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, err
    assert "--resume" in out
    run = load(folder)
    last = run.metrics()[-1]["step"]
    assert run.checkpoints()[-1].place.step == last >= 3
    assert "finished" not in [event["event"] for event in run.events()]


@pytest.mark.slow
def test_resume_of_a_killed_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(tmp_path, folder)
    until(process, folder, 5)
    process.kill()
    process.communicate(timeout=60)
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace("steps = 300", "steps = 8"))
    train(None, folder, resume=True)
    steps = [row["step"] for row in load(folder).metrics()]
    assert steps == list(range(1, 9))


def test_existing_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    folder = train(small("steps=1"), tmp_path / "run")
    before = folder.metrics.read_bytes()
    with pytest.raises(KeelError, match="--resume"):
        train(small("steps=1"), folder.path)
    assert folder.metrics.read_bytes() == before
