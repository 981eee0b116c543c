"""`keel export`"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from keel.cli.output import print_result
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
    folder, lines = str(result.folder), []
    if result.running:
        what = f"stage {arguments.stage}" if result.checkpoint is None else result.checkpoint
        lines = [f"the run in {arguments.run} is still going; exported is the model of {what}"]
    call = "peft.PeftModel.from_pretrained(BASE, "
    if not arguments.adapter:
        call = f"{class_of(result.folder)}.from_pretrained("
    lines.append(f"{folder}: load it with {call}{folder!r})")
    print_result(arguments, {**asdict(result), "folder": folder}, lines)
