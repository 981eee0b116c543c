"""Runs on several processes, ours or torchrun's: as one process's, and what happens if one ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.cluster.ranks import MODULE, _on_loopback, check, ranks_of
from keel.config.load import load_recipe
from keel.learn.ranks import Ranks, described, load_parts
from keel.training.loop import MAX_DIAGNOSED
from keel.types import KeelError
from tests.cluster.commands import AHEAD, WORDS, finished, metrics, until_step
from tests.durability.processes import Keel, start
from tests.platform.processes import children, descendants, gone
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
        (
            *("algorithm=ppo", "epochs=2", "algorithm.corrections.kind=truncate"),
            "rollout.engine=tests.engines.scripted:ColderEngine",  # in the process of the loop
            "rollout.async_level=1",
        ),
        (
            *("algorithm=ppo", "value.kind=head", "model.lora.rank=4"),
            "algorithm.divergence={where='loss', estimator='full'}",
            "rollout.prompts_per_step=1",
        ),
        (
            "algorithm=gspo",
            "minibatches=2",
            "reference.reset_every=3",
            "model.activation_checkpointing=true",
            "algorithm.divergence.beta=0.05",
        ),
        ("algorithm=dr_grpo",),  # nothing is scored before the update
    ],
    ids=["critic-engine-ahead", "head-full-lora", "reset", "unscored"],
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


def started_ranks(run: Keel) -> list[int]:
    """The ranks that a command has started."""
    return [one.pid for one in descendants(run.pid) if MODULE in one.command]


@pytest.mark.slow
def test_a_run_that_is_ended_in_any_way_resumes(tmp_path: Path) -> None:
    """By Ctrl-C; by the loss of a rank, which is named; and killed, its ranks with it. Then it ends
    on any number of processes, on its own with the same bytes."""
    sound = train(tmp_path / "whole", 2, "steps=20")
    folder = tmp_path / "run"
    keys = (*EVERY_TWO, "cluster.processes=2", "steps=20")
    run = start(tmp_path, "train", "tiny", *keys, "--run", folder, "--quiet")
    until_step(run, folder, 3)
    for process in (run.pid, *started_ranks(run)):  # a terminal sends it to all of them
        os.kill(process, signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130

    run = start(tmp_path, "train", "--resume", "--run", folder, "--quiet")
    until_step(run, folder, 7)
    (rank,) = started_ranks(run)
    os.kill(rank, signal.SIGKILL)
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 2
    assert f"rank 1 (process {rank}) was killed by SIGKILL" in error
    assert "resume with: keel train --resume" in error
    assert error.count("\n") == 1

    run = start(tmp_path, "train", "--resume", "--run", folder, "--quiet")
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
    assert finished(start(tmp_path, "train", "--resume", "--run", folder, "--quiet")) == ""
    assert differences(sound, folder) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("model.lora.rank=4", "reference.reset_every=2"), "reset_every with model.lora"),
        (("cluster.processes=0",), "cluster.processes"),
        ((*WORDS, *AHEAD, "rollout.dynamic_sampling=true"), "dynamic_sampling"),
        ((*WORDS, "rollout.async_level=2"), "algorithm.corrections"),
    ],
)
def test_what_processes_cannot_do_is_refused(keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(KeelError, match=words):
        load_recipe("tiny", ["cluster.processes=2", *keys])


# ---------------------------------------------------------------- torchrun


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(count: int, *words: str | Path) -> subprocess.Popen[str]:
    """A command of Keel on `count` processes."""
    command = [sys.executable, *TORCHRUN, str(count), "-m", "--", "keel", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def ranks_of_torchrun(process: int) -> dict[int, int]:
    """The processes that torchrun has started, by their rank."""
    found = {}
    for child in children(process):
        words = Path(f"/proc/{child}/environ").read_text().split("\0")
        found |= {int(word[5:]): child for word in words if word.startswith("RANK=")}
    return found


@pytest.mark.slow
def test_torchrun_trains_as_processes_of_keel_and_resumes_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    keys = ("algorithm=ppo", "steps=12")
    sound = train(tmp_path / "whole", 2, *keys)
    folder = tmp_path / "run"
    run = torchrun(2, "train", "tiny", *EVERY_TWO, *keys, "--run", folder, "--quiet")
    until_step(run, folder, 3)
    ranks = ranks_of_torchrun(run.pid)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    error = run.communicate(timeout=120)[1]
    assert run.returncode != 0
    assert "another rank of torchrun has ended" in error
    assert len(metrics(folder)) < 12
    resumed = torchrun(2, "train", "--resume", "--run", folder, "--quiet")
    error = resumed.communicate(timeout=300)[1]
    assert resumed.returncode == 0, error
    assert differences(sound, folder) == []


@pytest.mark.slow
def test_error_of_the_driver_is_one_line_and_ends_all_ranks(tmp_path: Path) -> None:
    run = torchrun(2, "train", "tiny", "cluster.processes=3", "--run", tmp_path / "run")
    error = run.communicate(timeout=120)[1]
    assert run.returncode != 0
    lines = [line for line in error.splitlines() if line.startswith("keel:")]
    assert lines == [
        "keel: error: cluster.processes = 3, but torchrun started 2: set it to 2, or "
        "--nproc-per-node to 3"
    ]
    assert not (tmp_path / "run").exists()


def test_backends_listen_on_loopback_unless_the_user_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a machine's name leads to 127.0.0.1, their sockets alone would not show it."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with _on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_ranks_are_those_of_the_environment() -> None:
    one = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert ranks_of({}) == Ranks(0, 1)
    assert ranks_of(one) == Ranks(1, 2)
    with pytest.raises(KeelError, match="--nnodes 1"):
        ranks_of({**one, "WORLD_SIZE": "4"})
    check(2, None, ranks_of(one))
    with pytest.raises(KeelError, match="torchrun started 2"):
        check(1, None, ranks_of(one))
    with pytest.raises(KeelError, match="without torchrun"):
        check(2, "local", ranks_of(one))
