"""What a run folder holds, and where. Torch-free.

    recipe.toml  run.json  metrics.jsonl  timings.jsonl  events.jsonl  curve.png  film.gif
    rollouts/[STAGE-]step-000012.parquet  evaluations/[STAGE-]step-000012.parquet
    checkpoints/[STAGE-]step-000100/  trackers/
    inputs/  preferences.db  rows/STAGE-train.jsonl  models/STAGE/  pictures/STAGE-*.png  rewards/
    quarantine/  faults/  logs/  tags.json

Steps count from 1 within a stage. If a recipe has several stages, rollouts and checkpoints carry
the stage's name; records of the .jsonl files always do. All but timings.jsonl, events.jsonl,
trackers/, faults/ and logs/, which log what happened, and tags.json, which you write with `keel
runs tag`, is a function of recipe and seed (on a GPU as far as its kernels are: atomics add in no
fixed order).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from keel.platform import files
from keel.types import KeelError, Split

STEP_DIGITS = 6
RECIPE = "recipe.toml"
_TRIES = 100
"""Attempts to make the next folder, if other processes make theirs at the same time."""
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STEP_NAME = re.compile(r"(?:(?P<stage>.+)-)?step-(?P<step>\d{6,})")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A point of a run: after step `step` of stage number `stage` (from 0). Ordered as run."""

    stage: int
    step: int


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A rollout file or a checkpoint folder, and the point of the run that it belongs to."""

    place: Place
    path: Path


class _Inside:
    """A path in the run folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. `stages` are the names of the recipe's stages, in order.

    `made`: the folder itself was made for this run, not only what is in it.
    """

    path: Path
    stages: tuple[str, ...]
    made: bool = field(default=False, compare=False)

    recipe = _Inside(RECIPE)
    run_json = _Inside("run.json")
    metrics = _Inside("metrics.jsonl")
    timings = _Inside("timings.jsonl")
    events = _Inside("events.jsonl")
    lock = _Inside(files.LOCK)
    curve = _Inside("curve.png")  # the reward over the steps
    film = _Inside("film.gif")  # one episode, of a run on environments
    rollouts_folder = _Inside("rollouts")
    evaluations_folder = _Inside("evaluations")
    checkpoints_folder = _Inside("checkpoints")
    trackers = _Inside("trackers")  # of third parties: with times and host names
    pictures = _Inside("pictures")  # what stages plot in addition to the curve
    rewards = _Inside("rewards")  # what rewards keep, such as a judge's paid answers
    quarantine = _Inside("quarantine")  # examples that could not be read
    logs = _Inside("logs")  # of servers that the run started
    faults = _Inside("faults")  # batches with values that are not finite, stacks of hangs
    inputs = _Inside("inputs")  # the model and data that were passed to keel.train as objects
    tags = _Inside("tags.json")  # a list of words, of the user's
    models_folder = _Inside("models")
    rows_folder = _Inside("rows")
    preferences = _Inside("preferences.db")  # the labels of pairs, with what they cost

    @staticmethod
    def create(
        path: Path | str, recipe: str, inputs: Callable[[Path], None] | None = None
    ) -> RunFolder:
        """A new run folder that holds the recipe (TOML, every default written out).

        `inputs` writes what was passed as Python objects into the folder that it is given. If
        other processes may use the folder, call it under its lock, as `lifecycle.create_run` does.
        Raises KeelError if the folder is not empty or the recipe is not valid.
        """
        path = Path(path)
        stages = stages_of(recipe)
        made = make_free(path)
        folder = RunFolder(path, stages, made)
        with files.os_errors(path, "make"):
            folder.rollouts_folder.mkdir(exist_ok=True)
            folder.evaluations_folder.mkdir(exist_ok=True)
            folder.checkpoints_folder.mkdir(exist_ok=True)
        if inputs is not None:
            aside = files.aside(folder.inputs)
            files.remove(aside)
            inputs(aside)
            aside.rename(folder.inputs)
        # Last: a folder with a recipe is a run.
        files.write_text(folder.recipe, recipe)
        return folder

    @staticmethod
    def open(path: Path | str) -> RunFolder:
        """The run in a folder. Raises KeelError if it has no valid recipe."""
        path = Path(path)
        if not path.is_dir():
            raise KeelError(f"run folder {path} does not exist: give a folder that keel train made")
        recipe = path / RECIPE
        try:
            text = recipe.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise KeelError(
                f"{path} is not a run folder (it has no {RECIPE}): give one that keel train made"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise KeelError(f"cannot read {recipe}: {error}") from error
        return RunFolder(path, stages_of(text, str(recipe)))

    def model(self, stage: str) -> Path:
        """The reward model that a stage made, as a plain model folder."""
        return self.models_folder / stage

    def rows(self, stage: str, split: Split) -> Path:
        """The rows that a stage sampled to learn from."""
        return self.rows_folder / f"{stage}-{split}.jsonl"

    def pool(self, stage: str) -> Path:
        """The pairs that a stage sampled, before people label some of them."""
        return self.rows_folder / f"{stage}-pool.jsonl"

    def chosen(self, stage: str) -> Path:
        """Which pairs of the pool people label."""
        return self.rows_folder / f"{stage}-chosen.jsonl"

    def labels(self, stage: str) -> Path:
        """The labels of people that were in the store when a stage began to learn."""
        return self.rows_folder / f"{stage}-labels.jsonl"

    def rollouts(self, stage: int, step: int) -> Path:
        """The rollouts of a step (counted within its stage, from 1)."""
        return self.rollouts_folder / (self._name(stage, step) + ".parquet")

    def evaluation(self, stage: int, step: int) -> Path:
        """The completions of the evaluation after a step (0: before the first)."""
        return self.evaluations_folder / (self._name(stage, step) + ".parquet")

    def checkpoint(self, stage: int, step: int) -> Path:
        """The checkpoint taken after a step (counted within its stage)."""
        return self.checkpoints_folder / self._name(stage, step)

    def list_rollouts(self) -> list[FolderEntry]:
        """The rollout files there are, in the order of the run."""
        return self._entries(self.rollouts_folder, ".parquet")

    def list_evaluations(self) -> list[FolderEntry]:
        """The files of evaluations there are, in the order of the run."""
        return self._entries(self.evaluations_folder, ".parquet")

    def list_checkpoints(self) -> list[FolderEntry]:
        """The checkpoints there are, damaged ones too, in the order of the run."""
        return self._entries(self.checkpoints_folder, "")

    def _name(self, stage: int, step: int) -> str:
        prefix = f"{self.stages[stage]}-" if len(self.stages) > 1 else ""
        return f"{prefix}step-{step:0{STEP_DIGITS}d}"

    def _entries(self, folder: Path, suffix: str) -> list[FolderEntry]:
        if not folder.is_dir():
            return []
        names = self.stages if len(self.stages) > 1 else (None,)
        found = []
        for path in folder.iterdir():
            match = _STEP_NAME.fullmatch(path.name.removesuffix(suffix))
            if match and path.name.endswith(suffix) and match["stage"] in names:
                place = Place(names.index(match["stage"]), int(match["step"]))
                found.append(FolderEntry(place, path))
        return sorted(found, key=lambda entry: entry.place)


def stages_of(recipe: str, where: str = "the recipe") -> tuple[str, ...]:
    """The names of the stages of a recipe (TOML). Raises KeelError if it is not valid."""
    try:
        stages = tomllib.loads(recipe).get("stages")
    except tomllib.TOMLDecodeError as error:
        raise KeelError(f"{where} is not valid TOML: {error}") from error
    if not isinstance(stages, list) or not stages:
        raise KeelError(f"{where} has no [[stages]]: a resolved recipe lists them")
    names = []
    for stage in stages:
        name = stage.get("name", stage.get("stage")) if isinstance(stage, dict) else None
        # The name becomes part of a path, which must stay inside the run folder.
        if not isinstance(name, str) or not _STAGE_NAME.fullmatch(name):
            raise KeelError(
                f"{where} names a stage {name!r}: use letters, digits, dots, dashes and underscores"
            )
        names.append(name)
    return tuple(names)


def make_free(path: Path) -> bool:
    """Makes the folder for a new run; False if it exists and is empty, else KeelError."""
    if path.exists() and not path.is_dir():
        raise KeelError(f"run folder {path} is a file: choose another with --run DIR")
    with files.os_errors(path, "make"):
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        taken = [p for p in path.iterdir() if not _of_a_start(p)]
    if taken:
        raise KeelError(
            f"run folder {path} exists and is not empty: "
            "resume it with --resume, or choose another with --run DIR"
        )
    return made


def make_next(root: Path | str, recipe_name: str) -> Path:
    """Makes the folder `ROOT/RECIPE-K`, with K one above the highest there is.

    Another process that does so at the same time gets another.
    """
    root = Path(root)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe_name).strip("-.") or "run"
    for _ in range(_TRIES):
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        matches = (re.fullmatch(re.escape(name) + r"-(\d+)", other) for other in names)
        path = root / f"{name}-{max((int(m[1]) for m in matches if m), default=0) + 1}"
        with files.os_errors(path, "make"), suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise KeelError(f"cannot make {path}: File exists: fix the disk or folder")


def _of_a_start(path: Path) -> bool:
    """Whether a process that died before its recipe was written may have left this."""
    if path.name in ("rollouts", "evaluations", "checkpoints"):
        return path.is_dir() and not any(path.iterdir())
    return path.name in (files.LOCK, files.ASIDE + RECIPE, files.ASIDE + "inputs")
