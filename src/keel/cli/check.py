"""`keel check`"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from keel.analysis.cards import card
from keel.cli.main import print_result
from keel.config.load import load_recipe

if TYPE_CHECKING:
    from keel.preflight.check import Report


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 if anything was found, else 0."""
    # A recipe that cannot be read is reported at once, before torch is imported.
    load_recipe(arguments.recipe, arguments.overrides)
    if arguments.device is not None:
        card(arguments.device)
        from keel.preflight.check import check_card

        report = check_card(arguments.recipe, arguments.overrides, arguments.device)
        print_result(arguments, report.as_dict(), lines(report))
        return 1 if report.findings else 0
    from keel.preflight.trial import TrialProcess

    # It imports torch while this process does.
    with TrialProcess() as process:
        from keel.preflight.check import check

        report = check(arguments.recipe, arguments.overrides, arguments.price, process=process)
    print_result(arguments, report.as_dict(), lines(report))
    return 1 if report.findings else 0


def lines(report: Report) -> Iterator[str]:
    """The report as text: what was looked at, what was measured, what was found."""
    yield f"{report.recipe}: checked in {report.seconds:.1f} s, no run folder is kept"
    for stage in report.stages:
        yield ""
        yield f"{stage.name} ({stage.kind})" if stage.name != stage.kind else stage.name
        width = max(map(len, stage.figures), default=0)
        for name, value in stage.figures.items():
            yield f"  {name:<{width}}  {value}"
        for what in stage.skipped_checks:
            yield f"  not checked: {what}"
        if stage.judge:
            low, about, high = (stage.judge[name] for name in ("low", "estimate", "high"))
            yield f"  cost of judges: about ${about:.2f} (${low:.2f} to ${high:.2f})"
        yield from _counted(stage.budget)
        yield from _measured(stage.measured)
    if report.total["seconds"] or "cost" in report.total:
        yield ""
        yield f"all stages: at most about {_time(report.total['seconds'])}{_cost(report.total)}"
    yield ""
    if not report.findings:
        yield "nothing found"
    for number, one in enumerate(report.findings, start=1):
        yield f"{number}. {one.severity}: {one.what} [{one.kind}]"
        yield f"   {one.evidence}"
        yield f"   {one.key}: {one.fix}"


def _counted(budget: Mapping[str, Any]) -> Iterator[str]:
    """The counted memory of a stage on a card."""
    if not budget:
        return
    total, memory = _size(budget["total"]), _size(budget["memory"])
    yield f"  memory on {budget['card']}, counted: {total} of {memory}"
    items = {name: size for name, size in budget["items"].items() if size}
    width = max(map(len, items))
    for name, size in items.items():
        yield f"    {name:<{width}}  {_size(size):>9}"
    if budget["wanted_rows"]:
        rows = f"{budget['rows']} of {budget['wanted_rows']} sequences of {budget['longest']:,}"
        left = f"{'cache pages':<{width}}  {_size(budget['left']):>9}"
        yield f"    {left} left: {budget['cached_tokens']:,} tokens, {rows}"


def _measured(measured: Mapping[str, Any]) -> Iterator[str]:
    """Memory, time and cost of a stage."""
    if not measured:
        return
    memory, step = measured["memory"], measured["step"]
    room = "" if memory["room"] is None else f" of {_size(memory['room'])} free"
    yield f"  peak memory on {memory['device']}: {_size(memory['peak'])}{room}"
    width = max(map(len, memory["phases"]), default=0)
    for name, size in memory["phases"].items():
        yield f"    {name:<{width}}  {_size(size):>9}"
    parts = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in step.items())
    yield f"  a step of the longest sequences: {sum(step.values()):.2g} s ({parts})"
    yield f"  all steps: at most about {_time(measured['seconds'])}{_cost(measured)}"


def _size(bytes_: int) -> str:
    gib = bytes_ / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{bytes_ / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cost(figures: Mapping[str, Any]) -> str:
    return f", cost {figures['cost']:.2f}" if "cost" in figures else ""
