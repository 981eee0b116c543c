"""Small recipes and a run of them, for tests of the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keel.config.load import load_recipe
from keel.config.schema import Recipe
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.run import train

FAST = (
    "threads=1",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "evaluation.prompts=8",
    "checkpoints.every=2",
    "checkpoints.keep=9",
)


def small(*overrides: str, recipe: str = "tiny") -> Recipe:
    """A shipped recipe cut down to a few quick steps."""
    return load_recipe(recipe, [*FAST, "steps=4", *overrides])


def run(folder: Path, *overrides: str, recipe: str = "tiny") -> RunFolder:
    """A small run, whole."""
    return train(small(*overrides, recipe=recipe), folder)


def metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return load(folder.path).metrics()


def info(folder: RunFolder) -> dict[str, Any]:
    return json.loads(folder.run_json.read_text())  # type: ignore[no-any-return]
