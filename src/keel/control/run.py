"""Runs a recipe of `keel control`, from its start or from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keel.analysis.panels import stage_columns
from keel.analysis.plots import stage_curve
from keel.config.control import ControlRecipe
from keel.config.control_load import load_control
from keel.config.fields import derive
from keel.config.load import to_toml
from keel.control import learner as state
from keel.control.evaluate import evaluate
from keel.control.learner import ControlLearner, ControlProgress
from keel.control.policy_gradient import PolicyGradient
from keel.control.q_learning import QLearning
from keel.control.record import record_video
from keel.runs import checkpoint, lifecycle
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.runs.writer import RunWriter, update_run_json
from keel.types import KeelError

REPORTED = ("gymnasium", "torch", "numpy")
LEARNERS: Mapping[str, Callable[[Any, int], ControlLearner[Any]]] = {
    "q_learning": QLearning,
    "policy_gradient": PolicyGradient,
}
"""The learner of each kind of stage, from its configuration and a seed."""


def control(
    recipe: ControlRecipe | None,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[object] = (),
) -> RunFolder:
    """Run a recipe into a run folder (the next free one under runs/ unless named).

    With `resume` the run continues from the folder's newest whole checkpoint, under the folder's
    own recipe. Raises Interrupted after Ctrl-C or SIGTERM, with a checkpoint written; KeelError for
    what a user can fix.
    """
    if recipe is None and not resume:
        raise KeelError("there is no recipe to run: name one, or resume a run")
    text, name = ("", "") if recipe is None else (to_toml(recipe), recipe.name)
    place = lifecycle.resume_run(folder) if resume else lifecycle.create_run(text, name, folder)
    recipe = load_control(place.recipe) if resume or recipe is None else recipe
    with lifecycle.run_lifecycle(place, resume, callbacks, "control") as (writer, start):
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        learner = build(recipe)
        try:
            _run(recipe, learner, writer, start, resume)
        finally:
            learner.environments.close()
    return place


def trained(folder: Path | str) -> ControlLearner[Any]:
    """The learner of a run's newest whole checkpoint; `greedy()` gives its policy.

    Raises KeelError if there is none.
    """
    place = RunFolder.open(folder)
    newest = checkpoint.newest_whole(place)
    if newest is None:
        raise KeelError(f"{place.path} holds no whole checkpoint")
    learner = build(load_control(place.recipe))
    learner.restore(*state.learned(newest.path))
    return learner


def build(recipe: ControlRecipe) -> ControlLearner[Any]:
    """The learner of a recipe, untrained."""
    stage = recipe.stage
    return LEARNERS[stage.stage](stage, derive(recipe.seed, stage.name))


def _run(
    recipe: ControlRecipe,
    learner: ControlLearner[Any],
    writer: RunWriter,
    start: Path | None,
    resume: bool,
) -> None:
    """The whole run: iterations, evaluations, checkpoints, and what it leaves."""
    progress = ControlProgress() if start is None else state.read(start)
    if start is not None and not state.restore(start, progress, learner):
        writer.note(
            "the environment is not a function of its seed and actions: the run continues from "
            "another state, so it will not end bit for bit as without the interruption"
        )
    stage = recipe.stage
    writer.recorder.event("resumed" if resume else "started", step=progress.step)
    lifecycle.write_metadata(writer, recipe.name, recipe.seed, torch.get_num_threads(), REPORTED)
    writer.callbacks.stage(stage.name, stage.environment.id, stage.steps, progress.steps)
    while progress.steps < stage.steps and not writer.interrupted:
        clock = time.perf_counter()
        number, before = progress.step + 1, progress.steps
        metrics = learner.iterate(number)
        metrics["environment_steps"] = float(learner.steps)
        progress = replace(progress, step=number, steps=learner.steps)
        progress = _evaluate(learner, writer, progress, before, metrics)
        writer.recorded(progress, metrics, [], time.perf_counter() - clock)
        last = number if progress.steps >= stage.steps else -1
        if writer.checkpoint_due(progress, last, stage.checkpoints):
            _save(learner, writer, progress)
    if writer.interrupted and progress.step == 0:
        _save(learner, writer, progress)
    folder = writer.folder
    columns = stage_columns(load(folder.path), stage.name)
    stage_curve(folder.curve, stage.stage, columns, recipe.name, stage.environment.id)
    if progress.steps < stage.steps and writer.stopped():
        return
    update_run_json(folder, {"environment_steps": progress.steps, "finished": True})
    writer.recorder.event("finished")
    if stage.watching.film:
        _record_video(learner, writer)


def _evaluate(
    learner: ControlLearner[Any],
    writer: RunWriter,
    progress: ControlProgress,
    before: int,
    metrics: dict[str, float],
) -> ControlProgress:
    """Evaluate if it is due, and report it; the progress with the best evaluation."""
    stage = learner.stage
    choice, last = stage.evaluation, progress.steps >= stage.steps
    due = choice.every > 0 and progress.steps // choice.every > before // choice.every
    if not choice.episodes or not (due or last):
        return progress
    with writer.clock("evaluation"):
        result = evaluate(learner.greedy(), stage.environment, choice, learner.seed)
    metrics["eval/return"] = result["mean"]
    metrics["eval/return/low"], metrics["eval/return/high"] = result["low"], result["high"]
    metrics["eval/length"] = result["mean_length"]
    writer.evaluated(progress, result, when="after" if last else "during")
    if progress.best is None or result["mean"] >= progress.best:
        return replace(progress, best=result["mean"], best_step=progress.step)
    return progress


def _save(learner: ControlLearner[Any], writer: RunWriter, progress: ControlProgress) -> None:
    whole = replace(progress, learner=learner.facts(), environments=learner.environments.state())
    last = progress.step if progress.steps >= learner.stage.steps else -1
    writer.checkpoint(
        progress,
        lambda folder: state.save(folder, whole, learner),
        learner.stage.checkpoints,
        last,
    )


def _record_video(learner: ControlLearner[Any], writer: RunWriter) -> None:
    stage, seed = learner.stage, derive(learner.seed, "film")
    try:
        steps = record_video(
            writer.folder.film,
            learner.greedy(),
            stage.environment,
            seed,
            stage.evaluation.longest,
        )
        update_run_json(writer.folder, {"film": {"steps": steps}})
    except Exception as error:  # the run is complete without it
        why = "" if isinstance(error, KeelError) else f"{type(error).__name__}: "
        writer.note(f"no film: {why}{error}")
