"""Creates, resumes and finishes runs: the lock, the checkpoint to start from, errors."""

from __future__ import annotations

import errno
import hashlib
import inspect
import platform
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import reduce
from importlib.metadata import version
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import tomli_w

from keel.config.entry import PASSED, PYTHON, load_entry, source_of
from keel.config.load import DATA_KEYS, MODEL_FILES, MODEL_KEYS, in_run_folder
from keel.platform import files
from keel.platform.files import locked, refuse_if_taken
from keel.platform.signals import ProcessLost, catching
from keel.runs import checkpoint
from keel.runs.callbacks import Callbacks
from keel.runs.checkpoint import SHOWN, Recorded
from keel.runs.layout import FolderEntry, RunFolder, make_free, make_next, stages_of
from keel.runs.reader import read_run_json
from keel.runs.values import changes
from keel.runs.writer import (
    Reached,
    Recorder,
    RunWriter,
    truncate_after,
    update_run_json,
)
from keel.types import KeelError
from keel.version import VERSION

RUNS = "runs"
"""Where run folders go unless one is named."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of the disk, whichever file they come from."""
Damage = list[tuple[Path, str]]
CHANGEABLE = (
    *("steps", "num_train_epochs", "optimizer.learning_rate", "value.optimizer.learning_rate"),
    *("evaluation.every", "rollouts_every", "checkpoints.every", "checkpoints.keep"),
)
"""Keys of the stage that a run is in that may change."""
_ENTRY = re.compile(r"(?P<place>[\w./~-]+):[A-Za-z_][\w.]*")
"""`module:function`, or `path/to/file.py:function`."""


def create_run(
    recipe: str,
    name: str,
    path: Path | str | None,
    inputs: Callable[[Path], None] | None = None,
) -> RunFolder:
    """A new run folder for a recipe (TOML): the next free one under runs/ unless named.

    Of two processes that start in one folder, the first to hold its lock writes its recipe and the
    other is refused. The path is absolute: what a run calls may change the working directory.
    """
    if path is not None:
        refuse_if_taken(Path(path))
    stages_of(recipe)  # before anything is made
    if path is None:
        place, made = make_next(RUNS, name).absolute(), True
    else:
        place = Path(path).absolute()
        made = make_free(place)
    with locked(place):
        return replace(RunFolder.create(place, recipe, inputs), made=made)


def resume_run(path: Path | str | None) -> RunFolder:
    """The run folder of a run to resume."""
    if path is None:
        raise KeelError("--resume goes on with a run: name its folder with --run DIR")
    return RunFolder.open(Path(path).absolute())


def change_recipe(place: RunFolder, whole: str, text: str) -> None:
    """Take over what a run can go on with from a resolved recipe (TOML): CHANGEABLE keys of the
    stage that its newest checkpoint is of, and any key of a later one, which begins afresh.
    `changes` in run.json has them, with the step. `whole` is the run's recipe with all defaults,
    some of which an older version did not have.

    Raises KeelError for another key that differs, for fewer steps than were taken, and for another
    `sampled` of a stage whose rows were sampled.
    """
    with locked(place.path):
        known, new = tomllib.loads(whole), tomllib.loads(text)
        if (names := stages_of(text)) != place.stages:
            raise KeelError(
                f"the recipe has the stages {', '.join(names)}, but the run in {place.path} has "
                f"{', '.join(place.stages)}: start a new run"
            )
        newest = place.list_checkpoints()[-1:]
        at, step = (newest[0].place.stage, newest[0].place.step) if newest else (0, 0)
        made = []
        for one in list(changes(known, new)):
            found = re.fullmatch(r"stages\[(\d+)\]\.(.+)", one.name)
            number, key = (int(found[1]), found[2]) if found else (-1, one.name)
            name = f"{place.stages[number]}.{key}" if found else key
            if number < at or (number == at and key not in CHANGEABLE):
                raise KeelError(
                    f"{name} is {one.b}, but the run in {place.path} has {one.a}: it can only go "
                    f"on with other {', '.join(CHANGEABLE)} of stage {place.stages[at]}, and any "
                    "key of later ones: leave the others as they are, or start a new run"
                )
            if key == "steps" and number == at and one.b < step:
                raise KeelError(f"{name} is {one.b}, but the run has taken {step}: raise it")
            if number == at:
                *tables, leaf = key.split(".")
                table = reduce(getitem, tables, known["stages"][number])
                table.pop(leaf, None)
                table |= {} if one.b is None else {leaf: one.b}
            elif key == "stage" or key.startswith("sampled."):
                _refuse_sampled(place, place.stages[number], name)
            point = {"stage": place.stages[at], "step": step}
            made.append({**point, "key": name, "from": one.a, "to": one.b})
        if any(one["key"].startswith(f"{place.stages[at]}.") for one in made):
            model = place.model(place.stages[at])
            if model.exists():  # it is of the end so far, and is written again
                files.remove(model)
        if made:
            known["stages"][at + 1 :] = new["stages"][at + 1 :]
            before = read_run_json(place).get("changes", [])
            update_run_json(place, {"changes": [*before, *made]})
            files.write_text(place.recipe, tomli_w.dumps(known))


