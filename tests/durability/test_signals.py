"""Ctrl-C, SIGTERM, SIGHUP: a checkpoint, a clean end, and on the same."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from keel.platform.signals import AGAIN
from keel.runs.reader import load
from tests.durability.harm import plan
from tests.durability.processes import keel, start
from tests.durability.same import RUN, same
from tests.durability.test_full_disk import JUDGED

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def notice(signum: int) -> str:
    name = signal.Signals(signum).name
    return f"keel: {name}: finishing the current step; send it again to stop at once\n"


def resume_to_the_end(tmp_path: Path, run: Path, other: Path) -> None:
    """Resumed, it ends as the other: the checkpoint where it was stopped is gone."""
    code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert (code, err) == (0, "")
    assert "finished" in [row["event"] for row in load(run).events()]
    same(run, other)


@pytest.mark.quick("2-4")
@pytest.mark.parametrize(("signum", "step"), [(INT, 0), (TERM, 1), (HUP, 3), (INT, 4)])
def test_signal_saves_the_current_step(
    signum: int, step: int, tmp_path: Path, unharmed: Path
) -> None:
    """Step 0 is the evaluation before the first."""
    run = tmp_path / "run"
    harm = plan(step, signal=signum)
    code, out, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
    if step == 4:
        assert (code, err) == (0, notice(signum))  # there was nothing left to stop
        return same(run, unharmed)
    assert (code, err) == (128 + signum, notice(signum))
    how = f"keel train --resume --run {run}"
    assert out.endswith(f"stopped by {signal.Signals(signum).name}; resume with: {how}\n")
    assert load(run).checkpoints()[-1].place.step == step
    resume_to_the_end(tmp_path, run, unharmed)


@pytest.mark.slow
def test_second_signal_ends_at_once_and_its_echo_does_not(tmp_path: Path) -> None:
    """An echo is what timeout(1) sends: one to the process, one to its group."""
    sign = tmp_path / "sign"
    process = start(
        tmp_path, "train", "tiny", *RUN, "--run", tmp_path / "run",
        environment=plan(3, pause=str(sign)),
    )  # fmt: skip
    process.until(sign.exists)
    process.send(TERM)
    process.until(lambda: process.err.read_text() == notice(TERM))
    process.send(HUP)
    time.sleep(2 * AGAIN)
    process.send(HUP)
    time.sleep(AGAIN)
    assert process.process.is_alive()
    process.send(INT)
    assert process.end() == (-INT, process.out.read_text(), notice(TERM))
    assert [entry.place.step for entry in load(tmp_path / "run").checkpoints()] == [2]
    run = tmp_path / "echo"
    harm = plan(3, echo=TERM)
    code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
    assert (code, err) == (128 + TERM, notice(TERM))
    assert load(run).checkpoints()[-1].place.step == 3


def test_ignored_signal_stays_ignored(tmp_path: Path, unharmed: Path) -> None:
    run = tmp_path / "run"
    harm = plan(3, signal=HUP)
    ended = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm, ignore=[HUP])
    assert (ended[0], ended[2]) == (0, "")
    same(run, unharmed)


WARMUP = """
[[stages]]
stage = "sft"
name = "warmup"
steps = 4
batch_size = 4
tasks = [{ name = "sort_digits" }]
demonstration = "tests.durability.harm:demonstrate"
checkpoints = { every = 2, keep = 9 }
"""
STOPS = {
    # the newest checkpoint: what the signal comes with
    "warmup-step-000003": plan(10, on="demonstration", signal=INT),
    "warmup-step-000004": plan(4, on="demonstration", signal=INT),
    "judge-step-000000": plan(0, signal=INT),  # as its rows are sampled
}


@pytest.mark.slow
def test_signal_in_each_kind_of_stage_saves_its_step(tmp_path: Path) -> None:
    """One run, stopped within a stage, between two, before the first step of one and within it."""
    recipe, run, other = tmp_path / "two.toml", tmp_path / "run", tmp_path / "whole"
    text = JUDGED.replace("steps = 2", "steps = 30")
    recipe.write_text(text.replace("[[stages]]", WARMUP + "[[stages]]", 1))
    assert keel(tmp_path, "train", recipe, "--run", other)[0] == 0
    what: tuple[object, ...] = (recipe,)
    for newest, harm in STOPS.items():
        code, _, err = keel(tmp_path, "train", *what, "--run", run, environment=harm)
        assert (code, err) == (128 + INT, notice(INT))
        assert load(run).checkpoints()[-1].path.name == newest
        what = ("--resume",)
    process = start(tmp_path, "train", "--resume", "--run", run)
    process.until(lambda: (run / "metrics.jsonl").read_bytes().count(b"\n") > 4)
    process.send(INT)
    code, _, err = process.end()
    assert (code, err) == (128 + INT, notice(INT))
    assert load(run).checkpoints()[-1].path.name > "judge-step-000000"
    resume_to_the_end(tmp_path, run, other)
