"""`keel check`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from keel.config.load import load_recipe

if TYPE_CHECKING:
    from keel.preflight.check import Report


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 where anything was found, else 0."""
    # A recipe that cannot be read is reported at once, before torch is imported.
    load_recipe(arguments.recipe, arguments.overrides)
    from keel.preflight.trial_process import TrialProcess

    # It imports torch while this process does.
    with TrialProcess() as process:
        from keel.preflight.check import check

        report = check(arguments.recipe, arguments.overrides, arguments.price, process=process)
    if arguments.json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        print("\n".join(lines(report)))
    return 1 if report.findings else 0


def lines(report: Report) -> Iterator[str]:
    """The report as text: what was looked at, what was found, what is predicted."""
    yield f"{report.recipe}: checked in {report.seconds:.1f} s, nothing is kept"
    for stage in report.stages:
        yield ""
        yield f"{stage.name} ({stage.kind})" if stage.name != stage.kind else stage.name
        width = max(map(len, stage.figures), default=0)
        for name, value in stage.figures.items():
            yield f"  {name:<{width}}  {value}"
        for what in stage.unseen:
            yield f"  not looked at: {what}"
        yield from _predicted(stage.predicted)
    if report.predicted.get("seconds") or "cost" in report.predicted:
        yield ""
        yield f"all stages: about {_time(report.predicted['seconds'])}" + _cost(report.predicted)
    yield ""
    if not report.findings:
        yield "nothing found"
    for number, one in enumerate(report.findings, start=1):
        yield f"{number}. {one.severity}: {one.what} [{one.kind}]"
        yield f"   {one.evidence}"
        yield f"   {one.key}: {one.fix}"


def _predicted(prediction: Mapping[str, Any]) -> Iterator[str]:
    """Memory, time and cost of a stage."""
    if "judge" in prediction:
        dollars = prediction["judge"]
        yield (
            f"  predicted cost of judges: about ${dollars['estimate']:.2f} "
            f"(${dollars['low']:.2f} to ${dollars['high']:.2f})"
        )
    if "memory" not in prediction:
        return
    memory = prediction["memory"]
    room = "" if memory["room"] is None else f" of {_size(memory['room'])} free"
    yield f"  predicted peak memory on {memory['device']}: {_size(memory['peak'])}{room}"
    width = max(map(len, memory["phases"]), default=0)
    for name, size in memory["phases"].items():
        yield f"    {name:<{width}}  {_size(size):>9}"
    parts_of_time = ", ".join(
        f"{name} {_time(seconds)}" for name, seconds in prediction["time"].items()
    )
    yield f"  predicted time: about {_time(prediction['seconds'])} ({parts_of_time})" + _cost(
        prediction
    )


def _size(bytes_: int) -> str:
    gib = bytes_ / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{bytes_ / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cost(prediction: Mapping[str, Any]) -> str:
    return f", cost {prediction['cost']:.2f}" if "cost" in prediction else ""