def _refuse_sampled(place: RunFolder, stage: str, name: str) -> None:
    """Raise KeelError if a stage has sampled its rows, which it would learn from as they are."""
    for rows in (place.pool(stage), place.rows(stage, "train")):
        if rows.exists():
            raise KeelError(f"{name} differs, but the stage has sampled {rows}: delete that first")


@contextmanager
def run_lifecycle(
    place: RunFolder,
    resume: bool,
    callbacks: Sequence[object] = (),
    command: Literal["train", "control"] = "train",
) -> Iterator[tuple[RunWriter, Path | None]]:
    """Within the block: the writer of the folder, and the checkpoint to continue from.

    What was written after that checkpoint is deleted. Signals ask the run to stop. An error that
    stops it is reported with the step reached and how to continue; a new run that fails before
    there is anything to keep leaves the folder as it was.

    Raises:
        KeelError: another process holds the folder; there are checkpoints, but none is whole.
    """
    with ExitStack() as stack:
        interrupt = stack.enter_context(catching())
        stack.enter_context(locked(place.path))
        start, damaged = _where_to_begin(place) if resume else (None, [])
        recipe = tomllib.loads(place.recipe.read_text("utf-8"))
        inputs = fingerprints(recipe, place.path)
        reached, notes = Reached(), list[str]()
        known: Mapping[str, str] = {}
        if start is not None:
            recorded = checkpoint.read(start.path)
            lost = checkpoint.check(place, start, recorded)
            notes += _notes(start, recorded, recipe, inputs, lost)
            known = recorded.files  # a lost file keeps its hash, as in an unharmed run
            reached.step = reached.checkpoint = start.place
        stack.enter_context(_reporting(place, recipe, reached, resume, command))
        if resume:
            stage, step = (0, -1) if start is None else (start.place.stage, start.place.step)
            truncate_after(place, stage, step)
        recorder = stack.enter_context(Recorder(place, inputs=inputs, known=known))
        called = Callbacks(place.path, callbacks, interrupt.stop, recorder.event)
        writer = RunWriter(place, recorder, called, interrupt, reached=reached)
        for path, wrong in damaged:
            recorder.event("damaged", checkpoint=path.name, why=wrong)
            writer.callbacks.note(
                f"checkpoint {path} is damaged ({wrong}): going on from the one before"
            )
        for note in notes:
            writer.note(note)
        yield writer, None if start is None else start.path


def _notes(
    start: FolderEntry,
    known: Recorded,
    recipe: Mapping[str, Any],
    inputs: Mapping[str, str],
    lost: Sequence[str],
) -> Iterator[str]:
    """What has changed since the checkpoint that a run is resumed from."""
    name = start.path.name
    if changed := checkpoint.changed(known, recipe, inputs):
        yield (
            f"since checkpoint {name} was written there changed: {changed}: from here on this is "
            "another run, and not byte for byte one that never stopped"
        )
    if lost:
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        yield (
            f"{', '.join(lost[:SHOWN])}{more}: the run goes on, since nothing that follows depends "
            "on it; restore it from a copy to have it again"
        )


def write_metadata(
    writer: RunWriter,
    name: str,
    seed: int,
    threads: int,
    packages: Sequence[str],
    kernels: str | None = None,
) -> None:
    """Write the environment of a run to run.json; `kernels` names the compiled code that it uses.

    A resumed run keeps what it began with; differences are noted.
    """
    versions = {"python": platform.python_version(), "keel-rl": VERSION}
    versions |= {package: version(package) for package in packages}
    if kernels is not None:
        versions["kernels"] = kernels
    begun: dict[str, Any] = {} if writer.reached.step is None else read_run_json(writer.folder)
    before = {"threads": begun.get("threads"), **begun.get("versions", {})}
    after: dict[str, Any] = {"threads": threads, **versions}
    changed = ", ".join(
        f"{key} {value} (now {after[key]})"
        for key, value in before.items()
        if value is not None and key in after and after[key] != value
    )
    if changed:
        writer.note(
            f"this run began with {changed}: it goes on, but not byte for byte as if it had never "
            "stopped"
        )
    kept: dict[str, Any] = {key: begun[key] for key in ("versions", "threads") if key in begun}
    now = {"name": name, "seed": seed, "versions": versions, "threads": threads, "finished": False}
    update_run_json(writer.folder, {**now, **kept})


