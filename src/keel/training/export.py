"""From a run to a plain model folder."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from keel.config.load import load_recipe
from keel.config.schema import Recipe
from keel.runs import checkpoint, files
from keel.runs.checkpoint import MANIFEST
from keel.runs.layout import Entry, RunFolder
from keel.runs.lock import is_taken
from keel.training.reward_evaluation import model_of
from keel.training.state import POLICY, read_progress
from keel.types import KeelError


def pick_checkpoint(folder: RunFolder, which: str = "last") -> Path:
    """The checkpoint folder that `which` names: last, best, or its own name."""
    entries = folder.list_checkpoints()
    newest = checkpoint.newest_whole(folder, _warn)
    if newest is None:
        raise KeelError(f"run {folder.path} has no whole checkpoint yet: let it run, or --resume")
    if which == "last":
        return newest.path
    if which == "best":
        return _best(folder, newest)
    named = [entry.path for entry in entries if entry.path.name == which]
    if not named:
        names = ", ".join(entry.path.name for entry in entries)
        raise KeelError(f"run {folder.path} has no checkpoint {which!r}: there are {names}")
    wrong = checkpoint.damage(named[0])
    if wrong is not None:
        raise KeelError(f"checkpoint {named[0]} is damaged ({wrong}): choose another")
    return named[0]


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that was exported; `checkpoint` is the one it is from, None of a reward model.

    `running` says that the run had not ended: it may leave newer checkpoints.
    """

    folder: Path
    checkpoint: str | None
    running: bool


def export(
    run: Path | str, folder: Path | str, *, checkpoint: str = "last", stage: str | None = None
) -> Path:
    """Copy a checkpoint's policy, LoRA merged, to a new folder that plain transformers loads.

    With `stage`, the reward model that this stage made.
    """
    return exported(run, folder, checkpoint=checkpoint, stage=stage).folder


def exported(
    run: Path | str, folder: Path | str, *, checkpoint: str = "last", stage: str | None = None
) -> Exported:
    """`export`, and what it took."""
    target = Path(folder)
    files.check_name(target.absolute())
    if target.exists():
        raise KeelError(f"{target} exists: export into a new folder")
    if stage is not None and checkpoint != "last":
        raise KeelError("--stage exports the model at the stage's end: drop --checkpoint")
    running = is_taken(Path(run))
    if stage is not None:
        _copy(Path(model_of(run, stage)), target)
        return Exported(target, None, running)
    while True:
        source = pick_checkpoint(RunFolder.open(run), checkpoint)
        try:
            _copy(source / POLICY, target)
        except KeelError:
            if source.exists() or not running:
                raise
            continue  # the run has deleted it meanwhile, and has a newer one
        return Exported(target, source.name, running)


def _copy(source: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.tmp")
    try:
        shutil.copytree(source, aside, ignore=shutil.ignore_patterns("adapter", MANIFEST))
        aside.rename(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise KeelError(f"cannot write {target}: {error.strerror or error}") from error


def class_of(folder: Path) -> str:
    """The class of transformers that loads an exported model."""
    made = json.loads((folder / "config.json").read_text("utf-8")).get("architectures") or [""]
    for name in ("SequenceClassification", "TokenClassification"):
        if made[0].endswith(name):
            return f"AutoModelFor{name}"
    return "AutoModelForCausalLM"


def recipe_of(folder: RunFolder) -> Recipe:
    """The resolved recipe that a run folder holds."""
    return load_recipe(folder.recipe)


def _warn(path: Path, wrong: str) -> None:
    print(f"keel: checkpoint {path} is damaged ({wrong}): using one before", file=sys.stderr)


def _best(folder: RunFolder, newest: Entry) -> Path:
    best = read_progress(newest.path).best_step
    if best is None:
        raise KeelError(f"run {folder.path} was never evaluated in its last stage: use last")
    return pick_checkpoint(folder, folder.checkpoint(newest.place.stage, best).name)
