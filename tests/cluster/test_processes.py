"""Runs on several processes: as one process's, and what happens if a process ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.cluster.ranks import MODULE
from keel.config.load import load_recipe
from keel.learn.ranks import described, load_parts
from keel.training.loop import MAX_DIAGNOSED
from keel.types import KeelError
from tests.cluster.commands import AHEAD, WORDS, finished, keel, metrics, until_step
from tests.platform.processes import descendants, gone
from tests.soak.killing import differences, whole

TOLERANCE = 1e-5
"""float32 sums in another order, over 20 steps at most of the recipe `tiny`."""
EVERY_TWO = ("threads=1", "checkpoints.every=2")


def train(folder: Path, processes: int, *keys: str) -> Path:
    """A run of `tiny` to its end, on the CPU; its driver is forked, quicker than a command."""
    whole(load_recipe("tiny", [*EVERY_TWO, f"cluster.processes={processes}", *keys]), folder)
    return folder


def weights(folder: Path) -> dict[str, Any]:
    """The weights that learn, at the end of a run; a critic's too, which ranks write in parts."""
    newest = max((folder / "checkpoints").iterdir())
    found = load_file(newest / "trainable.safetensors")
    for name in ("critic", "value_head"):
        own = {k: torch.empty_like(v, device="cpu") for k, v in described(newest, name).items()}
        load_parts(newest, name, own)
        found |= {f"{name}/{key}": value for key, value in own.items()}
    return found


def assert_equal_runs(one: Path, other: Path) -> None:
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a == pytest.approx(b, abs=TOLERANCE, nan_ok=True)
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert (weight - after[name]).abs().max() <= TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("algorithm=ppo", "epochs=2"),
        ("algorithm=ppo", "value.kind=head", "model.lora.rank=4"),
        (
            "algorithm=gspo",
            "minibatches=2",
            "reference.reset_every=3",
            "model.activation_checkpointing=true",
            "algorithm.divergence.beta=0.05",
        ),
        ("algorithm=dr_grpo",),  # nothing is scored before the update
        ("algorithm.divergence.estimator=full", "model.lora.rank=4", "rollout.prompts_per_step=1"),
        (
            "rollout.engine=tests.engines.scripted:ColderEngine",  # in the process of the loop
            "rollout.async_level=1",
            "algorithm.correction.kind=truncate",
        ),
    ],
    ids=["critic", "head-lora", "reset", "unscored", "full-lora", "engine-ahead"],
)
def test_two_processes_train_as_one(tmp_path: Path, keys: tuple[str, ...]) -> None:
    one = train(tmp_path / "one", 1, "steps=6", *keys)
    two = train(tmp_path / "two", 2, "steps=6", *keys)
    assert_equal_runs(one, two)
    assert len(metrics(one)) == 6


SKIPS = (
    "algorithm.surrogate={kind='custom', function='tests.cluster.surrogates:bounded'}",
    'on_nonfinite="skip"',
    "epochs=11",
    "steps=2",
    "evaluation.prompts=0",
)


@pytest.mark.slow
def test_two_processes_skip_steps_as_one(tmp_path: Path) -> None:
    """More of them than are diagnosed."""
    runs = [train(tmp_path / str(count), count, *SKIPS) for count in (1, 2)]
    assert_equal_runs(*runs)
    assert [row["steps_skipped"] for row in metrics(runs[1])] == [10, 20]
    for one, two in zip(*(sorted((run / "faults").iterdir()) for run in runs), strict=True):
        causes = [json.loads((folder / "cause.json").read_text()) for folder in (one, two)]
        assert causes[0] == causes[1]
        assert causes[0]["cause"]["sequence"] is not None
    assert len(list((runs[1] / "faults").iterdir())) == MAX_DIAGNOSED


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """The ranks that a command has started."""
    return [one.pid for one in descendants(run.pid) if MODULE in one.command]


@pytest.mark.slow
def test_a_run_that_is_ended_in_any_way_resumes(tmp_path: Path) -> None:
    """By Ctrl-C; by the loss of a rank, which is named; and killed, its ranks with it. Then it ends
    on any number of processes, on its own with the same bytes."""
    sound = train(tmp_path / "whole", 2, "steps=20")
    folder = tmp_path / "run"
    keys = (*EVERY_TWO, "cluster.processes=2", "steps=20")
    run = keel("train", "tiny", *keys, "--run", folder, "--quiet")
    until_step(run, folder, 3)
    for process in (run.pid, *ranks_of(run)):  # a terminal sends it to all of them
        os.kill(process, signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130

    run = keel("train", "--resume", "--run", folder, "--quiet")
    until_step(run, folder, 7)
    (rank,) = ranks_of(run)
    os.kill(rank, signal.SIGKILL)
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 2
    assert f"rank 1 (process {rank}) was killed by SIGKILL" in error
    assert "resume with: keel train --resume" in error
    assert error.count("\n") == 1

    run = keel("train", "--resume", "--run", folder, "--quiet")
    until_step(run, folder, 11)
    ranks = descendants(run.pid)
    assert ranks
    run.kill()
    run.communicate()
    assert gone(ranks) == set()

    for processes in (1, 3):
        copy = shutil.copytree(folder, tmp_path / f"on-{processes}")
        recipe = copy / "recipe.toml"
        text = recipe.read_text().replace("processes = 2", f"processes = {processes}")
        recipe.write_text(text)
        whole(load_recipe(recipe), copy)
        assert_equal_runs(sound, copy)
    assert finished(keel("train", "--resume", "--run", folder, "--quiet")) == ""
    assert differences(sound, folder) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("model.lora.rank=4", "reference.reset_every=2"), "reset_every with model.lora"),
        (("cluster.processes=0",), "cluster.processes"),
        ((*WORDS, *AHEAD, "rollout.dynamic_sampling=true"), "dynamic_sampling"),
        ((*WORDS, "rollout.async_level=2"), "algorithm.correction"),
    ],
)
def test_what_processes_cannot_do_is_refused(keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(KeelError, match=words):
        load_recipe("tiny", ["cluster.processes=2", *keys])
