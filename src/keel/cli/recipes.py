"""`keel recipes`"""

from __future__ import annotations

import argparse

from keel.cli.output import columns, print_result
from keel.config.control_load import tuned
from keel.config.load import shipped


def run(arguments: argparse.Namespace) -> None:
    """The recipes of `keel train`, and what `keel control` has tuned settings for."""
    recipes = shipped()
    lines = [*columns(recipes), "", "tuned, for keel control:"]
    lines += [f"  keel control {name} --env {environment}" for name, environment in tuned()]
    print_result(arguments, recipes, lines)
