"""`keel recipes`"""

from __future__ import annotations

import argparse
import json

from keel.config.load import shipped


def run(arguments: argparse.Namespace) -> None:
    recipes = shipped()
    if arguments.json:
        print(json.dumps(recipes, ensure_ascii=False))
        return
    width = max(map(len, recipes))
    for name, description in recipes.items():
        print(f"{name:<{width}}  {description}")
