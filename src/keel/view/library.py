"""The run folders that are shown, followed while they grow.

Torch-free.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.metrics import Panel, panels_of, with_first
from keel.analysis.text import visible
from keel.config.load import load_recipe
from keel.runs.layout import RECIPE, RunFolder
from keel.runs.reader import Column, FollowedFile, Run, load
from keel.types import KeelError
from keel.view.rollout_rows import RolloutIndex, StepRows, figure, step_rows

DEPTH = 4
"""Levels of folders below a given one in which runs are looked for."""
_Identity = tuple[Path, int, int]
SPEEDS = ("speed/", "mfu/", "memory/")
"""What is plotted of timings.jsonl."""
SHOWN = ("reward", "episode/return", "eval/return", "loss")
ACCURACY = ("eval/pass@1", "eval/accuracy")


@dataclass(eq=False)
class OpenRun:
    """One run: its files, followed, and what its recipe says of it."""

    name: str
    run: Run
    metrics: FollowedFile
    timings: FollowedFile
    index: RolloutIndex

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        return self.run.recipe()

    @property
    def folder(self) -> RunFolder:
        return self.run.folder

    def update(self) -> tuple[int, int]:
        """Read what was written since; the versions of metrics and timings."""
        return self.metrics.update(), self.timings.update()

    def columns(self, stage: str) -> Mapping[str, Column]:
        """The metrics of a stage, and what of its timings is plotted; evaluations begin with the
        one before its first step."""
        try:
            info = self.run.info()
        except KeelError:  # the status says so
            info = {}
        timed = self.timings.columns(stage)
        speeds = {name: newest(timed[name]) for name in timed if name.startswith(SPEEDS)}
        return {**with_first(self.metrics.columns(stage), info, stage), **speeds}

    def stage_config(self, stage: str) -> Mapping[str, Any]:
        """The table of a stage in the recipe."""
        names = self.run.stages
        if stage not in names:
            raise KeelError(f"no stage {stage!r} in {self.name}: it has {', '.join(names)}")
        table = dict(self.recipe["stages"][names.index(stage)])
        if table.get("num_train_epochs", "none") != "none":
            table["steps"] = self.run.info().get("steps", {}).get(stage, 0)
        return table

    def stage(self, wanted: str | None = None) -> str:
        """The stage to show: the one that is asked for, else the last that has records."""
        if wanted is not None and wanted in self.run.stages:
            return wanted
        written = self.metrics.stages()
        return written[-1] if written else self.run.stages[0]

    @property
    def algorithm(self) -> str:
        """The last stage's algorithm; its kind if it has none by name."""
        stage = self.recipe["stages"][-1]
        algorithm = stage.get("algorithm")
        preset = algorithm.get("preset") if isinstance(algorithm, dict) else algorithm
        return str(preset or stage["stage"])

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed", 0))

    @property
    def tasks(self) -> str:
        """What the last stage trains on: tasks, data or an environment by name, files by theirs."""
        stage = self.recipe["stages"][-1]
        data = stage.get("data")  # the sets of an sft stage are several
        own = data if isinstance(data, list) else [data]
        tables = stage.get("tasks") or [*own, stage.get("environment")]
        found = [[t.get(key) for key in ("path", "name", "id")] for t in tables if t]
        names = [[name for name in one if name not in (None, "none")] for one in found]
        return ", ".join(Path(str(one[0])).name for one in names if one)

    @property
    def begun(self) -> str:
        """When the recipe was written, to the minute."""
        when = time.localtime(self.folder.recipe.stat().st_mtime)
        return time.strftime("%Y-%m-%d %H:%M", when)

    def rollout_steps(self) -> list[tuple[str, int]]:
        """The stages and steps that have rollouts, in the order of the run."""
        return [(self.run.stages[p.stage], p.step) for p in self.run.rollout_places()]

    def rows(self, stage: str, step: int) -> StepRows:
        """The rollouts of a step. Raises KeelError if it has none, or the file is damaged."""
        return step_rows(self.run, stage, step)

    def facts(self) -> dict[str, Any]:
        """The run as a line of a table: what it trains, how far it is, its newest figures.

        Raises KeelError if it cannot be read.
        """
        self.update()
        stage = self.stage()
        status, columns = status_of(self, stage), self.columns(stage)
        last = next(((n, columns[n].values[-1]) for n in SHOWN if n in columns), ("", None))
        accuracy = next((columns[n].values[-1] for n in ACCURACY if n in columns), None)
        return {
            "run": visible(self.name, 80),
            "state": status.state,
            "begun": self.begun,
            "task": visible(self.tasks, 60),
            "algorithm": visible(self.algorithm, 40),
            "seed": self.seed,
            "step": status.step,
            "steps": status.steps,
            "measure": last[0],
            "newest": figure(last[1]),
            "accuracy": figure(accuracy),
            "tags": visible(", ".join(self.run.tags()), 80),
        }


