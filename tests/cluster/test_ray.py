"""Runs by Ray: as one process's, and what happens if processes end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from keel import train
from keel.config.load import load_recipe
from keel.types import KeelError
from tests.cluster.commands import AHEAD, WAIT, WORDS, finished, kill, metrics, until_step
from tests.durability.processes import start
from tests.soak.killing import differences, whole

pytest.importorskip("ray")


@pytest.mark.slow
def test_rollout_and_reward_workers_change_no_bit(tmp_path: Path) -> None:
    one, ray = tmp_path / "one", tmp_path / "ray"
    keys = ("threads=1", "steps=4", "algorithm=ppo", "epochs=2")
    whole(load_recipe("tiny", keys), one)
    finished(start(tmp_path, "train", "tiny", *keys, *WORDS, "--run", ray, "--quiet"))
    assert metrics(one) == metrics(ray)
    last = sorted((one / "checkpoints").iterdir())[-1].name
    wanted, found = (
        {
            file.name: file.read_bytes()
            for file in (run / "checkpoints" / last).glob("*.safetensors")
        }
        for run in (one, ray)
    )
    assert len(wanted) == 5  # policy, critic, their moments, reference
    assert wanted == found


@pytest.mark.slow
def test_killed_processes_change_no_bit_of_a_run_two_steps_ahead(tmp_path: Path) -> None:
    """Two trainers; one of each kind is killed, then the process that runs the loop itself, and
    the resumed run is stopped by SIGTERM for all that it has started."""
    sound, killed = tmp_path / "whole", tmp_path / "killed"
    keys = (*WORDS, *AHEAD, "steps=20", "cluster.processes=2", "cluster.rollout_workers=1")
    whole(load_recipe("tiny", keys), sound)
    assert max(row["rollout/staleness/max"] for row in metrics(sound)) == 2
    run = start(tmp_path, "train", "tiny", *keys, "--run", killed, "--quiet")
    notes = []
    for step, kind in ((3, "RolloutHost"), (6, "RewardHost"), (9, "TrainerHost")):
        until_step(run, killed, step)
        notes.append((kind, kill(run, kind)))
    until_step(run, killed, 11)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(WAIT)
    events = (killed / "events.jsonl").read_text()
    for kind, process in notes:
        name = {"RolloutHost": "rollout worker", "RewardHost": "reward worker"}.get(kind)
        assert f"{name or 'trainer'} " in events
        assert f"(process {process} on " in events
    run = start(tmp_path, "train", "--resume", "--run", killed, "--quiet")
    until_step(run, killed, 14)
    os.killpg(run.pid, signal.SIGTERM)
    run.communicate(timeout=WAIT)
    assert run.returncode == 128 + signal.SIGTERM
    finished(start(tmp_path, "train", "--resume", "--run", killed, "--quiet"))
    assert differences(sound, killed) == []


@pytest.mark.slow
def test_a_trainer_that_is_always_lost_ends_the_run_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    few = ("cluster.rollout_workers=1", "cluster.reward_workers=0", "cluster.restarts=0")
    run = start(tmp_path, "train", "tiny", *WORDS, *few, "--run", folder, "--quiet")
    until_step(run, folder, 2)
    process = kill(run, "TrainerHost")
    error = run.communicate(timeout=WAIT)[1]
    assert run.returncode == 2
    assert f"trainer 0 (process {process} on " in error
    assert "resume with: keel train --resume" in error


@pytest.mark.slow
def test_python_functions_are_refused(tmp_path: Path) -> None:
    """Those that were passed to keel.train are known to their process alone."""

    def reward(completions: list[str], **_: object) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(KeelError, match=r"cluster\.ray: other processes cannot call functions"):
        train("tiny", tmp_path / "run", rewards=reward, cluster={"ray": "local"}, progress=False)
