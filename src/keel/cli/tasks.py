"""`keel tasks`"""

from __future__ import annotations

import argparse

from keel.cli.output import columns, print_result
from keel.config.sources import TaskSource
from keel.data.tasks import build_task, catalogue

SHOWN = 5


def run(arguments: argparse.Namespace) -> None:
    """The tasks there are, or a few prompts of one."""
    if arguments.show is None:
        found = dict(catalogue())
        print_result(arguments, found, columns(found))
        return
    task = build_task(TaskSource(name=arguments.show), seed=0)
    prompts = [task.prompt("train", index) for index in range(SHOWN)]
    pairs = [{"prompt": p.content, "gold": task.gold(p)} for p in prompts]
    lines = [f"prompt  {one['prompt']!r}\ngold    {one['gold']!r}\n" for one in pairs]
    print_result(arguments, pairs, lines)