class Library:
    """The runs in and below the given folders, by name. Nothing else can be opened."""

    def __init__(self, roots: Iterable[Path | str]) -> None:
        self.roots = [Path(root) for root in roots]
        self._found: dict[str, Path] = {}
        self._open: dict[str, tuple[_Identity, OpenRun]] = {}
        self._lock = threading.Lock()
        self.names()

    def names(self) -> list[str]:
        """The names of the runs, those that began since included."""
        self._found = found = self._paths()
        if not found:
            where = ", ".join(map(str, self.roots))
            raise KeelError(f"no run in {where}: give a run folder, or a folder of them")
        return list(found)

    def get(self, name: str) -> OpenRun:
        """The run that has the name now.

        Raises KeelError if there is none, or it cannot be read.
        """
        with self._lock:
            identity = _identity(self._found.get(name))
            if identity is None:
                self._found = self._paths()
                identity = _identity(self._found.get(name))
            if identity is None:
                self._open.pop(name, None)
                raise KeelError(f"no run {name!r} here")
            if name not in self._open or self._open[name][0] != identity:
                run = load(identity[0])
                followed = (FollowedFile(run.folder.metrics), FollowedFile(run.folder.timings))
                self._open[name] = (
                    identity,
                    OpenRun(name, run, *followed, RolloutIndex(run.folder)),
                )
            return self._open[name][1]

    def chosen(self, names: Iterable[str]) -> list[OpenRun]:
        """Those of the named runs that are here; of no names the first there is.

        Raises KeelError if none of them is here.
        """
        known, wanted = self.names(), list(names)
        found = [name for name in wanted if name in known] or wanted[:1] or known[:1]
        return [self.get(name) for name in found]

    def _paths(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for root in self.roots:
            for path in _runs_below(root, DEPTH):
                name = path.resolve().name if path == root else path.relative_to(root).as_posix()
                while name in found and found[name] != path:
                    name += "'"
                found[name] = path
        return found


def _identity(path: Path | None) -> _Identity | None:
    """What tells a run from one that was in its folder before; None if there is no run."""
    if path is None:
        return None
    try:
        facts = (path / RECIPE).stat()
    except OSError:
        return None
    return path, facts.st_ino, facts.st_mtime_ns


def _runs_below(folder: Path, depth: int) -> list[Path]:
    try:
        if (folder / RECIPE).is_file():
            return [folder]
        if depth == 0 or not folder.is_dir():
            return []
        inside = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
    except OSError:  # a folder that may not be read holds no run to show
        return []
    # Not in hidden folders, such as an environment's.
    seen = sorted((p for p in inside if not p.name.startswith(".")), key=_natural)
    return [run for path in seen for run in _runs_below(path, depth - 1)]


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key by which names with numbers are sorted by these: run-2 before run-10."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]


def pictures_of(run: OpenRun, stage: str) -> list[tuple[str, Path]]:
    """What a stage plotted of its reward model or of over-optimisation: titles and PNG files."""
    longer = tuple(f"{name}-" for name in run.run.stages if name.startswith(f"{stage}-"))
    paths = sorted(run.folder.pictures.glob(f"{stage}-*.png"))
    return [
        (visible(path.stem.removeprefix(f"{stage}-").replace("-", " "), 100), path)
        for path in paths
        if not path.name.startswith(longer)
    ]


def recipe_of(run: OpenRun) -> Any:
    """The validated recipe of a run; None if this version of Keel does not accept it."""
    try:
        return load_recipe(run.folder.recipe)
    except KeelError:
        return None


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run in figures; None if it is not known."""

    state: str
    stage: str
    step: int
    steps: int
    seconds_left: float | None
    tokens_per_second: float | None
    cost: float | None

    def parts(self) -> list[str]:
        """As short texts."""
        out = [self.state, f"{self.stage}: step {self.step:,} of {self.steps:,}"]
        if self.seconds_left is not None and self.state == "running":
            out.append(f"about {duration(self.seconds_left)} left")
        if self.tokens_per_second is not None:
            out.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.cost is not None:
            out.append(f"cost {self.cost:.2f}")
        return out


def newest(column: Column) -> Column:
    """A column with one value a step: the last of those that a step repeated after a kill has."""
    steps, first = np.unique(column.steps[::-1], return_index=True)
    return Column(steps, column.values[::-1][first])


def status_of(run: OpenRun, stage: str, price: float | None = None) -> Status:
    """Where a run is; `price` is of an hour, and what judges cost is added to it."""
    columns, times = run.metrics.columns(stage), run.timings.columns(stage)
    steps = int(run.stage_config(stage).get("steps", 0))
    done = columns.get("environment_steps")
    written = [column.steps[-1] for column in columns.values()]
    step = int(done.values[-1]) if done is not None else int(max(written, default=0))
    total = times.get("total")
    left = speed = cost = None
    if total is not None and len(total.values):
        each = float(np.median(total.values[-20:]))
        taken = len(total.values) if done is not None else step
        left = each * max(steps - step, 0) * (taken / step if step else 0)
        if (tokens := columns.get("step/tokens")) is not None and each > 0:  # of older runs
            speed = float(np.median(tokens.values[-20:])) / each
    if (rates := times.get("speed/step")) is not None:
        speed = float(np.median(rates.values[-20:]))
    dollars = ("judge/dollars", "eval/judge/dollars")
    paid = [columns[name].values.sum() for name in dollars if name in columns]
    if price is not None or paid:
        totals = [run.timings.columns(name).get("total") for name in run.timings.stages()]
        hours = sum(float(one.values.sum()) for one in totals if one is not None) / 3600
        cost = float(sum(paid)) + hours * (price or 0.0)
    return Status(run.run.state(), stage, step, steps, left, speed, cost)


def duration(seconds: float) -> str:
    """A time in the unit that fits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def panels(run: OpenRun, stage: str) -> list[Panel]:
    """The panels of a stage."""
    config = run.stage_config(stage)
    alone = config.get("rollout", {}).get("group_size") == 1
    return panels_of(str(config["stage"]), list(run.columns(stage)), alone=alone)
