"""`keel rollouts show` and `score`: what a run sampled, and other rewards of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from keel.analysis.text import visible
from keel.cli.main import print_result
from keel.runs.reader import load
from keel.runs.rows import COMPONENT
from keel.types import shown_text

if TYPE_CHECKING:
    from keel.training.rescoring import Rescored

COMPLETIONS = 5
"""Completions of a step that are printed."""


# ---------------------------------------------------------------- score


def run_rollouts_score(arguments: argparse.Namespace) -> None:
    """Print what other rewards make of stored completions."""
    from keel.training.rescoring import rescore

    found, notes = rescore(
        arguments.run,
        arguments.reward,
        options=arguments.set,
        step=arguments.step,
        stage=arguments.stage,
    )
    result = [
        one.summary() | {"rows": [asdict(row) for row in one.most_different(arguments.n)]}
        for one in found
    ]
    print_result(
        arguments, {"rewards": result, "notes": notes}, _rescored(found, notes, arguments.n)
    )


def _rescored(found: Sequence[Rescored], notes: Sequence[str], shown: int) -> Iterator[str]:
    """A block for each reward."""
    for note in notes:
        yield visible(f"note: {note}")
    for one in found:
        s = one.summary()
        yield visible(
            f"{one.name} against the stored {one.against}: {s['completions']} completions"
        )
        if s["compared"]:
            related = "" if s["correlation"] is None else f", correlation {s['correlation']:.3f}"
            yield f"  mean {_number(s['stored_mean'])} -> {_number(s['mean'])}{related}"
        flips = f"{s['became_right']} became right, {s['became_wrong']} wrong"
        yield f"  verdicts (at least {one.threshold:g} is right): {flips}"
        for row in one.most_different(shown):
            yield visible(
                f"  step {row.step}, completion {row.row}: {_number(row.stored)} -> "
                f"{_number(row.new)}  {row.prompt_id}: {_text(row.completion)}"
            )


# ---------------------------------------------------------------- show


def run_rollouts_show(arguments: argparse.Namespace) -> None:
    """Print the rollouts of a step: all as JSON, else the first few."""
    records = load(arguments.run).rollouts(arguments.step, arguments.stage)
    print_result(
        arguments, records[: arguments.n], _completions(records, arguments.n or COMPLETIONS)
    )


def _completions(records: Sequence[dict[str, Any]], shown: int) -> Iterator[str]:
    """The first records as text."""
    rewards = [one["reward"] for one in records if one["reward"] is not None]
    groups = len({one["group"] for one in records})
    mean = f", mean reward {sum(rewards) / len(rewards):.3g}" if rewards else ""
    yield f"{len(records)} completions of {groups} prompts{mean}"
    for one in records[:shown]:
        parts = {
            name.removeprefix(COMPONENT): value
            for name, value in one.items()
            if name.startswith(COMPONENT)
        }
        named = ", ".join(f"{name} {_number(value)}" for name, value in parts.items())
        reward = _number(one["reward"]) + (f" ({named})" if len(parts) > 1 else "")
        yield ""
        yield (
            f"{one['prompt_id']}: reward {reward}, advantage {_advantage(one)}, "
            f"{len(one['tokens'])} tokens, ended by {one['finish']}"
        )
        yield f"  prompt      {_text(one['prompt'])}"
        yield f"  completion  {_text(one['completion'])}"
    if len(records) > shown:
        yield f"\n{len(records) - shown} more: -n {len(records)} shows all, --json every token too"


def _advantage(record: dict[str, Any]) -> str:
    """One number if it is the same for all tokens of the policy, else the range."""
    if record.get("advantages") is None:
        return "-"
    of_policy = [
        value for value, own in zip(record["advantages"], record["written"], strict=True) if own
    ]
    low, high = (min(of_policy), max(of_policy)) if of_policy else (0.0, 0.0)
    return f"{low:+.3g}" if low == high else f"{low:+.3g} to {high:+.3g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _text(content: Any) -> str:
    """On one line, without control characters; of a conversation each message."""
    if not isinstance(content, str):
        return "  ".join(f"{turn['role']}: {_text(shown_text(turn))}" for turn in content)
    return f'"{visible(content)}"'
