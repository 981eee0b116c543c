"""Small recipes and a run of them, for tests of the loop."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.algorithms.presets import PRESETS
from keel.config.load import load_recipe
from keel.config.schema import Recipe
from keel.models.policy import load_policy
from keel.runs.callbacks import Callback, RunState
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.run import train

FAST = (
    "threads=1",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "evaluation.prompts=8",
    "checkpoints.every=2",
    "checkpoints.keep=9",
)


def small(*overrides: str, recipe: str = "tiny") -> Recipe:
    """A shipped recipe cut down to a few quick steps."""
    return load_recipe(recipe, [*FAST, "steps=4", *overrides])


def run(folder: Path, *overrides: str, recipe: str = "tiny") -> RunFolder:
    """A small run, whole."""
    return train(small(*overrides, recipe=recipe), folder)


def save_teacher(folder: Path, seed: int = 5) -> str:
    """Saves a random model that may teach the recipe `tiny`; the override that names it."""
    load_policy(small().model, seed).save(folder)
    return f"teacher.name={folder}"


SHOWN = "demonstrations={data=[{name='tests.training.small:sorted_digits'}], batch_size=6}"


def sorted_digits() -> list[dict[str, str]]:
    """Demonstrations for the recipe `tiny`: all numbers of three digits, sorted."""
    return [{"prompt": f"{n}>", "completion": "".join(sorted(str(n)))} for n in range(100, 1000)]


def needs(preset: str, folder: Path) -> tuple[str, ...]:
    """The overrides for what a preset reads besides rewards; a teacher is saved to the folder."""
    algorithm = PRESETS[preset].algorithm
    teacher = (save_teacher(folder),) if algorithm.needs_teacher else ()
    return (*teacher, *((SHOWN,) if algorithm.demonstrations else ()))


def metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return load(folder.path).metrics()


def info(folder: RunFolder) -> dict[str, Any]:
    return json.loads(folder.run_json.read_text())  # type: ignore[no-any-return]


def notes(folder: RunFolder) -> list[str]:
    return [e["text"] for e in load(folder.path).events() if e["event"] == "note"]


class Stop(Callback):
    """Sends the process a signal after a step or an evaluation; of one stage, where named."""

    def __init__(
        self,
        step: int | None = None,
        *,
        evaluation: int | None = None,
        stage: str | None = None,
        signum: int = signal.SIGTERM,
    ) -> None:
        self.at, self.left, self.name, self.signum = step, evaluation, stage, signum

    def on_step(self, state: RunState) -> None:
        self._stop(state, self.at)

    def on_evaluation(self, state: RunState, result: Mapping[str, Any]) -> None:
        self._stop(state, self.left)

    def _stop(self, state: RunState, step: int | None) -> None:
        if state.step == step and self.name in (None, state.stage):
            os.kill(os.getpid(), self.signum)


class Notes(Callback):
    """Records the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)
