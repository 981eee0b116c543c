"""Held-out prompts of a recipe that one of its stages trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from keel.config.schema import Recipe, Stage
from keel.config.sources import TaskSource
from keel.data.preferences import dataset as preferences
from keel.data.preferences.dataset import READERS
from keel.data.tasks import build_task, stored
from keel.data.tasks.base import places
from keel.data.tasks.stored import KINDS
from keel.types import KeelError, Side


@dataclass(frozen=True)
class _File:
    """Where the prompts of one file's side lie; a prompt has a place in each of its forms."""

    name: str
    prompts: frozenset[frozenset[float]]

    @property
    def places(self) -> frozenset[float]:
        return frozenset(place for prompt in self.prompts for place in prompt)


def leaks(recipe: Recipe) -> Iterator[str]:
    """A line for each stage and file whose held-out prompts the stage, or one before it, trains on.

    Of files and `datasets` names; rows that a Python function returns are not read for this. What
    cannot be read is passed over: its own stage stops at it.
    """
    if _alike(recipe):
        return
    sides = [(stage, list(_files(recipe, stage))) for stage in recipe.stages]
    for at, (stage, files) in enumerate(sides):
        evaluation = None if stage.sampling is None else stage.sampling.evaluation
        if evaluation is None or not evaluation.prompts:
            continue
        for held in (file for side, file in files if side == "heldout"):
            for before, others in sides[: at + 1]:
                for learned in (file for side, file in others if side == "train"):
                    places = learned.places
                    shared = sum(not prompt.isdisjoint(places) for prompt in held.prompts)
                    if shared:
                        yield (
                            f"WARNING: {shared} of the {len(held.prompts)} held-out prompts of "
                            f"stage {stage.name!r} ({held.name}) are train prompts of stage "
                            f"{before.name!r} ({learned.name}): its held-out figures are too high. "
                            "Give both the same validation_path, or leave these rows out"
                        )


def _alike(recipe: Recipe) -> bool:
    """Whether all prompts come of one file split in one way, so that the sides are disjoint."""
    judged = any(stage.preference_data is not None for stage in recipe.stages)
    split = {
        (source.name, source.path, source.validation_path, source.validation_fraction,
         source.prompt, tuple(sorted((k, repr(v)) for k, v in source.options.items())))
        for stage in recipe.stages for source in _sources(stage)
    }  # fmt: skip
    return not judged and len(split) < 2


def _sources(stage: Stage) -> tuple[TaskSource, ...]:
    """The stage's tasks of stored rows."""
    return tuple(source for source in stage.trained_tasks if source.name in KINDS)


def _files(recipe: Recipe, stage: Stage) -> Iterator[tuple[Side, _File]]:
    """The sides of the stage's files."""
    for source in _sources(stage):
        with suppress(KeelError):
            data = stored(build_task(source, recipe.seed))
            assert data is not None
            for side, rows in data.sides.items():
                prompts = frozenset(frozenset(places(entry.body)) for entry in rows.entries)
                yield side, _File(rows.where.source, prompts)
    pairs, records = stage.preference_data, stage.records
    if pairs is not None and records is not None and pairs.name in preferences.KINDS:
        with suppress(KeelError):
            examples = READERS[records](pairs, recipe.seed).train
            prompts = frozenset(frozenset(places(one.prompt)) for one in examples)
            yield "train", _File(str(pairs.path), prompts)
