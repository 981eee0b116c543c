"""The diagnosis of a run while it goes on: said once, changes nothing, stops nothing."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import keel
from keel.analysis.diagnosis import table
from keel.analysis.diagnosis.table import DiagnosisMonitor
from keel.analysis.progress import Bar, Lines
from keel.cli.main import main
from keel.cli.train import run_and_report, show
from keel.runs.callbacks import RunState
from keel.runs.layout import RunFolder
from keel.runs.reader import Run, load
from tests.runs.test_lifecycle import Notes

STEPS = 36


def always(completions: list[str], **columns: Any) -> list[float]:
    """The same reward for everything."""
    return [1.0 for _ in completions]


def train(folder: Path, **arguments: Any) -> Run:
    keys: dict[str, Any] = {
        "steps": STEPS,
        "rewards": always,
        "threads": 1,
        "evaluation": {"prompts": 0},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
        "checkpoints": {"every": 13, "keep": 9},
        "progress": False,
    }
    return keel.train("tiny", folder, **{**keys, **arguments})


def diagnoses(run: Run, kind: str = "diagnosis") -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == kind]


def files(folder: Path) -> dict[str, bytes]:
    """What of a run is a function of recipe and seed."""
    kept = ("metrics.jsonl", "rollouts/", "checkpoints/", "run.json", "recipe.toml")
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {n: p.read_bytes() for n, p in found.items() if p.is_file() and n.startswith(kept)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Notes]:
    """A run whose reward is at its maximum, and the notes that it showed; tests only read it."""
    notes = Notes()
    return train(tmp_path_factory.mktemp("finished") / "run", callbacks=[notes]), notes


def test_condition_is_shown_and_recorded_once_during_the_run(finished: tuple[Run, Notes]) -> None:
    run, notes = finished
    (event,) = diagnoses(run)
    assert event["condition"] == "saturated-reward"
    assert event["last_step"] < STEPS
    assert event["evidence"]
    assert event["changes"]
    warnings = [text for text in notes.notes if text.startswith("WARNING: rl step")]
    assert warnings == [f"WARNING: {event['text']}"]
    assert "\n" not in event["text"]


@pytest.mark.slow
def test_a_run_is_byte_for_byte_that_without_diagnosis(
    finished: tuple[Run, Notes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it, _ = finished
    assert diagnoses(with_it)
    monkeypatch.setattr(DiagnosisMonitor, "on_record", lambda self, state: None)
    without = train(tmp_path / "without")
    assert not diagnoses(without)
    a, b = files(with_it.folder.path), files(without.folder.path)
    assert len(a) > STEPS
    assert a == b


def test_error_in_a_condition_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[Any]:
        raise ZeroDivisionError("in a condition")

    monkeypatch.setattr(table, "conditions_of", broken)
    run = train(tmp_path / "run", steps=12)
    assert len(run.metrics()) == 12
    (event,) = diagnoses(run, "diagnosis_failed")
    assert "ZeroDivisionError: in a condition" in event["text"]


@pytest.mark.slow
def test_resumed_run_keeps_history_and_repeats_no_diagnosis(tmp_path: Path) -> None:
    class StopEarly:
        def __init__(self, step: int) -> None:
            self.at = step

        def on_step(self, state: RunState) -> None:
            if state.step == self.at:
                state.control.stop("enough")

    folder = tmp_path / "run"
    train(folder, callbacks=[StopEarly(13)])
    assert not diagnoses(load(folder))  # it takes ten steps and two checks
    resumed = {"rewards": always, "resume": True, "progress": False}
    keel.train(None, folder, **resumed, callbacks=[StopEarly(21)])
    (event,) = diagnoses(load(folder))
    assert event["first_step"] == 1
    assert event["last_step"] == 20  # without the steps before the stop there are too few
    keel.train(None, folder, **resumed)
    assert len(diagnoses(load(folder))) == 1


@pytest.mark.parametrize("shown", [Lines, Bar])
def test_a_warning_that_names_a_reward_is_no_markup(
    shown: type[Lines] | type[Bar], capsys: pytest.CaptureFixture[str]
) -> None:
    shown(Console(file=sys.stdout, width=200)).on_note("rewards/[/x]/mean fell")
    assert "rewards/[/x]/mean fell" in capsys.readouterr().out


def test_other_stages_are_not_diagnosed(tmp_path: Path) -> None:
    run = keel.train(
        {"extends": "tiny", "stages": [{"stage": "sft", "steps": 12, "batch_size": 2,
                                        "tasks": [{"name": "sort_digits"}]}]},
        tmp_path / "run", progress=False, threads=1,
    )  # fmt: skip
    assert not diagnoses(run)
    assert not diagnoses(run, "diagnosis_failed")


def test_train_ends_with_what_was_found(
    finished: tuple[Run, Notes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = finished
    show(Console(file=sys.stdout, width=300), run.folder)
    out = capsys.readouterr().out
    assert "warning: The reward is at its maximum" in out
    assert "change rl.steps = 18 (now 36)" in out
    assert f"keel diagnose {run.folder.path}" in out
    short = train(tmp_path / "short", steps=3, checkpoints={"every": 3})
    show(Console(file=sys.stdout, width=300), short.folder)
    assert "no problems found" in capsys.readouterr().out


def test_train_prints_the_diagnoses_as_json(
    finished: tuple[Run, Notes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished[0].folder.path, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")

    def ended(callbacks: Sequence[object]) -> RunFolder:
        return folder

    asked = argparse.Namespace(json=True, quiet=True)
    assert run_and_report(asked, "train", ended, show) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main(["diagnose", str(folder.path), "--json"]) == 0
    assert printed["diagnoses"] == json.loads(capsys.readouterr().out)
    assert [one["condition"] for one in printed["diagnoses"]] == ["saturated-reward"]

    folder.rollouts(0, STEPS).write_bytes(b"damaged")
    assert run_and_report(asked, "train", ended, show) == 0
    assert json.loads(capsys.readouterr().out)["diagnoses"] is None
