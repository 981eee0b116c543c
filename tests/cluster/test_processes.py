"""Runs on several processes: as one process's, and what happens where a process ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.config.load import load_recipe
from keel.learn.shards import described, load_parts
from keel.training.loop import MAX_DIAGNOSED
from keel.types import KeelError
from tests.cluster.commands import finished, keel, metrics, until_step
from tests.soak.killing import differences, whole

TOLERANCE = 1e-5
"""float32 sums in another order, over 24 steps at most of the recipe `tiny`."""
EVERY_TWO = ("threads=1", "checkpoints.every=2")


def train(folder: Path, processes: int, *keys: str) -> Path:
    """A run of `tiny` to its end, on the CPU; its driver is forked, quicker than a command."""
    whole(load_recipe("tiny", [*EVERY_TWO, f"cluster.processes={processes}", *keys]), folder)
    return folder


def by_command(folder: Path, processes: int, *keys: str) -> Path:
    """The same run by `keel train`, which prints nothing."""
    run = keel("train", "tiny", *EVERY_TWO, f"cluster.processes={processes}", *keys,
               "--run", folder, "--quiet")  # fmt: skip
    assert finished(run) == ""
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
            "rollout.engine=studies.zoo_parts:colder",  # samples in the process that runs the loop
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


def children(process: int) -> list[int]:
    """The ranks that a process has started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            words = (place / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == process and b"keel.cluster.ranks" in words:
            found.append(int(place.name))
    return found


@pytest.mark.slow
def test_killed_rank_is_named_and_its_run_resumes_on_any_number(tmp_path: Path) -> None:
    sound = train(tmp_path / "whole", 2, "steps=24")
    killed = tmp_path / "killed"
    keys = (*EVERY_TWO, "cluster.processes=2", "steps=24")
    run = keel("train", "tiny", *keys, "--run", killed, "--quiet")
    until_step(run, killed, 5)
    (rank,) = children(run.pid)
    os.kill(rank, signal.SIGKILL)
    began = time.monotonic()
    error = run.communicate(timeout=60)[1]
    assert time.monotonic() - began < 60
    assert run.returncode == 2
    assert f"rank 1 (process {rank}) was killed by SIGKILL" in error
    assert "resume with: keel train --resume" in error
    assert error.count("\n") == 1
    for processes in (1, 2, 3):
        copy = shutil.copytree(killed, tmp_path / f"on-{processes}")
        recipe = copy / "recipe.toml"
        text = recipe.read_text().replace("processes = 2", f"processes = {processes}")
        recipe.write_text(text)
        whole(load_recipe(recipe), copy)
        assert_equal_runs(sound, copy)
    assert differences(sound, tmp_path / "on-2") == []


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = keel("train", "tiny", *EVERY_TWO, "cluster.processes=3", "--run", folder, "--quiet")
    until_step(run, folder, 3)
    ranks = children(run.pid)
    assert len(ranks) == 2
    run.kill()
    run.communicate()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    sound = by_command(tmp_path / "whole", 2, "steps=24")
    folder = tmp_path / "stopped"
    keys = (*EVERY_TWO, "cluster.processes=2", "steps=24")
    run = keel("train", "tiny", *keys, "--run", folder, "--quiet")
    until_step(run, folder, 3)
    for process in (run.pid, *children(run.pid)):  # a terminal sends it to all of them
        os.kill(process, signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    resumed = keel("train", "--resume", "--run", folder, "--quiet")
    assert finished(resumed) == ""
    assert differences(sound, folder) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("model.lora.rank=4", "reference.reset_every=2"), "reset_every with model.lora"),
        (("cluster.processes=0",), "cluster.processes"),
    ],
)
def test_what_processes_cannot_do_is_refused(keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(KeelError, match=words):
        load_recipe("tiny", ["cluster.processes=2", *keys])
