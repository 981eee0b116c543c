"""`keel eval` and `keel export`: the model that a run made."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keel.cli.main import print_result
from keel.runs.layout import RECIPE
from keel.types import KeelError

OPTIONS = (
    "prompts",
    "samples",
    "k",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_tokens",
    "seed",
)
OF_TASKS = ("task", "set", "reward", "checkpoint", *OPTIONS)
JUDGED = ("pairs", "labels", "steps")
OF_STEPS = ("separator", "threshold")
OF_JUDGED = ("stage", *OF_STEPS, "pictures")
FIGURES = ("log_loss", "brier", "ece", "f1")
"""Of judged rows; if they cannot tell one, the table says so."""


def run(arguments: argparse.Namespace) -> None:
    """Evaluate and print the table. Raises KeelError for options that would have no effect."""
    files = _given(arguments, JUDGED)
    if files:
        _judged(arguments, files)
        return
    _refuse(arguments, OF_JUDGED, "of judged rows only: give --pairs, --labels or --steps too")
    if arguments.checkpoint is not None and not (Path(arguments.model) / RECIPE).is_file():
        raise KeelError(
            f"{arguments.model} is not a run folder, so it has no checkpoint "
            f"{arguments.checkpoint!r}: drop --checkpoint"
        )
    from keel.training.evaluation import evaluate

    given = {name: getattr(arguments, name) for name in _given(arguments, OPTIONS)}
    result = evaluate(
        arguments.model,
        task=arguments.task,
        task_keys=arguments.set,
        rewards=arguments.reward,
        checkpoint="last" if arguments.checkpoint is None else arguments.checkpoint,
        **given,
    )
    print_result(arguments, result, _table(result))


def _judged(arguments: argparse.Namespace, files: Sequence[str]) -> None:
    """A reward model on a file of judged rows."""
    if len(files) > 1:
        raise KeelError(f"{_names(files)}: give one file of rows")
    (rows,) = files
    _refuse(arguments, OF_TASKS, f"without effect on judged rows (--{rows}): leave out")
    if rows != "steps":
        _refuse(arguments, OF_STEPS, "of answers in steps only: leave out, or give --steps")
    from keel.training.evaluation import evaluate_reward_model

    separator = arguments.separator
    measured = evaluate_reward_model(
        arguments.model,
        rows,  # type: ignore[arg-type]
        getattr(arguments, rows),
        stage=arguments.stage,
        separator=None if separator is None else separator.replace("\\n", "\n"),
        threshold=arguments.threshold,
        pictures=None if arguments.pictures is None else Path(arguments.pictures),
    )
    result = measured.as_dict()
    print_result(arguments, result, _judged_table(result))


def run_export(arguments: argparse.Namespace) -> None:
    """Write a run's policy, or the reward model of a stage, as a plain model folder."""
    from keel.training.export import class_of, exported

    result = exported(
        arguments.run,
        arguments.folder,
        checkpoint=arguments.checkpoint,
        stage=arguments.stage,
        adapter=arguments.adapter,
        hub=arguments.hub,
        private=arguments.private,
    )
    folder, lines = str(result.folder), []
    if result.running:
        what = f"stage {arguments.stage}" if result.checkpoint is None else result.checkpoint
        lines = [f"the run in {arguments.run} is still going; exported is the model of {what}"]
    call = "peft.PeftModel.from_pretrained(BASE, "
    if not arguments.adapter:
        call = f"{class_of(result.folder)}.from_pretrained("
    lines.append(f"{folder}: load it with {call}{folder!r})")
    if result.url is not None:
        lines.append(f"uploaded to {result.url}: load it with {call}{arguments.hub!r})")
    print_result(arguments, {**asdict(result), "folder": folder}, lines)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Which of these options stand on the command line."""
    return [name for name in names if getattr(arguments, name) not in (None, [])]


def _names(options: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in options)


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raises KeelError if any of these options is given."""
    if given := _given(arguments, names):
        raise KeelError(f"{_names(given)}: {why}")


# ---------------------------------------------------------------- what is printed


def _judged_table(result: dict[str, Any]) -> Iterator[str]:
    yield HEAD
    for name, value in result.items():
        if isinstance(value, dict) and "low" in value:
            yield _row(name, value)
    for name, value in result.items():
        if isinstance(value, int | float):
            yield f"{name:<20}{value:.4g}"
        elif value is None and name in FIGURES:
            yield f"{name:<20}undefined"


def _table(result: dict[str, Any]) -> Iterator[str]:
    yield HEAD
    yield _row("greedy" if result["measure"] == "pass@1" else "greedy reward", result)
    for name, value in result.items():
        if isinstance(value, dict) and "mean" in value:
            yield _row(name, value)
    for name, value in result.get("figures", {}).items():
        yield f"{name:<30}{value:.3f}"
    if result["measure"] == "reward":
        yield (
            "\nmean rewards, no pass@k: no reward that is declared as correctness "
            "(rewards.functions.correctness) gives a verdict"
        )
    yield f"\nreward: {result['reward']}"
    if "protocol" in result:
        yield f"asked: {result['protocol']}\npublished: {result['as_published']}"
    if "trained_on" in result:
        yield f"\ntrained on: {'; '.join(result['trained_on'])}: report the figure of other ones"
    if "warning" in result:
        yield f"\nwarning: {result['warning']}"
    if result.get("selected"):
        yield "\nthis checkpoint was selected on these prompts: report the figure of other ones"
    if result.get("unjudged"):
        yield f"\n{result['unjudged']} validation prompts without a verdict are left out"
    if result.get("left_out"):
        yield f"\n{result['left_out']} validation prompts left out: too long, or unreadable"


HEAD = f"{'':<15}{'mean':>9}   95 % interval        n"


def _row(name: str, value: dict[str, Any]) -> str:
    """A line; None, NaN and the infinities are what the rows cannot tell."""
    mean, low, high = (value[key] for key in ("mean", "low", "high"))
    known = _known(mean)
    shown = f"{mean:.3f}" if known else "undefined"
    interval = f"[{low:.3f}, {high:.3f}]" if known and _known(low) and _known(high) else "–"
    if known and low == 0 and high == 1:
        interval = "too few prompts"
    return f"{name:<15}{shown:>9}   {interval:<18}{value['n']:>4}"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
