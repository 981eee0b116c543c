"""Two processes on one run folder: the second is refused, the first unharmed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keel.platform.files import locked
from keel.platform.signals import AGAIN
from keel.runs.layout import RunFolder
from tests.durability.harm import plan
from tests.durability.processes import Keel, keel, start
from tests.durability.same import RUN, one_line, same
from tests.platform.processes import eventually
from tests.shared import ROOT

pytestmark = pytest.mark.slow


def waiting(tmp_path: Path, run: Path) -> tuple[Keel, Path]:
    """A run in the middle of its third step, until the file is deleted."""
    sign = tmp_path / "sign"
    first = start(
        tmp_path, "train", "tiny", *RUN, "--run", run, environment=plan(3, pause=str(sign))
    )
    first.until(sign.exists)
    return first, sign


@pytest.mark.slow
def test_second_process_is_refused_and_the_first_unharmed(tmp_path: Path, unharmed: Path) -> None:
    run = tmp_path / "run"
    first, sign = waiting(tmp_path, run)
    printed = (
        f"keel: error: folder {run} is in use by process {first.pid}: "
        "wait for it to end, or choose another with --run DIR"
    )
    commands = (
        ("train", "tiny", *RUN),
        ("train", "--resume"),
        ("control", "reinforce", "--env", "CartPole-v1"),
    )
    for command in commands:
        code, _, err = keel(tmp_path, *command, "--run", run)
        assert code == 2
        assert one_line(err) == printed
    assert (run / ".lock").read_text() == f"{first.pid}\n"
    sign.unlink()
    assert first.end()[0] == 0
    same(run, unharmed)
    assert (run / ".lock").read_bytes() == b""


@pytest.mark.slow
def test_control_run_ends_at_once_with_its_workers(
    tmp_path: Path,
) -> None:
    """Ctrl-C goes to the whole process group, the second ends it; no worker prints anything."""
    run, err = tmp_path / "run", tmp_path / "err"
    recipe = [
        "--env",
        "CartPole-v1",
        "environment.count=2",
        "environment.vectorization=async",
        "steps=10_000_000",
    ]
    recipe += ["rollout_steps=100_000"]  # the step in hand takes longer than the test
    with err.open("wb") as file:
        first = subprocess.Popen(
            [sys.executable, "-m", "keel", "control", "ppo", *recipe, "--run", str(run)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    try:
        assert eventually((run / "run.json").exists), err.read_text()
        code, _, printed = keel(tmp_path, "control", "--resume", "--run", run)
        assert code == 2
        assert f"is in use by process {first.pid}" in one_line(printed)
        os.killpg(first.pid, signal.SIGINT)
        assert eventually(lambda: err.read_text() != "")
        time.sleep(2 * AGAIN)
        os.killpg(first.pid, signal.SIGINT)
        assert first.wait(60) == -signal.SIGINT
    finally:
        first.kill()
        first.wait()
    with locked(run):
        pass
    assert (
        one_line_of(err)
        == "keel: SIGINT: finishing the current step; send it again to stop at once"
    )


def one_line_of(path: Path) -> str:
    text = path.read_text()
    assert text.count("\n") == 1, text
    return text.strip()


def test_forked_child_that_outlives_its_parent_holds_no_lock(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", '[[stages]]\nstage = "rl"\nname = "rl"\n')
    inner, outer = os.pipe()
    parent = os.fork()
    if parent == 0:
        with locked(folder.path):
            if os.fork() == 0:
                os.write(outer, json.dumps(os.getpid()).encode())
                time.sleep(60)
            time.sleep(60)
        os._exit(0)
    child = json.loads(os.read(inner, 32))
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        os.kill(child, 0)
        with locked(folder.path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_export_of_a_running_run_reports_it(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "model"
    first, sign = waiting(tmp_path, run)
    code, message, _ = keel(tmp_path, "export", run, out)
    assert code == 0
    assert f"the run in {run} is still going; exported is the model of step-000002\n" in message
    code, message, _ = keel(tmp_path, "export", run, tmp_path / "again", "--json")
    facts = {"folder": str(tmp_path / "again"), "checkpoint": "step-000002", "running": True}
    facts["url"] = None  # not on the hub
    assert (code, json.loads(message)) == (0, facts)
    sign.unlink()
    assert first.end()[0] == 0
    code, message, _ = keel(tmp_path, "export", run, tmp_path / "whole")
    assert (code, "still going" in message) == (0, False)
