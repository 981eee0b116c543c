"""`keel compare`: recipes or algorithms over seeds, each run in a process of its own. Torch-free.

DIR/comparison.json  scores.csv  curves.csv  curves.png
DIR/plan.toml        what is compared; another comparison in the same folder is refused
DIR/.lock            held while it goes on
DIR/runs/ARM/seed-S/ ordinary run folders; DIR/runs/start/seed-S/ the stages that arms share
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from keel.analysis.comparison import Comparison, RunScore, compare, score_of
from keel.config.fields import unknown
from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe, Stage
from keel.platform import files
from keel.platform.signals import usable_cores
from keel.runs.layout import RECIPE
from keel.runs.reader import load
from keel.types import KeelError
from keel.workflows.processes import Children

START = "start"
PLAN = "plan.toml"


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared: a name and the recipe of its runs, but for the seed."""

    name: str
    recipe: Recipe

    @property
    def stage(self) -> Stage:
        """The last stage of reinforcement learning, whose evaluation is the score."""
        return [stage for stage in self.recipe.stages if stage.learns_from_rollouts][-1]

    @property
    def models(self) -> tuple[str, ...]:
        """The roles that take weights of their own."""
        objective = self.stage.explain(lora=self.recipe.model.lora is not None)
        return () if objective is None else objective.loaded


@dataclass(frozen=True, slots=True)
class Plan:
    """A comparison: its arms, the stages that they share (None: they share none), and seeds.

    `baseline` is the arm that all others are compared with (None: all pairs are).
    """

    arms: tuple[Arm, ...]
    shared: Recipe | None
    seeds: tuple[int, ...]
    baseline: str | None = None

    def document(self) -> dict[str, Any]:
        """What makes it this comparison; with more seeds or another baseline it is the same."""
        recipes = {arm.name: arm.recipe for arm in self.arms}
        recipes |= {} if self.shared is None else {START: self.shared}
        return {name: to_toml(recipe) for name, recipe in recipes.items()}


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that ended with an error, and its last line."""

    arm: str
    seed: int
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A comparison of the runs that finished, and those that did not."""

    comparison: Comparison
    runs: Mapping[str, Sequence[RunScore]]
    failed: tuple[FailedRun, ...]


def plan(
    recipes: Sequence[str],
    algorithms: Sequence[str] = (),
    overrides: Sequence[str] = (),
    vary: Mapping[str, Sequence[str]] | None = None,
    seeds: Sequence[int] = tuple(range(10)),
    shared_start: bool = True,
    baseline: str | None = None,
) -> Plan:
    """The arms: every recipe with every algorithm and every value of the keys in `vary`.

    Raises KeelError if a recipe is not valid, has no stage of reinforcement learning, only one
    arm is left, or none has the name of the baseline.
    """
    arms: list[Arm] = []
    for name in recipes:
        stages = [s.name for s in load_recipe(name, overrides).stages if s.learns_from_rollouts]
        if not stages:
            raise KeelError(f"recipe {name} has no stage of reinforcement learning to compare")
        choices = [[f"{stages[-1]}.algorithm={value}"] for value in algorithms] or [[]]
        for key, values in (vary or {}).items():
            choices = [[*choice, f"{key}={value}"] for choice in choices for value in values]
        for choice in choices:
            words = list(choice)
            if algorithms:  # ppo, not rl.algorithm=ppo
                words[0] = words[0].partition("=")[2]
            if len(recipes) > 1 or not words:
                words = [Path(name).stem, *words]
            label = "".join(c if c.isalnum() or c in "._=-" else "_" for c in "-".join(words))
            arms.append(Arm(label, load_recipe(name, [*overrides, *choice])))
    names = [arm.name for arm in arms]
    for arm in arms:
        if arm.stage.sampling is None or not arm.stage.sampling.validation_prompts:
            raise KeelError(
                f"{arm.stage.name}.evaluation.prompts = 0 leaves {arm.name} without a score to "
                "compare: set it to 1 or more"
            )
    if len(set(names)) < max(len(names), 2):
        raise KeelError(
            f"there is nothing to compare in {', '.join(names)}: name several recipes, or "
            "--algorithms a,b, or --vary KEY=a,b"
        )
    if baseline is not None and baseline not in names:
        raise KeelError(f"--baseline: {unknown('arm', baseline, names)}")
    shared = _shared(arms) if shared_start else None
    if shared is not None:
        arms = [Arm(arm.name, _after(arm.recipe, len(shared.stages))) for arm in arms]
    return Plan(tuple(arms), shared, tuple(seeds), baseline)