def _where_to_begin(place: RunFolder) -> tuple[FolderEntry | None, Damage]:
    """The newest whole checkpoint, and the damaged ones that were passed over.

    Raises KeelError if none is whole: starting again would discard them.
    """
    damaged: Damage = []
    newest = checkpoint.newest_whole(place, lambda path, wrong: damaged.append((path, wrong)))
    others = [] if newest or damaged else checkpoint.unknown(place)
    if others:
        raise KeelError(
            f"{place.recipe} has no stage that made checkpoint {others[0].name}: put the recipe's "
            "stages and their names back as they were"
        )
    if newest is None and damaged:
        message = "; ".join(f"{path.name}: {wrong}" for path, wrong in damaged[:2])
        more = f"; and {len(damaged) - 2} more" if len(damaged) > 2 else ""
        raise KeelError(
            f"no checkpoint in {place.checkpoints_folder} is whole ({message}{more}): bring one "
            "back, or delete them all and --resume begins at the first step"
        )
    return newest, damaged


@contextmanager
def _reporting(
    place: RunFolder, recipe: Mapping[str, Any], reached: Reached, resume: bool, command: str
) -> Iterator[None]:
    """Reports errors that a user can fix, with the step reached and how to continue."""
    try:
        yield
    except (KeelError, OSError) as error:
        message = _fixable(place, error)
        if message is None:
            raise
        if not resume and not isinstance(error, ProcessLost) and _leaves_nothing(place):
            raise KeelError(message) from error
        text = f"stopped {reached.describe(place.stages)}: {message}"
        with suppress(KeelError), Recorder(place) as recorder:
            recorder.event("stopped", text=text)
        how = f"keel {command} --resume --run {place.path}"
        if any(PASSED.fullmatch(value) for _, value in texts(recipe)):
            how = (
                f'keel.train(folder="{place.path}", resume=True, …) with the functions of this run'
            )
        raise KeelError(f"{text}; resume with: {how}") from error


def _fixable(place: RunFolder, error: KeelError | OSError) -> str | None:
    """An error that a user can fix as one line; None for an error that is not of the disk."""
    if isinstance(error, KeelError):
        return str(error)
    name = error.filename if isinstance(error.filename, str) else None
    ours = name is not None and Path(name).is_relative_to(place.path)
    if not ours and error.errno not in DISK:
        return None
    return f"cannot write {name or place.path}: {error.strerror}: fix the disk or folder"


def _leaves_nothing(place: RunFolder) -> bool:
    """Empties the folder of a new run if nothing in it is worth keeping; whether it did.

    A folder that existed before the run is kept.
    """
    if place.metrics.exists() and place.metrics.stat().st_size > 0:
        return False
    made = [place.checkpoints_folder, place.rewards, place.quarantine, place.faults]
    made.append(place.logs)
    made += [place.rows("any", "train").parent, place.model("any").parent]
    if any(path.is_dir() and any(path.iterdir()) for path in made):
        return False
    with suppress(OSError, KeelError):
        last = (place.recipe, place.lock)  # until then it is a run, and this process's
        for path in (*(one for one in place.path.iterdir() if one not in last), *last):
            files.remove(path)
        if place.made:
            place.path.rmdir()
    return not place.recipe.exists()


# ---------------------------------------------------------------- inputs


def fingerprints(recipe: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The fingerprint of each file that the recipe in a run folder names, by `KEY (VALUE)`.

    The SHA-256 of a file's content, of all files of a model's or data set's folder, or of the
    source of a function that was passed to `keel.train`. What comes from a hub is named by the
    recipe's revision and has none.
    """
    found = {}
    for key, value in texts(recipe):
        try:
            digest = _fingerprint(key, in_run_folder(value, folder))
        except (Exception, SystemExit):  # of a user's package, which is imported here
            continue  # reading it reports what is wrong
        if digest is not None:
            found[f"{key} ({value})"] = digest
    return found


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The texts of a recipe, each with its key."""
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from texts(inside, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for at, inside in enumerate(value):
            yield from texts(inside, f"{key}[{at}]")
    elif isinstance(value, str) and "\n" not in value:
        yield key, value


def _fingerprint(key: str, value: str) -> str | None:
    entry = _ENTRY.fullmatch(value)
    if entry is not None and entry["place"] == PYTHON:
        function = load_entry(value, key)
        source_text = inspect.getsource(getattr(function, "func", function))
        return hashlib.sha256(source_text.encode()).hexdigest()
    if entry is not None:
        source = source_of(entry["place"])
        return None if source is None else files.sha256(source)
    path = Path(value).expanduser()
    names = set(re.findall(r"\w+", key))
    if not names.isdisjoint(DATA_KEYS):
        if path.is_dir():
            return _of_files(path, path.rglob("*"))
        return files.sha256(path) if path.is_file() else None
    of_model = any((path / file).is_file() for file in MODEL_FILES)
    if key.rpartition(".")[2] in MODEL_KEYS and of_model:
        return _of_files(path, path.iterdir())
    return None


def _of_files(folder: Path, paths: Iterable[Path]) -> str:
    """The fingerprint of the names and contents of files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {files.sha256(path)}\n".encode())
    return digest.hexdigest()
