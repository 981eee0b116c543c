"""A run folder from its making, or from its newest checkpoint, to the end of its run."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keel.runs import checkpoint
from keel.runs.interrupt import catching
from keel.runs.layout import RunFolder, next_free
from keel.runs.lock import locked
from keel.runs.record import Recorder, truncate_after
from keel.runs.session import Session
from keel.runs.watch import Watcher
from keel.types import KeelError

RUNS = "runs"
"""Where run folders go unless one is named."""


def created(recipe: str, name: str, path: Path | str | None) -> RunFolder:
    """A new run folder for a recipe (TOML): the next free one under runs/ unless named."""
    return RunFolder.create(Path(path) if path is not None else next_free(RUNS, name), recipe)


def resumed(path: Path | str | None) -> RunFolder:
    """The run folder that a run goes on in."""
    if path is None:
        raise KeelError("--resume goes on with a run: name its folder with --run DIR")
    return RunFolder.open(path)


@contextmanager
def running(
    place: RunFolder, resume: bool, watcher: Watcher
) -> Iterator[tuple[Session, Path | None]]:
    """The one hand that writes the folder while the block lasts, and the checkpoint to go on from.

    What was written past that checkpoint is dropped. Signals ask the run to stop. A new run that
    fails before its first row leaves the folder as free as it was.
    """
    with ExitStack() as stack:
        interrupt = stack.enter_context(catching())
        stack.enter_context(locked(place))
        start = checkpoint.newest_whole(place, _reporting(watcher)) if resume else None
        if resume:
            stage, step = (0, -1) if start is None else (start.place.stage, start.place.step)
            truncate_after(place, stage, step)
        else:
            stack.enter_context(_leaving_nothing_unbegun(place))
        recorder = stack.enter_context(Recorder(place))
        yield Session(place, recorder, watcher, interrupt), None if start is None else start.path


def _reporting(watcher: Watcher) -> Callable[[Path, str], None]:
    def report(path: Path, wrong: str) -> None:
        watcher.note(f"checkpoint {path} is damaged ({wrong}): going on from the one before")

    return report


@contextmanager
def _leaving_nothing_unbegun(place: RunFolder) -> Iterator[None]:
    try:
        yield
    except KeelError:
        if place.metrics.exists() and place.metrics.stat().st_size == 0:
            shutil.rmtree(place.path, ignore_errors=True)
        raise


def facts(name: str, seed: int, threads: int, packages: Sequence[str]) -> dict[str, Any]:
    """What a reader of run.json wants to know of where a run came from."""
    return {
        "name": name,
        "seed": seed,
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in packages},
        "threads": threads,
        "finished": False,
    }
