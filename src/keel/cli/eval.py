"""`keel eval`"""

from __future__ import annotations

import argparse
import json
from typing import Any

from keel.train.evaluation import evaluate

OPTIONS = ("prompts", "samples", "temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")


def run(arguments: argparse.Namespace) -> None:
    """Evaluate and print the table."""
    given = {name: getattr(arguments, name) for name in OPTIONS}
    result = evaluate(
        arguments.model,
        task=arguments.task,
        task_keys=arguments.set,
        rewards=arguments.reward,
        checkpoint=arguments.checkpoint,
        **{name: value for name, value in given.items() if value is not None},
    )
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    _table(result)


def _table(result: dict[str, Any]) -> None:
    print(f"{'':<16}{'mean':>8}   95 % interval        n")
    _row("greedy", result)
    for name, value in result.items():
        if isinstance(value, dict) and "mean" in value:
            _row(name, value)


def _row(name: str, value: dict[str, Any]) -> None:
    interval = f"[{value['low']:.3f}, {value['high']:.3f}]"
    print(f"{name:<16}{value['mean']:>8.3f}   {interval:<18}{value['n']:>4}")
