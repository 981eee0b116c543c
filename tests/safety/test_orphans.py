"""Whatever a run starts ends with it, also when it is killed while that is at work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keel.platform.process import Lifeline
from tests.platform.processes import Process, descendants, end, eventually, gone, look
from tests.rewards.learned import save_model
from tests.safety.parents import KINDS, LOOP
from tests.shared import needs_bubblewrap
from tests.source_tree import ROOT

BUSY = 0.3
"""Seconds of processor time, beyond what the first piece of work took, that tell of the second."""
SLEEPER = "sleep 600"
STARTS_ANOTHER = {"sandboxed code": 1, "trusted code": 1, "environments": 2}
"""Kinds whose work starts a process; how many of them."""


@contextmanager
def started(*command: str, message: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process, once it has said a word; nothing of it is left behind."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE if message else subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    left: set[Process] = set()
    try:
        if process.stdout is not None:
            assert process.stdout.readline().strip() == message
        yield process
    finally:
        left = descendants(process.pid)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        end(left)


def at_work(parent: int, sleepers: int) -> set[Process]:
    """The descendants of a process, once they are in the midst of something."""
    before = {one: one.seconds for one in descendants(parent)}

    def busy() -> bool:
        now = descendants(parent)
        if sum(one.command.strip() == SLEEPER for one in now) < sleepers:
            return False
        return bool(sleepers) or any(one.seconds > before.get(one, 0.0) + BUSY for one in now)

    assert eventually(busy, seconds=300.0)  # it imports torch first
    return descendants(parent)


def finish(process: subprocess.Popen[str], how: str) -> None:
    """End a process: at once, or by a signal until it does, which is the second time."""
    if how == "killed":
        process.kill()
    else:
        os.kill(process.pid, signal.SIGINT)
        # One that arrives before the first was handled is the same signal.
        again = signal.SIGINT
        assert eventually(lambda: process.poll() is not None or os.kill(process.pid, again))
    assert process.wait() != 0


@pytest.mark.quick("environments")
@needs_bubblewrap
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_a_parent_that_is_killed(kind: str, tmp_path: Path) -> None:
    needed = {"mathematics": "math_verify", "environments": "gymnasium"}
    pytest.importorskip("reasoning_gym" if kind == "arithmetic" else needed.get(kind, "keel"))
    if kind == "model":
        save_model(tmp_path, "outcome")
    with started("-m", "tests.safety.parents", kind, str(tmp_path), message="at work") as parent:
        processes = at_work(parent.pid, STARTS_ANOTHER.get(kind, 0))
        try:
            finish(parent, "killed")
            assert gone(processes) == set()
        finally:
            end(processes)


RECIPE = """
extends = "tiny"
threads = 1
[[stages]]
stage = "rl"
algorithm = "grpo"
steps = 4
[[stages.tasks]]
name = "jsonl"
path = {data!r}
[stages.rollout]
prompts_per_step = 2
group_size = 2
max_tokens = 4
[stages.evaluation]
prompts = 0
[stages.rewards]
timeout = 600.0
[[stages.rewards.functions]]
function = "code"
options = {{ trusted = true, timeout = 600.0, prepend = "before", memory_mb = 4096 }}
"""


@pytest.mark.slow
def test_nothing_outlives_a_run(tmp_path: Path) -> None:
    """A second Ctrl-C ends a run at once, while its rewards are at work."""
    rows = [{"prompt": f"{n}>", "tests": "assert 1", "before": LOOP} for n in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(data=str(data)))
    command = ("-m", "keel", "train", str(tmp_path / "recipe.toml"), "--quiet")
    with started(*command, "--run", str(tmp_path / "run")) as run:
        processes = at_work(run.pid, 2)
        try:
            finish(run, "interrupted")
            assert gone(processes) == set()
        finally:
            end(processes)


def test_forked_child_does_not_hold_the_lifeline() -> None:
    lifeline = Lifeline()
    group = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        pass_fds=(lifeline.inner,),
        start_new_session=True,
    )
    lifeline.tie(group.pid)
    lifeline.give()
    other = os.fork()
    if other == 0:
        time.sleep(600)
        os._exit(0)
    try:
        lifeline.cut()
        assert group.wait(timeout=60) == -signal.SIGKILL
        assert os.waitpid(other, os.WNOHANG) == (0, 0)  # it lives on, and held nothing
    finally:
        group.kill()
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def test_a_group_ends_whatever_it_does_about_signals() -> None:
    """It ignores SIGIO and the rest, as does what it started; the second is not even a child."""
    code = (
        "import os, signal, time\n"
        "for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "os.fork()\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"  # one write: two processes share the pipe
        "time.sleep(600)\n"
    )
    lifeline = Lifeline()
    group = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        pass_fds=(lifeline.inner,),
        start_new_session=True,
    )
    lifeline.tie(group.pid)
    lifeline.give()
    assert group.stdout is not None
    found = [look(int(group.stdout.readline())) for _ in range(2)]
    group.stdout.close()
    members = {seen[0] for seen in found if seen is not None}
    assert len(members) == 2
    try:
        lifeline.cut()
        assert gone(members) == set()
    finally:
        end(members)
        group.wait()
