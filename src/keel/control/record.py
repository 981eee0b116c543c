"""A GIF of one episode, as the environment renders it.

Gymnasium's own recorder writes MP4 through moviepy; a GIF needs Pillow alone, and a page shows it
as a picture.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from keel.config.control import Environment
from keel.control.collect import ChooseActions
from keel.control.environments import derive_episode, make
from keel.platform import files
from keel.types import KeelError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

COUNTER = 24
"""Pixels above the scene for the step and the return."""
FRAMES = 400
"""An episode of more steps is shown in part: every k-th, so that this many are left."""
FASTEST = 33
"""Most frames per second; browsers show no more of a GIF."""


def record_video(
    path: Path, choose: ChooseActions, environment: Environment, seed: int, longest: int
) -> int:
    """Play one episode and write it; its length in steps.

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
