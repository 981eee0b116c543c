"""Plots that a run leaves in its folder."""

from __future__ import annotations

from collections.abc import Sequence

from keel.analysis.overoptimisation import optimisation_of
from keel.analysis.plots import reward_curve
from keel.analysis.reward_plots import over_optimisation_picture
from keel.config.schema import RLStage
from keel.config.sources import LEARNED
from keel.runs.files import make_folder
from keel.runs.reader import load
from keel.runs.writer import RunWriter
from keel.training.evaluate import metrics as evaluation_metrics
from keel.training.state import Progress


def plot_rewards(writer: RunWriter, stage: RLStage, progress: Progress, title: str) -> None:
    """The reward over the steps, and validation accuracy, also that before the first step."""
    rows = load(writer.folder.path).metrics(stage.name)
    if rows:
        before = progress.before
        first = {} if before is None else evaluation_metrics(dict(before))
        subtitle = stage.algorithm.preset
        reward_curve(
            writer.folder.curve, [{"step": 0, **first}, *rows], title=title, subtitle=subtitle
        )


def plot_over_optimisation(
    writer: RunWriter, stage: RLStage, names: Sequence[str], title: str
) -> None:
    """Learned rewards, and one of weight 0, against KL, where a stage has both."""
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
    if found is not None:
        target = writer.folder.pictures / f"{stage.name}-over-optimisation.png"
        make_folder(target.parent)
        subtitle = f"learned from: {', '.join(proxies)}; watching: {watching[0]}"
        over_optimisation_picture([found], target, title, subtitle)
