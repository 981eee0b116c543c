"""Keel trains language models by reinforcement learning.

The parts are in its packages (`keel.objective`, `keel.algorithms`, …); what most users want is
here: `train`, `check`, `evaluate`, `export`, `load`, `load_recipe`, `explain`, callbacks; and the
parts of a loop of your own (`keel.parts`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keel.version import VERSION

if TYPE_CHECKING:
    from keel.algorithms.explain import explain
    from keel.config.load import load_recipe
    from keel.config.schema import explain_recipe
    from keel.learn.advantages import estimate
    from keel.learn.batch import from_groups
    from keel.learn.loss import prepare
    from keel.parts import encode_prompts, load_algorithm, load_policy, make_engine, make_learner
    from keel.python import check, evaluate, load, train
    from keel.runs.callbacks import Callback, RunControl, RunState
    from keel.training.export import export
    from keel.types import Prompt, Sampling

__version__ = VERSION

__all__ = [
    "Callback",
    "Prompt",
    "RunControl",
    "RunState",
    "Sampling",
    "__version__",
    "check",
    "encode_prompts",
    "estimate",
    "evaluate",
    "explain",
    "explain_recipe",
    "export",
    "from_groups",
    "load",
    "load_algorithm",
    "load_policy",
    "load_recipe",
    "make_engine",
    "make_learner",
    "prepare",
    "train",
]

_HOMES = {
    "Callback": "keel.runs.callbacks",
    "Prompt": "keel.types",
    "RunControl": "keel.runs.callbacks",
    "RunState": "keel.runs.callbacks",
    "Sampling": "keel.types",
    "check": "keel.python",
    "encode_prompts": "keel.parts",
    "estimate": "keel.learn.advantages",
    "evaluate": "keel.python",
    "explain": "keel.algorithms.explain",
    "explain_recipe": "keel.config.schema",
    "export": "keel.training.export",
    "from_groups": "keel.learn.batch",
    "load": "keel.python",
    "load_algorithm": "keel.parts",
    "load_policy": "keel.parts",
    "load_recipe": "keel.config.load",
    "make_engine": "keel.parts",
    "make_learner": "keel.parts",
    "prepare": "keel.learn.loss",
    "train": "keel.python",
}


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for: `import keel` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
