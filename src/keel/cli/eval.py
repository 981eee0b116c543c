"""`keel eval`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from keel.types import KeelError

OPTIONS = ("prompts", "samples", "temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")


JUDGED = ("pairs", "labels", "steps")


def run(arguments: argparse.Namespace) -> None:
    """Evaluate and print the table."""
    files = {rows: path for rows in JUDGED if (path := getattr(arguments, rows)) is not None}
    if files:
        _judged(arguments, files)
        return
    if arguments.stage is not None:
        raise KeelError(
            "--stage names a reward model, which judged rows evaluate: give --pairs, "
            "--labels or --steps"
        )
    from keel.train.evaluation import evaluate

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


def _judged(arguments: argparse.Namespace, files: dict[str, str]) -> None:
    """A reward model on a file of judged rows."""
    if len(files) > 1:
        raise KeelError(f"{' and '.join('--' + name for name in files)}: give one file of rows")
    from keel.train.reward_evaluation import evaluate_reward_model

    rows, path = next(iter(files.items()))
    measured = evaluate_reward_model(
        arguments.model,
        rows,  # type: ignore[arg-type]
        path,
        stage=arguments.stage,
        separator=arguments.separator.replace("\\n", "\n"),
        pictures=None if arguments.pictures is None else Path(arguments.pictures),
    )
    result = measured.as_dict()
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    intervals = {k: v for k, v in result.items() if isinstance(v, dict) and "low" in v}
    print(f"{'':<16}{'mean':>8}   95 % interval        n")
    for name, value in intervals.items():
        _row(name, value)
    for name, value in result.items():
        if isinstance(value, int | float):
            print(f"{name:<20}{value:.4g}")


def _table(result: dict[str, Any]) -> None:
    print(f"{'':<16}{'mean':>8}   95 % interval        n")
    _row("greedy", result)
    for name, value in result.items():
        if isinstance(value, dict) and "mean" in value:
            _row(name, value)


def _row(name: str, value: dict[str, Any]) -> None:
    interval = f"[{value['low']:.3f}, {value['high']:.3f}]"
    print(f"{name:<16}{value['mean']:>8.3f}   {interval:<18}{value['n']:>4}")
