"""`keel export`"""

from __future__ import annotations

import argparse
import json

from keel.training.export import class_of, export


def run(arguments: argparse.Namespace) -> None:
    """Write a run's policy, or the reward model of a stage, as a plain model folder."""
    result = export(
        arguments.run,
        arguments.folder,
        checkpoint=arguments.checkpoint,
        stage=arguments.stage,
        adapter=arguments.adapter,
    )
    if arguments.json:
        print(json.dumps({"folder": str(result)}))
    elif arguments.adapter:
        print(f"{result}: load it with peft.PeftModel.from_pretrained(BASE, {str(result)!r})")
    else:
        kind = class_of(result)
        print(f"{result}: load it with {kind}.from_pretrained({str(result)!r})")
