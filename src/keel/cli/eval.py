"""`keel eval`"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.runs.layout import RECIPE
from keel.runs.values import plain
from keel.types import KeelError

OPTIONS = ("prompts", "samples", "temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")
OF_TASKS = ("task", "set", "reward", "checkpoint", *OPTIONS)
JUDGED = ("pairs", "labels", "steps")
OF_STEPS = ("separator", "threshold")
OF_JUDGED = ("stage", *OF_STEPS, "pictures")
FIGURES = ("log_loss", "brier", "ece", "f1")
"""Of judged rows; where they cannot tell one, the table says so."""


def run(arguments: argparse.Namespace) -> None:
    """Evaluate and print the table. Raises KeelError for options that would have no effect."""
    files = {rows: path for rows in JUDGED if (path := getattr(arguments, rows)) is not None}
    if files:
        _judged(arguments, files)
        return
    strange = _given(arguments, OF_JUDGED)
    if strange:
        verb = "is" if len(strange) == 1 else "are"
        raise KeelError(
            f"{_names(strange)} {verb} of judged rows: give --pairs, --labels or --steps"
        )
    if arguments.checkpoint is not None and not (Path(arguments.model) / RECIPE).is_file():
        raise KeelError(
            f"{arguments.model} is no run folder, so it has no checkpoint "
            f"{arguments.checkpoint!r}: drop --checkpoint"
        )
    from keel.training.evaluation import evaluate

    given = {name: getattr(arguments, name) for name in OPTIONS}
    result = evaluate(
        arguments.model,
        task=arguments.task,
        task_keys=arguments.set,
        rewards=arguments.reward,
        checkpoint="last" if arguments.checkpoint is None else arguments.checkpoint,
        **{name: value for name, value in given.items() if value is not None},
    )
    if arguments.json:
        print(json.dumps(plain(result), ensure_ascii=False))
        return
    _table(result)


def _judged(arguments: argparse.Namespace, files: dict[str, str]) -> None:
    """A reward model on a file of judged rows."""
    if len(files) > 1:
        raise KeelError(f"{_names(list(files))}: give one file of rows")
    rows, path = next(iter(files.items()))
    strange = _given(arguments, OF_TASKS)
    if strange:
        raise KeelError(
            f"{_names(strange)} {_say(strange)} nothing of judged rows (--{rows}): "
            f"drop {_them(strange)}"
        )
    strange = [] if rows == "steps" else _given(arguments, OF_STEPS)
    if strange:
        raise KeelError(
            f"{_names(strange)} {_say(strange)} how answers in steps are read: "
            f"drop {_them(strange)}, or give --steps"
        )
    from keel.training.evaluation import evaluate_reward_model

    separator = arguments.separator
    measured = evaluate_reward_model(
        arguments.model,
        rows,  # type: ignore[arg-type]
        path,
        stage=arguments.stage,
        separator=None if separator is None else separator.replace("\\n", "\n"),
        threshold=arguments.threshold,
        pictures=None if arguments.pictures is None else Path(arguments.pictures),
    )
    result = measured.as_dict()
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    intervals = {k: v for k, v in result.items() if isinstance(v, dict) and "low" in v}
    _head()
    for name, value in intervals.items():
        _row(name, value)
    for name, value in result.items():
        if isinstance(value, int | float):
            print(f"{name:<20}{value:.4g}")
        elif value is None and name in FIGURES:
            print(f"{name:<20}undefined")


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Which of these options stand on the command line."""
    return [name for name in names if getattr(arguments, name) not in (None, [])]


def _names(options: Sequence[str]) -> str:
    words = [f"--{name.replace('_', '-')}" for name in options]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _say(options: Sequence[str]) -> str:
    return "says" if len(options) == 1 else "say"


def _them(options: Sequence[str]) -> str:
    return "it" if len(options) == 1 else "them"


def _table(result: dict[str, Any]) -> None:
    _head()
    _row("greedy" if result["measure"] == "pass@1" else "greedy reward", result)
    for name, value in result.items():
        if isinstance(value, dict) and "mean" in value:
            _row(name, value)
    if result["measure"] == "reward":
        print(
            "\nmean rewards, no pass@k: no reward that is declared as correctness "
            "(rewards.functions.correctness) gives a verdict"
        )
    print(f"\nreward: {result['reward']}")
    if "warning" in result:
        print(f"\nwarning: {result['warning']}")
    if result.get("selected"):
        print("\nthis checkpoint was selected on these prompts: report the figure of other ones")
    if result.get("unjudged"):
        print(f"\n{result['unjudged']} validation prompts without a verdict are left out")
    if result.get("left_out"):
        print(f"\n{result['left_out']} validation prompts left out: too long, or unreadable")


def _head() -> None:
    print(f"{'':<15}{'mean':>9}   95 % interval        n")


def _row(name: str, value: dict[str, Any]) -> None:
    """A line; None, NaN and the infinities are what the rows cannot tell."""
    mean, low, high = (value[key] for key in ("mean", "low", "high"))
    known = _known(mean)
    shown = f"{mean:.3f}" if known else "undefined"
    interval = f"[{low:.3f}, {high:.3f}]" if known and _known(low) and _known(high) else "–"
    if known and low == 0 and high == 1:
        interval = "too few prompts"
    print(f"{name:<15}{shown:>9}   {interval:<18}{value['n']:>4}")


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
