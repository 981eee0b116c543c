"""`keel rollouts`"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from keel.analysis.text import visible
from keel.cli.output import print_result
from keel.runs.reader import load
from keel.runs.rollouts import COMPONENT
from keel.types import shown_text

SHOWN = 5


def run(arguments: argparse.Namespace) -> None:
    """Print the rollouts of a step: all as JSON, else the first few."""
    records = load(arguments.run).rollouts(arguments.step, arguments.stage)
    print_result(arguments, records[: arguments.n], lines(records, arguments.n or SHOWN))


def lines(records: Sequence[dict[str, Any]], shown: int) -> Iterator[str]:
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
    if record["advantages"] is None:
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
