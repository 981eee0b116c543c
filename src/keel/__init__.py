"""Keel trains language models by reinforcement learning.

The parts are in its packages (`keel.objective`, `keel.algorithms`, …); what most users want is
here: `train`, `check`, `evaluate`, `export`, `load`, `load_recipe`, `explain`, callbacks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keel.version import VERSION

if TYPE_CHECKING:
    from keel.algorithms.explain import explain
    from keel.config.load import load_recipe
    from keel.config.objective import explain_recipe
    from keel.python import check, evaluate, load, train
    from keel.runs.callbacks import Callback, RunState, StopRun
    from keel.training.export import export

__version__ = VERSION

__all__ = [
    "Callback",
    "RunState",
    "StopRun",
    "__version__",
    "check",
    "evaluate",
    "explain",
    "explain_recipe",
    "export",
    "load",
    "load_recipe",
    "train",
]

_HOMES = {
    "Callback": "keel.runs.callbacks",
    "RunState": "keel.runs.callbacks",
    "StopRun": "keel.runs.callbacks",
    "check": "keel.python",
    "evaluate": "keel.python",
    "explain": "keel.algorithms.explain",
    "export": "keel.training.export",
    "load": "keel.python",
    "explain_recipe": "keel.config.objective",
    "load_recipe": "keel.config.load",
    "train": "keel.python",
}


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for: `import keel` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
