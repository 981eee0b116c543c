"""A reward that harms its own run at one step, as a test has planned.

The plan is in the environment, so that the recipe is that of an unharmed run.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keel.platform import signals
from keel.types import Prompt
from tests.durability import mounts

PLAN = "KEEL_TEST_PLAN"
_demonstrations = itertools.count(1)


def plan(step: int, on: str = "reward", **acts: Any) -> dict[str, str]:
    """The environment in which acts are done at the reward of this step, or at this demonstration.

    Demonstrations count from 1, over the process.
    """
    return {PLAN: json.dumps({"when": [on, step], "acts": acts})}


def digits(*, completions: Sequence[str], trainer_state: Any, **_: Any) -> list[float]:
    """The share of each completion's characters that are even digits."""
    _act("reward", trainer_state.global_step)
    return [sum(c in "02468" for c in text) / (len(text) + 1) for text in completions]


def demonstrate(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer."""
    _act("demonstration", next(_demonstrations))
    return gold


def _act(on: str, step: int) -> None:
    wanted = json.loads(os.environ.get(PLAN, "null"))
    if wanted is not None and wanted["when"] == [on, step]:
        for act, value in wanted["acts"].items():
            ACTS[act](value)


def _fill(wanted: dict[str, Any]) -> None:
    disk = Path(wanted["disk"])
    if not (disk / "ballast").exists():
        mounts.fill(disk, wanted["leave"])


def _pause(path: str) -> None:
    """Makes a file once the step is reached, and waits until it is deleted."""
    Path(path).touch()
    while Path(path).exists():
        time.sleep(0.002)


def _echo(signum: int) -> None:
    signals.AGAIN = 60.0  # so that the second is an echo however late it is handled
    for _ in range(2):
        os.kill(os.getpid(), signum)
        time.sleep(0.01)


ACTS = {
    "echo": _echo,
    "signal": lambda signum: os.kill(os.getpid(), signum),
    "fill": _fill,
    "pause": _pause,
}
