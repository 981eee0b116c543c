"""Prompts of one split that are also in another: what is evaluated, and was trained on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from keel.config.benchmarks import benchmarks
from keel.config.schema import Recipe, Stage
from keel.config.sources import SFTData, TaskSource
from keel.data.mixture import build_task, stored
from keel.data.preferences import READERS
from keel.data.sft import read_sft
from keel.data.splits import KINDS, places
from keel.data.tables import SourceRow
from keel.data.tasks import split_and_index
from keel.types import Content, KeelError, Prompt, Split, Task

Marks = frozenset[float | tuple[str, int]]
"""What a prompt is known by: where it lies in each of its forms, and its row in its file."""


@dataclass(frozen=True)
class _File:
    """The prompts of one file's split."""

    name: str
    prompts: frozenset[Marks]
    table: str
    """The key of what names the file."""

    @property
    def marks(self) -> Marks:
        return frozenset(mark for prompt in self.prompts for mark in prompt)


@dataclass(frozen=True, slots=True)
class Leak:
    """Validation prompts of a stage (`shared` of `held`, of the file `source`) that the stage
    `trained` learns from, from the file `learned`, which its key `table` names."""

    stage: str
    trained: str
    shared: int
    held: int
    source: str
    learned: str
    table: str

    def __str__(self) -> str:
        return (
            f"WARNING: {self.shared} of the {self.held} validation prompts of stage {self.stage!r} "
            f"({self.source}) are train prompts of stage {self.trained!r} ({self.learned}): its "
            "figures are too high. Give both the same validation_path, or leave these rows out"
        )


def leaks(recipe: Recipe) -> Iterator[Leak]:
    """Each stage and file whose validation prompts an earlier stage or it trains on.

    Of files and `datasets` names; rows that a Python function returns are not read for this. What
    cannot be read is passed over: its own stage stops at it.
    """
    if _alike(recipe) or not any(map(_evaluates, recipe.stages)):
        return
    splits = [(stage, [*_files(recipe, stage), *_held(recipe, stage)]) for stage in recipe.stages]
    for at, (stage, files) in enumerate(splits):
        if not _evaluates(stage):
            continue
        for held in (file for split, file in files if split == "validation"):
            for before, others in splits[: at + 1]:
                for learned in (file for split, file in others if split == "train"):
                    marks = learned.marks
                    shared = sum(not prompt.isdisjoint(marks) for prompt in held.prompts)
                    if shared:
                        count, files_ = len(held.prompts), (held.name, learned.name)
                        yield Leak(stage.name, before.name, shared, count, *files_, learned.table)


def _evaluates(stage: Stage) -> bool:
    """Whether a stage is evaluated on prompts of its tasks or sets, or on examples of its data."""
    evaluation = None if stage.sampling is None else stage.sampling.evaluation
    examples = stage.imitated is not None and stage.imitated.validation_rows > 0
    return examples or (evaluation is not None and evaluation.prompts > 0)


def _alike(recipe: Recipe) -> bool:
    """Whether all prompts are of one file, split in one way, so that the splits are disjoint."""
    split = {
        repr(source.model_dump(exclude={"weight"}))
        for stage in recipe.stages
        for source in (
            *_sources(stage).values(),
            *stored_sets(stage).values(),
            stage.preference_data,
        )
        if source is not None
    }
    return len(split) < 2 and not any(map(_sets, recipe.stages))


def _sources(stage: Stage) -> dict[str, TaskSource]:
    """The stage's tasks of stored rows, by their keys."""
    prefix = "" if stage.sampling is None else stage.sampling.key
    return {
        f"{prefix}tasks.{at}": source
        for at, source in enumerate(stage.trained_tasks)
        if source.name in KINDS or source.name in benchmarks()
    }


def _sets(stage: Stage) -> list[TaskSource]:
    """The tasks of stored rows that the stage is also evaluated on."""
    evaluation = None if stage.sampling is None else stage.sampling.evaluation
    sets = () if evaluation is None else evaluation.sets
    return [one.task for one in sets if one.task.name in KINDS or one.task.name in benchmarks()]


def stored_sets(stage: Stage) -> dict[str, SFTData]:
    """The sets of examples in files that the stage imitates, by their keys."""
    found = stage.imitated
    data = () if found is None else found.data
    sets = {f"{found.key if found else ''}data.{at}": one for at, one in enumerate(data)}
    return {key: one for key, one in sets.items() if one.name in KINDS and not one.streams}


def _files(recipe: Recipe, stage: Stage) -> Iterator[tuple[Split, _File]]:
    """The splits of the stage's files."""
    for key, source in _sources(stage).items():
        with suppress(KeelError):
            yield from _of_task(recipe, source, key)
    for key, one in stored_sets(stage).items():
        with suppress(KeelError):
            found = read_sft(one, recipe.seed)
            learned, held = (
                frozenset(_marks(row.opening, row.origin) for row in examples)
                for examples in (found.train, found.validation)
            )
            yield "train", _File(str(one.path), learned, key)
            yield "validation", _File(str(one.validation_path or one.path), held, key)
    pairs, records = stage.preference_data, stage.records
    if pairs is not None and records is not None and pairs.name in KINDS:
        with suppress(KeelError):
            examples = READERS[records](pairs, recipe.seed).train
            prompts = frozenset(_marks(one.prompt) for one in examples)
            yield "train", _File(str(pairs.path), prompts, "data")


def _held(recipe: Recipe, stage: Stage) -> Iterator[tuple[Split, _File]]:
    """What the stage is also evaluated on."""
    for source in _sets(stage):
        with suppress(KeelError):
            files = _of_task(recipe, source, "", whole=True)
            yield from (found for found in files if found[0] == "validation")


def _of_task(
    recipe: Recipe, source: TaskSource, key: str, *, whole: bool = False
) -> Iterator[tuple[Split, _File]]:
    """The splits of a task's file."""
    if source.name in benchmarks():  # whose options are worked examples
        source = source.model_copy(update={"options": {}})
    data = stored(build_task(source, recipe.seed, whole=whole))
    assert data is not None
    for split, rows in data.splits.items():
        prompts = frozenset(_marks(one.body, one.row) for one in rows)
        yield split, _File(data.sources[split], prompts, key)


def _marks(content: Content, row: SourceRow | None = None) -> Marks:
    found: Marks = frozenset(places(content))
    return found if row is None else found | _row_mark(row.source, row.number)


def _row_mark(source: str, number: int) -> Marks:
    """The mark of a row of a file; none of a data set, which options make another one."""
    return frozenset({(os.path.abspath(source), number)} if _is_file(source) else ())


@lru_cache(maxsize=256)
def _is_file(source: str) -> bool:
    return os.path.isfile(source)


# ---------------------------------------------------------------- what is evaluated


def trained_on(recipe: Recipe, asked: Sequence[tuple[Task, Prompt]]) -> Iterator[str]:
    """For each stage and file of a run that trained on prompts which are evaluated, how many."""
    prompts = [_asked(task, prompt) for task, prompt in asked]
    for stage in recipe.stages:
        for split, file in _files(recipe, stage):
            marks = file.marks if split == "train" else frozenset()
            if shared := sum(not one.isdisjoint(marks) for one in prompts):
                whose = f"train prompts of stage {stage.name!r} ({file.name})"
                yield f"{shared} of the {len(prompts)} prompts are {whose}"


def _asked(task: Task, prompt: Prompt) -> Marks:
    """The marks of a prompt of the validation split."""
    data, found = stored(task), _marks(prompt.content)
    if data is None:
        return found
    return found | _row_mark(data.sources["validation"], split_and_index(prompt)[1])
