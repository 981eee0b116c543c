"""The user's own functions that a stage names as `module:function`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from keel.types import KeelError, Prompt


def imitate_gold(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The demonstration that is the gold answer itself."""
    return gold


def load_demonstration(path: str | None) -> Callable[[Prompt, str, np.random.Generator], str]:
    """The function (prompt, gold, rng) -> text that a recipe names; the gold answer without one."""
    if path is None:
        return imitate_gold
    module, _, name = path.partition(":")
    try:
        function: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise KeelError(f"demonstration = {path!r} cannot be loaded: {error}") from None
    return function  # type: ignore[no-any-return]
