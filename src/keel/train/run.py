"""A recipe from its start, or from its newest checkpoint, to its end."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe, SFTStage
from keel.models.policy import load_policy
from keel.runs import checkpoint
from keel.runs.layout import RunFolder, next_free
from keel.runs.lock import locked
from keel.runs.read import load
from keel.runs.record import Recorder, truncate_after, update_run_json
from keel.runs.trackers import open_trackers
from keel.train.interrupt import Interrupt, Interrupted, catching
from keel.train.session import Session
from keel.train.stages import Work, imitate, reinforce
from keel.train.state import Progress, read_progress, restore_policy
from keel.train.watch import Silent, Watcher
from keel.types import KeelError

RUNS = "runs"
"""Where run folders go unless one is named."""
REPORTED = ("keel-rl", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def train(
    recipe: Recipe | None,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> RunFolder:
    """Run a recipe into a run folder (the next free one under runs/ unless named).

    With `resume` the folder's newest whole checkpoint is where it goes on, under the folder's own
    recipe. Raises Interrupted, a checkpoint left, when Ctrl-C or SIGTERM came; KeelError for
    whatever a user can mend.
    """
    watcher = watcher or Silent()
    with ExitStack() as stack:
        interrupt = stack.enter_context(catching())
        place, recipe = _open(recipe, folder, resume)
        stack.enter_context(locked(place))
        start = _newest(place, watcher) if resume else None
        progress = Progress(stage=0) if start is None else read_progress(start)
        if resume:
            truncate_after(place, progress.stage, -1 if start is None else progress.step)
        if not resume:
            stack.enter_context(_leaving_nothing_unbegun(place))
        recorder = stack.enter_context(Recorder(place))
        recorder.event("resumed" if resume else "started", step=progress.step)
        _run(recipe, Session(place, recorder, watcher, interrupt), progress, start)
    return place


def _open(
    recipe: Recipe | None, folder: Path | str | None, resume: bool
) -> tuple[RunFolder, Recipe]:
    if resume:
        if folder is None:
            raise KeelError("--resume goes on with a run: name its folder with --run DIR")
        place = RunFolder.open(folder)
        return place, load_recipe(place.recipe)
    if recipe is None:
        raise KeelError("there is no recipe to run: name one, or resume a run")
    path = Path(folder) if folder is not None else next_free(RUNS, recipe.name)
    return RunFolder.create(path, to_toml(recipe)), recipe


@contextmanager
def _leaving_nothing_unbegun(place: RunFolder) -> Iterator[None]:
    """A run that fails before its first step leaves the folder as free as it was."""
    try:
        yield
    except KeelError:
        if place.metrics.exists() and place.metrics.stat().st_size == 0:
            shutil.rmtree(place.path, ignore_errors=True)
        raise


def _newest(place: RunFolder, watcher: Watcher) -> Path | None:
    def report(path: Path, wrong: str) -> None:
        watcher.note(f"checkpoint {path} is damaged ({wrong}): going on from the one before")

    entry = checkpoint.newest_whole(place, report)
    return None if entry is None else entry.path


def _run(recipe: Recipe, session: Session, progress: Progress, start: Path | None) -> None:
    """Every stage from `progress` on, each from the model before it."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    policy = load_policy(recipe.model, recipe.seed)
    if start is not None:
        restore_policy(start, policy)
    update_run_json(session.folder, _facts(recipe))
    for number in range(progress.stage, len(recipe.stages)):
        stage = recipe.stages[number]
        if number > progress.stage:
            start = None
            progress = Progress(stage=number, tokens=progress.tokens)
        trackers = open_trackers(
            stage.trackers,
            session.folder,
            name=session.folder.path.name,
            recipe=recipe.model_dump(mode="json"),
        )
        work = Work(recipe, replace(session, trackers=trackers), policy, start)
        session.watcher.stage(stage.name, stage.stage, stage.steps, progress.step)
        try:
            if isinstance(stage, SFTStage):
                progress = imitate(work, stage, progress)
            else:
                progress = reinforce(work, stage, progress)
        finally:
            for tracker in trackers:
                tracker.close()
        seconds = sum(row["total"] for row in load(session.folder.path).timings())
        update_run_json(session.folder, {"tokens": progress.tokens, "seconds": round(seconds, 3)})
        last = number + 1 == len(recipe.stages) and progress.step == stage.steps
        if not last:
            _stop_if_asked(session.interrupt, session)
    update_run_json(session.folder, {"finished": True})
    session.recorder.event("finished")


def _stop_if_asked(interrupt: Interrupt, session: Session) -> None:
    if interrupt.signum is not None:
        session.recorder.event("interrupted", signal=interrupt.signum)
        raise Interrupted(interrupt.signum, session.folder.path)


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What a reader of the run wants to know of where it came from."""
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in REPORTED},
        "threads": torch.get_num_threads(),
        "finished": False,
    }
