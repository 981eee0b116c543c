"""Versions of one reward model: the rows that it learned from before, and what it forgets.

A stage with `base.stage` trains the model of another one further. Source of the replay:
DeepSeekMath (arXiv:2402.03300) §4.1.4 and Algorithm 1, with 10 % of the earlier data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from keel.analysis.reward_plots import forgetting_picture
from keel.analysis.statistics import Interval
from keel.config.fields import derive
from keel.config.judging import JudgingStage
from keel.config.schema import Recipe
from keel.config.sources import PreferenceData
from keel.data.preferences.dataset import READERS, Splits
from keel.platform.files import make_folder
from keel.runs.layout import RunFolder
from keel.runs.reader import read_run_json
from keel.runs.writer import update_run_json
from keel.training.judging.data import cluster_of, some_rows

Accuracies = Callable[[str, Sequence[Sequence[Any]]], Sequence[Interval]]
"""The accuracies of a version (the name of its stage) on several sets of validation rows."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """`accuracy[v][h]` of version v on the validation rows of the stage that made version h."""

    versions: tuple[str, ...]
    accuracy: tuple[tuple[Interval, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        rows = [[one.as_dict() for one in row] for row in self.accuracy]
        return {"versions": list(self.versions), "accuracy": rows}


def versions(recipe: Recipe, stage: JudgingStage) -> tuple[JudgingStage, ...]:
    """The stages whose model this one trains further, the first one first, and itself."""
    stages = {one.name: one for one in recipe.stages}
    found = [stage]
    while (base := found[0].base_model) is not None and base.stage is not None:
        found.insert(0, cast(JudgingStage, stages[base.stage]))
    return tuple(found)


def is_newest(recipe: Recipe, stage: JudgingStage) -> bool:
    """Whether no stage trains its model further."""
    bases = [one.base_model for one in recipe.stages]
    return all(base is None or base.stage != stage.name for base in bases)


def rows_of(folder: RunFolder, stage: JudgingStage) -> PreferenceData:
    """The rows of a stage: its data, or what it sampled into the run folder."""
    if stage.data is not None:
        return stage.data
    train, held = (folder.rows(stage.name, split) for split in ("train", "validation"))
    return PreferenceData(name="jsonl", path=str(train), validation_path=str(held), empty="keep")


def with_replay(
    folder: RunFolder, recipe: Recipe, stage: JudgingStage, splits: Splits[Any]
) -> Splits[Any]:
    """The rows of a stage, and the share `base.replay` of the train rows of earlier versions.

    Rows whose prompt or group is in the stage's validation split are not replayed.
    """
    base = stage.base_model
    if base is None or not base.replay:
        return splits
    held = {cluster_of(row) for row in splits.validation}
    rows = [
        row
        for before in versions(recipe, stage)[:-1]
        for row in _read(folder, recipe, before).train
        if cluster_of(row) not in held
    ]
    rng = np.random.default_rng(derive(recipe.seed, stage.name, "replay"))
    chosen = np.sort(rng.permutation(len(rows))[: round(base.replay * len(rows))])
    return Splits((*splits.train, *(rows[at] for at in chosen)), splits.validation, splits.left_out)


def measure_forgetting(
    folder: RunFolder, recipe: Recipe, stage: JudgingStage, accuracies: Accuracies
) -> Forgetting:
    """Every version on every version's validation rows, at most `evaluation.rows` of each; kept in
    run.json under the name of the stage, and plotted."""
    chain = versions(recipe, stage)
    held = [
        some_rows(_read(folder, recipe, one).validation, stage.evaluation.rows) for one in chain
    ]
    found = Forgetting(
        tuple(one.name for one in chain),
        tuple(tuple(accuracies(one.name, held)) for one in chain),
    )
    kept = read_run_json(folder).get("forgetting", {})
    update_run_json(folder, {"forgetting": {**kept, stage.name: found.as_dict()}})
    target: Path = folder.pictures / f"{stage.name}-forgetting.png"
    make_folder(target.parent)
    title = f"{recipe.name}: accuracy of each version of the reward model"
    forgetting_picture(found.versions, found.accuracy, target, title)
    return found


def _read(folder: RunFolder, recipe: Recipe, stage: JudgingStage) -> Splits[Any]:
    return READERS[stage.records](rows_of(folder, stage), recipe.seed)