def _shared(arms: Sequence[Arm]) -> Recipe | None:
    """The stages before the first of reinforcement learning, if all arms have the same."""
    starts = []
    for arm in arms:
        kinds = [stage.learns_from_rollouts for stage in arm.recipe.stages]
        first = kinds.index(True)
        plain = arm.recipe.model.lora is None and not any(
            stage.reward_model for stage in arm.recipe.stages[:first]
        )
        starts.append(
            arm.recipe.model_copy(
                update={"stages": arm.recipe.stages[:first], "name": START, "description": ""}
            )
            if plain and first
            else None
        )
    same = all(start == starts[0] for start in starts)
    return starts[0] if same else None


def _after(recipe: Recipe, stages: int) -> Recipe:
    """The later stages, from a model whose folder is named when a run begins."""
    model = recipe.model.model_copy(update={"name": f"the {START}'s", "build": None})
    return recipe.model_copy(update={"stages": recipe.stages[stages:], "model": model})


# ---------------------------------------------------------------- running


def run(
    chosen: Plan, folder: Path, jobs: int | None = None, note: Callable[[str], None] = print
) -> Outcome:
    """Run what is not finished yet, `jobs` runs at a time, and compare.

    Raises KeelError if the folder holds another comparison, or another process compares in it;
    KeyboardInterrupt after Ctrl-C or SIGTERM, with every run stopped at a checkpoint: the same
    call goes on from there.
    """
    _refuse_other(chosen, folder)  # before there is a lock in it
    with files.os_errors(folder, "make"):
        folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder, "--out"):
        _refuse_other(chosen, folder)
        files.write_text(folder / PLAN, _document(chosen))
        return outcome(chosen, folder, _run_all(chosen, folder, jobs, note))


