"""`keel recipes`"""

from __future__ import annotations

import argparse
import json

from keel.cli.tasks import print_table
from keel.config.control_load import tuned
from keel.config.load import shipped


def run(arguments: argparse.Namespace) -> None:
    """The recipes of `keel train`, and what `keel control` has tuned settings for."""
    recipes = shipped()
    if arguments.json:
        print(json.dumps(recipes, ensure_ascii=False))
        return
    print_table(list(recipes.items()))
    print("\ntuned, for keel control:")
    for algorithm, environment in tuned():
        print(f"  keel control {algorithm} --env {environment}")
