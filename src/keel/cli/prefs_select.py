"""`keel prefs select`: which pairs people label next."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from keel.cli.output import print_result
from keel.cli.prefs import new_file, write_errors
from keel.platform.files import write_bytes
from keel.preferences.pool import Features, SelectionPlan, select_batch
from keel.preferences.store.statistics import shown
from keel.preferences.store.store import PreferenceStore
from keel.runs.values import record_line
from keel.types import KeelError

SHOWN = 20
"""Pairs that are printed."""


def run(arguments: argparse.Namespace) -> None:
    """Choose, set priorities, and print what was chosen and how far it can be relied on."""
    if arguments.stage is not None and arguments.model is None:
        raise KeelError("--stage has no effect without a model: give --model RUN")
    if arguments.model is not None and arguments.by == "random":
        raise KeelError("--model has no effect with --by random: drop one of the two")
    if arguments.model is None and arguments.by not in (None, "random"):
        raise KeelError(
            f"--by {arguments.by} goes by the features of a reward model: give --model RUN|FOLDER"
        )
    out = None if arguments.out is None else new_file(arguments.out)
    plan = SelectionPlan(
        arguments.by or ("random" if arguments.model is None else "d_optimal"),
        arguments.count,
        arguments.round,
        arguments.source or None,
        arguments.pool,
        arguments.seed,
    )
    features: Features | None = None
    if arguments.model is not None:
        from keel.preferences.features import text_features

        features = partial(text_features, arguments.model, stage=arguments.stage)
    with PreferenceStore(Path(arguments.store)) as store:
        batch = select_batch(store, plan, features)
    if out is not None:
        with write_errors(out):
            write_bytes(out, b"".join(record_line(row, {}) for row in batch.rows))
    result = {"store": arguments.store, **batch.as_dict(), "out": arguments.out}
    print_result(arguments, result, _lines(result))


def _lines(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['store']}: {result['labelled']:,} labelled pairs to learn from, "
        f"{result['unlabelled']:,} without a person's label to choose from"
    ]
    if result["left_out_long"]:
        lines.append(f"left out: {result['left_out_long']} pairs longer than the model's context")
    if (found := result["held_out"]) is not None:
        pairs = found["pairs"]
        accuracy, gain = shown(pairs["accuracy"], 0, 100), shown(found["gain"], 4)
        lines.append(
            f"on {found['n']:,} held-out labelled pairs: accuracy {accuracy} %, calibration error "
            f"{100 * pairs['ece']:.1f} %, log loss {pairs['log_loss']:.3f} (ln 2 = 0.693: no "
            f"knowledge), gain of the variance {gain}"
        )
    lines.append(f"by {result['by']}")
    lines += [f"hint: {hint}" for hint in result["hints"]]
    chosen = result["chosen"]
    lines.append(f"{'pair':<34}{'score':>9}{'p(first)':>10}{'s.d.':>8}")
    for row in chosen[:SHOWN]:
        figures = "".join(
            f"{row[name]:>{width}.{digits}f}" if name in row else f"{'–':>{width}}"
            for name, width, digits in (
                ("score", 9, 4),
                ("probability", 10, 3),
                ("deviation", 8, 2),
            )
        )
        lines.append(f"{row['pair']:<34}{figures}")
    if len(chosen) > SHOWN:
        lines.append(f"… and {len(chosen) - SHOWN:,} more (--out FILE, --json)")
    lines.append(f"{len(chosen):,} pairs are first in people's queue, in this order")
    if result["out"] is not None:
        lines.append(f"{result['out']}: {len(chosen):,} rows")
    return lines
