"""`keel explain`"""

from __future__ import annotations

import argparse
import json
import shutil
import sys

from keel.algorithms.explain import explain_preset
from keel.algorithms.presets import PRESETS
from keel.algorithms.render import Explanation
from keel.config.fields import unknown
from keel.config.load import load_recipe, shipped
from keel.config.schema import explain_recipe
from keel.types import KeelError


def run(arguments: argparse.Namespace) -> None:
    """The objective of a preset, or of each reinforcement-learning stage of a recipe."""
    explanations = _explanations(arguments.recipe, arguments.overrides)
    if arguments.json:
        found = [explanation.json() for explanation in explanations]
        print(json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False, indent=2))
    elif arguments.latex:
        print("\n\n".join(explanation.latex() for explanation in explanations))
    else:
        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        print("\n\n".join(explanation.unicode(width=width) for explanation in explanations))


def _explanations(name: str, overrides: list[str]) -> list[Explanation]:
    if name in PRESETS and not overrides:
        return [explain_preset(name)]
    if name in PRESETS:
        raise KeelError(
            f"{name!r} is a preset, which takes no overrides: explain a recipe with "
            f"algorithm.preset={name}"
        )
    if not name.endswith(".toml") and "/" not in name and name not in shipped():
        raise KeelError(unknown("recipe or preset", name, [*shipped(), *PRESETS]))
    found = explain_recipe(load_recipe(name, overrides))
    if not found:
        raise KeelError(f"recipe {name!r} has no reinforcement-learning stage to explain")
    return found