def _run_all(
    chosen: Plan, folder: Path, jobs: int | None, note: Callable[[str], None]
) -> list[FailedRun]:
    """Run what is not finished yet; the runs that failed."""
    cores = usable_cores()
    stated = max(arm.recipe.threads or 1 for arm in chosen.arms)
    jobs = min(jobs or max(1, cores // stated), cores)
    threads = max(1, cores // jobs)
    children = Children(threads)
    failed: list[FailedRun] = []

    def one(arm: Arm | None, seed: int) -> FailedRun | None:
        name, recipe = (START, chosen.shared) if arm is None else (arm.name, arm.recipe)
        assert recipe is not None
        started = arm is not None and chosen.shared is not None
        why = _train(children, folder, name, recipe, seed, threads, started)
        if why is None or children.stopped.is_set():
            return None
        note(f"{name} seed {seed} failed: {why}")
        return FailedRun(name, seed, why)

    with _stopping(children), ThreadPoolExecutor(jobs) as pool:
        lost = set()
        if chosen.shared is not None:
            note(f"{START}: the stages that all arms share, {len(chosen.seeds)} seeds")
            for found in pool.map(lambda seed: one(None, seed), chosen.seeds):
                failed += [] if found is None else [found]
            lost = {one.seed for one in failed}
        tasks = [(arm, seed) for seed in chosen.seeds for arm in chosen.arms if seed not in lost]
        each = " or ".join(sorted({str(arm.recipe.threads or threads) for arm in chosen.arms}))
        note(f"{len(tasks)} runs, {jobs} at a time, {each} threads each")
        for found in pool.map(lambda task: one(*task), tasks):
            failed += [] if found is None else [found]
    if children.stopped.is_set():
        raise KeyboardInterrupt
    return failed


def outcome(chosen: Plan, folder: Path, failed: Sequence[FailedRun] = ()) -> Outcome:
    """The comparison of the finished runs of a folder."""
    runs: dict[str, list[RunScore]] = {}
    for arm in chosen.arms:
        for seed in chosen.seeds:
            path = folder / "runs" / arm.name / f"seed-{seed}"
            if _finished(path):
                peak = _costs(path).get("peak_bytes")
                score = score_of(load(path), arm.name, seed, arm.stage.name, peak)
                runs.setdefault(arm.name, []).append(score)
    if len(runs) < 2:
        raise KeelError(
            f"fewer than two arms of {folder} have a finished run: see the errors above"
        )
    if chosen.baseline is not None and chosen.baseline not in runs:
        raise KeelError(f"no run of the baseline {chosen.baseline} finished: see the errors above")
    models = {arm.name: arm.models for arm in chosen.arms}
    found = compare(runs, models, chosen.baseline)
    if failed:
        names = ", ".join(f"{one.arm} seed {one.seed}" for one in failed)
        found = replace(found, notes=(*found.notes, f"left out, since they failed: {names}"))
    return Outcome(found, runs, tuple(failed))


def _train(
    children: Children,
    folder: Path,
    name: str,
    recipe: Recipe,
    seed: int,
    threads: int,
    started: bool,
) -> str | None:
    """One run, from its start or its newest checkpoint, to its end; why it did not get there."""
    path = folder / "runs" / name / f"seed-{seed}"
    if not _finished(path):
        arguments = ["train", "--resume", "--quiet", "--run", str(path)]
        if not (path / RECIPE).is_file():
            source = path.parent / f"seed-{seed}.toml"
            with files.os_errors(path.parent, "make"):
                path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(source, to_toml(_seeded(recipe, seed, threads, folder, started)))
            arguments = ["train", str(source), "--quiet", "--run", str(path)]
        ended = children.run(arguments)
        before = _costs(path).get("peak_bytes", 0)
        if path.is_dir():
            costs = {"peak_bytes": max(ended.peak_bytes, before)}
            files.write_text(path.parent / f"seed-{seed}.costs.json", json.dumps(costs) + "\n")
        if ended.code != 0:
            return ended.last_line or f"exit status {ended.code}"
    if name == START:
        model = folder / "runs" / START / f"seed-{seed}-model"
        if not (model / "config.json").is_file():
            ended = children.run(["export", str(path), str(model)])
            if ended.code != 0:
                return ended.last_line or f"exit status {ended.code}"
    return None


def _seeded(recipe: Recipe, seed: int, threads: int, folder: Path, started: bool) -> Recipe:
    update: dict[str, Any] = {"seed": seed, "threads": recipe.threads or threads}
    if started:
        name = str(folder.absolute() / "runs" / START / f"seed-{seed}-model")
        update["model"] = recipe.model.model_copy(update={"name": name})
    return recipe.model_copy(update=update)


def _costs(path: Path) -> dict[str, Any]:
    costs = path.parent / f"{path.name}.costs.json"
    try:
        found: dict[str, Any] = json.loads(costs.read_bytes())
    except (OSError, ValueError):  # none, or damaged
        return {}
    return found


def _finished(path: Path) -> bool:
    return (path / RECIPE).is_file() and bool(load(path).info().get("finished"))


def _document(chosen: Plan) -> str:
    return tomli_w.dumps(chosen.document())


def _refuse_other(chosen: Plan, folder: Path) -> None:
    """KeelError if the folder is of something else than this comparison."""
    path = folder / PLAN
    if path.is_file():
        if path.read_text(encoding="utf-8") != _document(chosen):
            raise KeelError(
                f"{folder} holds another comparison (plan.toml differs): give another --out, or "
                "the recipes and keys that it was made with"
            )
    elif folder.is_dir():
        of_a_start = {files.LOCK, files.aside(path).name}
        if {inside.name for inside in folder.iterdir()} - of_a_start:
            raise KeelError(f"{folder} is not empty and holds no comparison: give another --out")


@contextmanager
def _stopping(children: Children) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP stop the children, and then the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        threading.Thread(target=children.stop).start()  # it takes a lock that this thread may hold

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
