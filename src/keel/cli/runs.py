"""`keel runs diff`, `diagnose`, `report` and `view`: what run folders hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.analysis.diagnosis.table import Diagnosis, diagnose
from keel.analysis.text import visible
from keel.cli.main import print_result
from keel.runs.diff import Difference, FirstDifference, Point, diff
from keel.runs.reader import Run, load
from keel.runs.values import Change
from keel.types import KeelError

SHOWN = 6
"""Differing values that are printed."""
WIDTH, SAMPLE = 120, 160
"""Characters of a differing value, and of a completion that shows a problem."""
DIFFERENT = 1
NOTHING = "no problems found"


def run_report(arguments: argparse.Namespace) -> None:
    """Write a run's report; print where it is."""
    from keel.view.report import write_report

    out = None if arguments.out is None else Path(arguments.out)
    path = write_report(arguments.run, out, arguments.price)
    print_result(arguments, {"report": str(path)}, [str(path)])


def run_view(arguments: argparse.Namespace) -> None:
    """Serve the pages of runs until interrupted."""
    from keel.view.server import serve

    serve(
        arguments.folders,
        host=arguments.host,
        port=arguments.port,
        price=arguments.price,
        browser=not arguments.no_browser,
    )


# ---------------------------------------------------------------- runs diff


def run_runs_diff(arguments: argparse.Namespace) -> int:
    """Compare two runs; returns 0 if they are the same and 1 if they differ."""
    found = diff(arguments.a, arguments.b)
    print_result(arguments, found.as_dict(), _difference(found))
    return 0 if found.same else DIFFERENT


def _difference(found: Difference) -> Iterator[str]:
    recipe = [f"{c.name} ({_value(c.a)}, {_value(c.b)})" for c in found.recipe]
    yield f"{found.a} and {found.b}: same recipe" + (f" except {_cut(recipe)}" if recipe else "")
    if found.environment:
        versions = _cut([_change(change) for change in found.environment])
        yield f"different environments: {versions}".replace("versions.", "")
    if found.inputs:
        yield f"different content of {_cut([change.name for change in found.inputs])}"
    yield _no_difference(found) if found.first is None else _first(found.first)
    if found.reach_a == found.reach_b:
        yield f"both end at {_point(found.reach_a)}"
    else:
        yield f"{found.a} ends at {_point(found.reach_a)}, {found.b} at {_point(found.reach_b)}"


def _no_difference(found: Difference) -> str:
    if not found.stages:
        return "nothing to compare: their first stages differ"
    if any(change.name == "stages" for change in found.recipe):
        return f"no difference in the stages that both have: {', '.join(found.stages)}"
    steps = "in any step" if found.reach_a == found.reach_b else "in the steps of both"
    plural = "" if found.checkpoints == 1 else "s"
    return f"no difference {steps}, nor in {found.checkpoints} checkpoint{plural} that both have"


def _first(first: FirstDifference) -> str:
    change = first.change
    head = f"first difference: {first.stage} step {first.step}, {first.file}"
    if first.prompt_id is None:
        return f"{head}: {_change(change)}"
    place = ", token ".join(map(str, change.at))
    return f"{head}, sequence {place} (prompt {first.prompt_id}): {_change(replace(change, at=()))}"


def _change(change: Change) -> str:
    place = str(list(change.at)) if change.at else ""
    by = "" if change.difference is None else f" (by {change.difference:.3g})"
    return f"{change.name}{place} {_value(change.a)} against {_value(change.b)}{by}"


def _cut(parts: Sequence[str]) -> str:
    more = [f"and {len(parts) - SHOWN} more"] if len(parts) > SHOWN else []
    return ", ".join([*parts[:SHOWN], *more])


def _point(point: Point | None) -> str:
    return "no step" if point is None else f"{point.stage} step {point.step}"


def _value(value: Any) -> str:
    """A value on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= WIDTH else text[:WIDTH] + "…"


# ---------------------------------------------------------------- diagnose


def run_diagnose(arguments: argparse.Namespace) -> None:
    """Print what is wrong with a run."""
    opened = load(arguments.run)
    found = diagnose(opened)
    print_result(arguments, [one.as_dict() for one in found], _problems(found, opened))


def _problems(found: Sequence[Diagnosis], run: Run) -> Iterator[str]:
    """A block for each diagnosis, or one line if there is none."""
    if not found:
        yield NOTHING
    for at, one in enumerate(found):
        if at:
            yield ""
        yield visible(
            f"{one.severity}: {one.title} ({one.condition}; {one.stage}, steps {one.first_step} to "
            f"{one.last_step})"
        )
        for line in one.evidence:
            yield visible(f"  - {line}")
        yield from _samples(one, run)
        for line in one.causes:
            yield visible(f"  cause?  {line}")
        for change in one.changes:
            yield visible(f"  change  {change}")


def _samples(one: Diagnosis, run: Run) -> Iterator[str]:
    """The completions that show it, each on a line, if they can be read."""
    for sample in one.samples:
        try:
            row = run.rollouts(sample.step, one.stage)[sample.row]
        except (KeelError, IndexError):
            continue
        reward = "-" if row["reward"] is None else f"{row['reward']:.3g}"
        text = f'"{visible(row["completion"], SAMPLE)}"'
        place = f"step {sample.step}, completion {sample.row}, reward {reward}"
        yield visible(f"  sample  {place}: {text}")
