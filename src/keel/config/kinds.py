"""Finds the kinds of stages: one module each in `keel.training.stages`. Torch-free.

The `STAGE` of a module is a subclass of `keel.config.stage.StageConfig`. Nothing lists them: a new
kind is one new file. The modules import torch only in the methods that train.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

PACKAGE = "keel.training.stages"
DEFAULT_KIND = "rl"
"""The kind of a stage that does not set `stage`."""


@cache
def stage_kinds() -> tuple[type[Any], ...]:
    """Every kind of stage, by the names of their modules."""
    folder = import_module(PACKAGE).__path__
    names = sorted(module.name for module in iter_modules(folder))
    return tuple(import_module(f"{PACKAGE}.{name}").STAGE for name in names)


def stage_kind(name: str) -> type[Any] | None:
    """The kind that a recipe calls `stage = name`; None if there is none."""
    kinds = (kind for kind in stage_kinds() if kind.model_fields["stage"].default == name)
    return next(kinds, None)
