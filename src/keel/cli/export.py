"""`keel export`"""

from __future__ import annotations

import argparse
import json

from keel.train.export import export


def run(arguments: argparse.Namespace) -> None:
    """Write a run's policy as a plain model folder."""
    result = export(arguments.run, arguments.folder, checkpoint=arguments.checkpoint)
    if arguments.json:
        print(json.dumps({"folder": str(result)}))
    else:
        print(f"{result}: load it with AutoModelForCausalLM.from_pretrained({str(result)!r})")
