"""Plots that a run leaves in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from keel.analysis.overoptimisation import optimisation_of
from keel.analysis.plots import reward_curve
from keel.analysis.reward_plots import over_optimisation_picture
from keel.config.schema import Recipe, RLStage
from keel.config.sources import LEARNED
from keel.models.loading import describe_model
from keel.runs.files import make_folder
from keel.runs.reader import load
from keel.runs.writer import RunWriter
from keel.training.evaluate import metrics as evaluation_metrics
from keel.training.state import Progress


def titles(recipe: Recipe, stage: RLStage, model: PreTrainedModel) -> tuple[str, str]:
    """A plot's title (recipe and tasks) and subtitle (algorithm, model with its size, seed)."""
    tasks = ", ".join(Path(task.path).name if task.path else task.name for task in stage.tasks)
    algorithm = stage.algorithm.preset or "an algorithm of its own"
    return (
        f"{recipe.name}: {tasks}",
        f"{algorithm}, {describe_model(recipe.model, model)}, seed {recipe.seed}",
    )


def plot_rewards(
    writer: RunWriter, stage: RLStage, progress: Progress, title: str, subtitle: str
) -> None:
    """The reward over the steps, and validation accuracy, also that before the first step."""
    rows = load(writer.folder.path).metrics(stage.name)
    if rows:
        before = progress.before
        first = {} if before is None else evaluation_metrics(dict(before))
        reward_curve(writer.folder.curve, [{"step": 0, **first}, *rows], title, subtitle)


def plot_over_optimisation(
    writer: RunWriter, stage: RLStage, names: Sequence[str], title: str
) -> None:
    """Learned rewards, and one of weight 0, against KL, where a stage has both and KL grew."""
    sources = list(zip(names, stage.rewards.functions, strict=False))
    proxies = {n: s.weight for n, s in sources if s.function in LEARNED and s.weight}
    watching = [n for n, s in sources if not s.weight]
    if not proxies or not watching:
        return
    divergence = stage.algorithm.divergence
    held = "" if divergence is None else f", β = {divergence.beta:g}"
    label = f"{stage.algorithm.preset}{held}"
    rows = load(writer.folder.path).metrics(stage.name)
    found = optimisation_of(rows, proxies, watching[0], label)
    if found is not None and found.moved:
        target = writer.folder.pictures / f"{stage.name}-over-optimisation.png"
        make_folder(target.parent)
        subtitle = f"learned from: {', '.join(proxies)}; watching: {watching[0]}"
        over_optimisation_picture([found], target, title, subtitle)
