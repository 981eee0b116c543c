from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keel.config.stage import Checkpoints
from keel.platform import files
from keel.platform.files import locked
from keel.runs import lifecycle
from keel.runs.callbacks import Callback, RunState
from keel.runs.layout import RunFolder
from keel.runs.lifecycle import run_lifecycle, write_metadata
from keel.runs.reader import load
from keel.runs.writer import RunWriter
from keel.types import KeelError
from tests.runs.example import ONE, Progress, fill, one_stage, row, two_stages

HOW = "resume with: keel train --resume --run "


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def go(
    folder: RunFolder, act: Callable[[RunWriter], object], resume: bool, command: Any = "train"
) -> None:
    """A run that does something and then fails."""
    with run_lifecycle(folder, resume, command=command) as (writer, _):
        act(writer)
        raise KeelError("reward 'x' raised ValueError")


def stopped(
    folder: RunFolder, act: Callable[[RunWriter], object], resume: bool, command: str = "train"
) -> str:
    """Its message."""
    with pytest.raises(KeelError) as caught:
        go(folder, act, resume, command)
    return str(caught.value)


def test_error_reports_the_step_reached_and_how_to_continue(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    why = "reward 'x' raised ValueError"
    loss = {"loss": 1.0}
    printed = stopped(folder, lambda s: s.recorded(Progress(0, 1), loss, [], 0.5), False)
    message = f"stopped after warmup step 1 (no checkpoint yet): {why}"
    assert printed == f"{message}; {HOW}{folder.path}"
    assert load(folder.path).events()[-1]["text"] == message

    def two_steps(writer: RunWriter) -> None:
        writer.checkpoint(Progress(0, 2), fill, Checkpoints())
        writer.recorded(Progress(1, 1), loss, [], 0.5)

    printed = stopped(folder, two_steps, True)
    assert printed.startswith(
        f"stopped after rl step 1 (newest checkpoint: warmup step 2): {why}; "
    )
    assert stopped(folder, lambda s: None, True, "control") == (
        f"stopped after warmup step 2 (newest checkpoint: step 2): {why}; "
        f"resume with: keel control --resume --run {folder.path}"
    )


def test_new_run_that_fails_at_once_leaves_nothing(tmp_path: Path) -> None:
    for name in ("made", "there"):
        path = tmp_path / name
        if name == "there":
            path.mkdir()
        folder = lifecycle.create_run(ONE, "x", path)
        with pytest.raises(KeelError, match="no such model"), run_lifecycle(folder, False):
            raise KeelError("no such model")
        assert path.exists() == (name == "there")
    assert list(path.iterdir()) == []
    assert lifecycle.create_run(ONE, "x", path).recipe.read_text() == ONE


@pytest.mark.parametrize("kept", ["rows", "logs"])
def test_failed_run_keeps_what_took_effort(kept: str, tmp_path: Path) -> None:
    folder = one_stage(tmp_path)

    def keep(writer: RunWriter) -> None:
        (folder.path / kept).mkdir()
        (folder.path / kept / "rl-train.jsonl").write_text("{}\n")

    printed = stopped(folder, keep, False)
    assert printed.startswith("stopped before the first step: reward")
    assert printed.endswith(f"; {HOW}{folder.path}")
    assert (folder.path / kept / "rl-train.jsonl").exists()


def test_errors_of_the_disk_are_one_line(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    missing = FileNotFoundError(errno.ENOENT, "No such file", str(folder.path / "x" / "y.png"))
    for error, path in ((full, folder.path), (missing, folder.path / "x" / "y.png")):
        with pytest.raises(KeelError) as caught, run_lifecycle(folder, True):
            raise error
        assert f"cannot write {path}: {error.strerror}: fix" in str(caught.value)
    strange = ConnectionResetError(errno.ECONNRESET, "reset")
    with pytest.raises(ConnectionResetError), run_lifecycle(folder, True):
        raise strange


def test_errors_of_the_disk_in_a_library_are_one_line(tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    printed = f"cannot write {target}: No space left on device"
    with pytest.raises(KeelError, match=printed), files.os_errors(target):
        raise RuntimeError("Error: I/O error: No space (os error 28)")
    with pytest.raises(RuntimeError), files.os_errors(target):
        raise RuntimeError("Error 28")


def test_timings_include_the_time_of_recording(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    with run_lifecycle(folder, False) as (writer, _):
        with writer.clock("rollout"):
            pass
        writer.recorded(Progress(0, 1), {"loss": 1.0}, [row()], 0.25)
        writer.recorded(Progress(0, 2), {"loss": 1.0}, [], 0.5)
    first, second = load(folder.path).timings()
    assert first["total"] == 0.25
    assert first["record"] > 0
    assert "rollout" in first
    assert "rollout" not in second
    assert load(folder.path).seconds() == 0.75
    assert load(folder.path).seconds("other") == 0


def test_callback_whose_output_is_closed_is_removed(tmp_path: Path) -> None:
    class Closed(Callback):
        calls = 0

        def on_stage(self, state: RunState) -> None:
            self.calls += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def on_note(self, text: str) -> None:
            raise AssertionError("it was removed")

    folder, closed = one_stage(tmp_path), Closed()
    with run_lifecycle(folder, False, [closed]) as (writer, _):
        writer.callbacks.stage("rl", "rl", 3, 0)
        writer.callbacks.stage("rl", "rl", 3, 0)
        writer.note("still here")
    assert closed.calls == 1
    events = load(folder.path).events()
    assert [event["event"] for event in events] == ["output_lost", "note"]


def declared(folder: RunFolder, resume: bool, threads: int, packages: list[str]) -> list[str]:
    notes = Notes()
    with run_lifecycle(folder, resume, [notes]) as (writer, _):
        write_metadata(writer, "sort", 3, threads, packages)
        if not resume:
            writer.checkpoint(Progress(0, 5), fill, Checkpoints())
    return notes.notes


def test_other_threads_or_versions_are_noted(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    assert declared(folder, False, 2, ["numpy", "torch"]) == []
    begun = json.loads(folder.run_json.read_text())
    assert declared(folder, True, 2, ["numpy", "torch"]) == []
    known = dict(begun["versions"], numpy="1.0")
    folder.run_json.write_text(json.dumps({**begun, "versions": known, "finished": True}))
    (printed,) = declared(folder, True, 4, ["numpy", "torch"])
    now = begun["versions"]["numpy"]
    assert printed == (
        f"this run began with threads 2 (now 4), numpy 1.0 (now {now}): it goes on, but not byte "
        "for byte as if it had never stopped"
    )
    after = json.loads(folder.run_json.read_text())
    assert (after["threads"], after["versions"]["numpy"], after["finished"]) == (2, "1.0", False)
    assert load(folder.path).events()[-1]["text"] == printed


def start_elsewhere(path: Path | None) -> int:
    """Another process starts a run with a recipe of its own: 0 where it may."""
    process = os.fork()
    if process == 0:
        try:
            lifecycle.create_run(ONE + "seed = 2\n", "sort", path)
        except KeelError:
            os._exit(2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def first(monkeypatch: Any, module: Any, name: str, act: Callable[[], Any]) -> list[Any]:
    """Something happens once, before the first call of a function; what came of it."""
    real, came = getattr(module, name), []

    def call(*arguments: Any, **names: Any) -> Any:
        if not came:
            came.append(None)
            came[0] = act()
        return real(*arguments, **names)

    monkeypatch.setattr(module, name, call)
    return came


@pytest.mark.parametrize(
    ("module", "name", "wins"), [(files, "write_text", True), (lifecycle, "locked", False)]
)
def test_second_start_in_one_folder_is_refused(
    module: Any, name: str, wins: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """The other starts amid the start of the first, or just before the first has the lock."""
    path = tmp_path / "run"
    other = first(monkeypatch, module, name, lambda: start_elsewhere(path))
    if wins:
        folder = lifecycle.create_run(ONE, "sort", path)
        with locked(folder.path):
            assert folder.recipe.read_text() == ONE
    else:
        with pytest.raises(KeelError, match="exists and is not empty"):
            lifecycle.create_run(ONE, "sort", path)
        assert "seed = 2" in (path / "recipe.toml").read_text()
    assert other == [2 if wins else 0]


def test_two_starts_without_a_name_get_two_folders(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lifecycle.create_run(ONE, "sort", None)
    ahead = first(monkeypatch, Path, "mkdir", lambda: start_elsewhere(None))
    folder = lifecycle.create_run(ONE, "sort", None)
    assert ahead == [0]
    assert folder.path == tmp_path / "runs" / "sort-3"
    assert "seed = 2" in (tmp_path / "runs" / "sort-2" / "recipe.toml").read_text()


def test_bad_recipe_makes_no_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (None, tmp_path / "run"):
        with pytest.raises(KeelError, match=r"no \[\[stages\]\]"):
            lifecycle.create_run("", "x", path)
    assert list(tmp_path.iterdir()) == []


def test_run_may_change_the_working_directory(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "other").mkdir()
    for resume in (False, True):
        monkeypatch.chdir(tmp_path)
        folder = lifecycle.resume_run("run") if resume else lifecycle.create_run(ONE, "x", "run")
        with run_lifecycle(folder, resume) as (writer, _):
            monkeypatch.chdir(tmp_path / "other")
            writer.recorded(Progress(0, 1 + resume), {"loss": 1.0}, [row()], 0.25)
            writer.checkpoint(Progress(0, 1 + resume), fill, Checkpoints())
    assert list((tmp_path / "other").iterdir()) == []
    assert len(load(tmp_path / "run").metrics()) == 2


def test_clock_measures_memory_of_each_phase(tmp_path: Path) -> None:
    """In GiB, the most of a phase's blocks; speeds are timings, not metrics."""
    peaks = iter([3 * 2**30, 5 * 2**30, 2**30])

    class Meter:
        resets = 0

        def reset(self) -> None:
            self.resets += 1

        def peak(self) -> int:
            return next(peaks)

    folder = one_stage(tmp_path)
    with run_lifecycle(folder, False) as (writer, _):
        writer.clock.memory = meter = Meter()
        for phase in ("update", "update"):
            with writer.clock(phase):
                pass
        assert meter.resets == 2
        writer.recorded(Progress(0, 1), {"loss": 1.0}, [], 0.5, {"speed/step": 7.0})
    (timing,) = load(folder.path).timings()
    assert timing["memory/update"] == 5.0
    assert timing["memory/record"] == 1.0
    assert timing["speed/step"] == 7.0
    (metrics,) = load(folder.path).metrics()
    assert set(metrics) == {"stage", "step", "loss"}


def test_other_sampling_of_sampled_rows_is_refused(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    text = folder.recipe.read_text("utf-8")
    changed = f"{text}sampled = {{ train = 9 }}\n"
    files.make_folder(folder.rows_folder)
    folder.rows("rl", "train").write_text("{}\n")
    with pytest.raises(KeelError, match=r"rl\.sampled\.train differs, .*rl-train\.jsonl: del"):
        lifecycle.change_recipe(folder, text, changed)
    folder.rows("rl", "train").unlink()
    lifecycle.change_recipe(folder, text, changed)
    assert folder.recipe.read_text("utf-8").count("train = 9") == 1
