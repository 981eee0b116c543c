"""Ranks that torchrun starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keel.cluster.ranks import _on_loopback, check, ranks_of
from keel.learn.ranks import Ranks
from keel.types import KeelError
from tests.cluster.commands import metrics, until_step
from tests.cluster.test_processes import EVERY_TWO, train
from tests.platform.processes import children
from tests.soak.killing import differences

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
