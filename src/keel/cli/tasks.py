"""`keel tasks`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from keel.config.sources import TaskSource
from keel.data.tasks import build_task, catalogue

SHOWN = 5


def run(arguments: argparse.Namespace) -> None:
    """The tasks there are, or a few prompts of one."""
    if arguments.show is None:
        _list(arguments.json)
        return
    task = build_task(TaskSource(name=arguments.show), seed=0)
    prompts = [task.prompt("train", index) for index in range(SHOWN)]
    pairs = [{"prompt": p.content, "gold": task.gold(p)} for p in prompts]
    if arguments.json:
        print(json.dumps(pairs, ensure_ascii=False))
        return
    for pair in pairs:
        print(f"prompt  {pair['prompt']!r}\ngold    {pair['gold']!r}\n")


def _list(as_json: bool) -> None:
    entries = catalogue()
    if as_json:
        print(json.dumps(dict(entries), ensure_ascii=False))
        return
    print_table(entries)


def print_table(entries: Sequence[tuple[str, str]]) -> None:
    """Names and descriptions in two columns."""
    width = max(len(name) for name, _ in entries)
    for name, description in entries:
        print(f"{name:<{width}}  {description}")
