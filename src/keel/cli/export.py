"""`keel export`"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from keel.training.export import class_of, exported


def run(arguments: argparse.Namespace) -> None:
    """Write a run's policy, or the reward model of a stage, as a plain model folder."""
    result = exported(
        arguments.run,
        arguments.folder,
        checkpoint=arguments.checkpoint,
        stage=arguments.stage,
        adapter=arguments.adapter,
    )
    if arguments.json:
        print(json.dumps({**asdict(result), "folder": str(result.folder)}, ensure_ascii=False))
        return
    folder = str(result.folder)
    if result.running:
        what = f"stage {arguments.stage}" if result.checkpoint is None else result.checkpoint
        print(f"the run in {arguments.run} is still going; exported is the model of {what}")
    if arguments.adapter:
        print(f"{folder}: load it with peft.PeftModel.from_pretrained(BASE, {folder!r})")
    else:
        print(f"{folder}: load it with {class_of(result.folder)}.from_pretrained({folder!r})")
