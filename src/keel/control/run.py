"""Runs a recipe of `keel control`, from its start or from a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch

from keel.analysis.metrics import stage_columns
from keel.analysis.plots import stage_curve
from keel.config.control import ControlRecipe, Environment, load_control
from keel.config.fields import derive
from keel.config.load import to_toml
from keel.control import learner as state
from keel.control.environments import derive_episode, make
from keel.control.learner import ChooseActions, ControlLearner, ControlProgress, evaluate
from keel.control.policy_gradient import PolicyGradient
from keel.control.q_learning import QLearning
from keel.learn.memory import keeping_threads
from keel.platform import files
from keel.runs import checkpoint, lifecycle
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.runs.writer import RunWriter, update_run_json
from keel.types import KeelError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

REPORTED = ("gymnasium", "torch", "numpy")
LEARNERS: Mapping[str, Callable[[Any, int], ControlLearner[Any]]] = {
    "q_learning": QLearning,
    "policy_gradient": PolicyGradient,
}
"""The learner of each kind of stage, from its configuration and a seed."""
COUNTER = 24
"""Pixels of a film above the scene, for the step and the return."""
FRAMES = 400
"""A film of an episode of more steps shows every k-th, so that this many are left."""
FASTEST = 33
"""Most frames per second; browsers show no more of a GIF."""


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
    lasting = lifecycle.run_lifecycle(place, resume, callbacks, "control")
    with lasting as (writer, start), keeping_threads(recipe.threads):
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
        choice, last = stage.evaluation, progress.steps >= stage.steps
        requests = writer.callbacks.step(
            number, metrics, time.perf_counter() - clock, evaluates=choice.episodes > 0
        )
        due = choice.every > 0 and progress.steps // choice.every > before // choice.every
        if choice.episodes and (due or last or requests.evaluate):
            progress = _evaluate(learner, writer, progress, metrics)
        learner.rate_scale *= requests.rate_scale
        writer.recorded(progress, metrics, [], time.perf_counter() - clock)
        if writer.checkpoint_due(progress, number if last else -1, stage.checkpoints):
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
    metrics: dict[str, float],
) -> ControlProgress:
    """Evaluate, and report it; the progress with the best evaluation."""
    stage, last = learner.stage, progress.steps >= learner.stage.steps
    with writer.clock("evaluation"):
        result = evaluate(learner.greedy(), stage.environment, stage.evaluation, learner.seed)
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
    save = partial(state.save, progress=whole, learner=learner)
    writer.checkpoint(progress, save, learner.stage.checkpoints, last)


def _record_video(learner: ControlLearner[Any], writer: RunWriter) -> None:
    target, choice, seed = writer.folder.film, learner.stage, derive(learner.seed, "film")
    longest = choice.evaluation.longest
    try:
        steps = record_video(target, learner.greedy(), choice.environment, seed, longest)
        update_run_json(writer.folder, {"film": {"steps": steps}})
    except Exception as error:  # the run is complete without it
        why = "" if isinstance(error, KeelError) else f"{type(error).__name__}: "
        writer.note(f"no film: {why}{error}")


# ---------------------------------------------------------------- the film


def record_video(
    path: Path, choose: ChooseActions, environment: Environment, seed: int, longest: int
) -> int:
    """Play one episode and write it as a GIF; its length in steps.

    Gymnasium's own recorder writes MP4 through moviepy; a GIF needs Pillow alone, and a page shows
    it as a picture.

    Raises KeelError if the environment cannot be rendered.
    """
    for variable in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(variable, "dummy")  # rendered in memory, without a display
    plain = make(environment)  # one that cannot be rendered may not accept render_mode
    plain.close()
    if "rgb_array" not in plain.metadata.get("render_modes", []):
        raise KeelError(
            f"environment {environment.id!r} cannot be rendered (it has no rgb_array mode)"
        )
    env = make(environment, render="rgb_array")
    try:
        frames, steps = _play(env, choose, derive_episode(seed, 0), longest)
        rate = float(env.metadata.get("render_fps", 30))
    finally:
        env.close()
    pictures = [frame.quantize(64) for frame in frames]
    settings: dict[str, Any] = {"duration": max(1000 / rate, 1000 / FASTEST), "loop": 0}
    with files.replacing(path, sync=False) as file:
        pictures[0].save(file, format="GIF", save_all=True, append_images=pictures[1:], **settings)
    return steps


def _play(
    env: gym.Env[Any, Any], choose: ChooseActions, seed: int, longest: int
) -> tuple[list[Image], int]:
    observation, _ = env.reset(seed=seed)
    frames, steps, every, ended, total = [_frame(env, 0, 0.0)], 0, 1, False, 0.0
    while not ended:
        action = choose(np.asarray(observation, dtype=np.float32)[None])[0]
        observation, reward, terminated, truncated, _ = env.step(action)
        steps, total = steps + 1, total + float(reward)
        ended = terminated or truncated or steps == longest
        if steps % every == 0 or ended:
            frames.append(_frame(env, steps, total))
        if len(frames) > 2 * FRAMES:
            frames, every = frames[::2], every * 2
    step = max(1, -(-len(frames) // FRAMES))
    return [*frames[:-1:step], frames[-1]], steps


def _frame(env: gym.Env[Any, Any], steps: int, total: float) -> Image:
    """A frame: the step and the return in a line above the rendered environment."""
    from PIL import Image, ImageDraw

    try:
        picture = env.render()
    except (gym.error.Error, ImportError) as error:
        raise KeelError(f"the environment cannot be rendered: {one_line(error)}") from error
    scene = Image.fromarray(np.asarray(picture, dtype=np.uint8))
    frame = Image.new("RGB", (scene.width, scene.height + COUNTER), "white")
    frame.paste(scene, (0, COUNTER))
    text = f"step {steps}   return {total:g}"
    ImageDraw.Draw(frame).text((6, 5), text, fill="black", font_size=14)
    return frame
