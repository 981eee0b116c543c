"""`keel diagnose`"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from keel.analysis.diagnosis.table import diagnose
from keel.analysis.diagnosis.values import Diagnosis
from keel.analysis.text import visible
from keel.cli.output import print_result
from keel.runs.reader import Run, load
from keel.types import KeelError

NOTHING = "no problems found"
WIDTH = 160


def run(arguments: argparse.Namespace) -> None:
    """Print what is wrong with a run."""
    opened = load(arguments.run)
    found = diagnose(opened)
    print_result(arguments, [one.as_dict() for one in found], lines(found, opened))


def lines(found: Sequence[Diagnosis], run: Run) -> Iterator[str]:
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
        text = f'"{visible(row["completion"], WIDTH)}"'
        place = f"step {sample.step}, completion {sample.row}, reward {reward}"
        yield visible(f"  sample  {place}: {text}")
