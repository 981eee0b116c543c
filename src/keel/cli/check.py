"""`keel check`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from keel.config.load import load_recipe
from keel.types import KeelError

if TYPE_CHECKING:
    from keel.config.schema import Recipe
    from keel.preflight.check import Report
    from keel.preflight.device_estimate import DeviceEstimate, StageEstimate


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 where anything was found, else 0."""
    # A recipe that cannot be read is reported at once, before torch is imported.
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.device is not None:
        return _estimate(recipe, arguments)
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


def _estimate(recipe: Recipe, arguments: argparse.Namespace) -> int:
    """Print the estimate for a device that is not here; 1 where it says that a stage does not fit.

    Raises KeelError for a --price where no stage has an estimate of its time.
    """
    from keel.preflight.device_estimate import estimate

    found = estimate(recipe, arguments.device, arguments.price)
    if arguments.price is not None and all(stage.time is None for stage in found.stages):
        why = found.stages[-1].untimed
        raise KeelError(f"--price: there is no estimate of time ({why}): drop it")
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        print("\n".join(device_lines(found)))
    return 0 if found.fits else 1


def device_lines(found: DeviceEstimate) -> Iterator[str]:
    """The estimate as a table."""
    yield (
        f"estimate for {found.device} ({_size(found.memory)}), computed from the config of a model "
        f"of {found.parameters / 1e9:.2f} B weights; nothing was loaded or measured"
    )
    for stage in found.stages:
        verdict = "fits" if stage.peak <= found.memory else "does not fit"
        yield ""
        each = "" if stage.ranks == 1 else f" on each of {stage.ranks} ranks"
        yield f"{stage.name}: about {_size(stage.peak)} of {_size(found.memory)}{each}: {verdict}"
        width = max(len(part.name) for part in stage.parts)
        for part in sorted(stage.parts, key=lambda part: -part.bytes):
            when = "" if part.when == "always" else f"  while {part.when}"
            yield f"  {part.name:<{width}}  {_size(part.bytes):>9}{when}"
        yield from _estimated_time(stage)


def _estimated_time(stage: StageEstimate) -> Iterator[str]:
    """Time and price of a stage by the cost model."""
    time = stage.time
    if time is None:
        yield f"  no time: {stage.untimed}"
        return
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.parts.items())
    cost = "" if time.cost is None else f", cost {time.cost:.2f}"
    yield f"  predicted step: {time.step:.3g} s ({parts})"
    yield f"  predicted time on {time.devices} GPUs: about {_time(time.total)}{cost}"
    yield (
        f"  assumed: completions of {time.mean:g} tokens in the mean, prompts of {time.prompt}; "
        "see docs/scale.md for its errors"
    )


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
        yield from _ranks(prediction)
        return
    memory = prediction["memory"]
    room = "" if memory["room"] is None else f" of {_size(memory['room'])} free"
    yield f"  predicted peak memory on {memory['device']}: {_size(memory['peak'])}{room}"
    width = max(map(len, memory["phases"]), default=0)
    for name, size in memory["phases"].items():
        yield f"    {name:<{width}}  {_size(size):>9}"
    yield from _ranks(prediction)
    parts_of_time = ", ".join(
        f"{name} {_time(seconds)}" for name, seconds in prediction["time"].items()
    )
    yield f"  predicted time: about {_time(prediction['seconds'])} ({parts_of_time})" + _cost(
        prediction
    )


def _ranks(prediction: Mapping[str, Any]) -> Iterator[str]:
    """The memory of each rank, where there are several."""
    if "ranks" not in prediction:
        return
    ranks = prediction["ranks"]
    yield (
        f"  estimated memory of each of {ranks['processes']} ranks: {_size(ranks['peak'])}, "
        f"{_size(ranks['processes'] * ranks['peak'])} together; what is measured is one process"
    )
    width = max(map(len, ranks["parts"]))
    for name, size in ranks["parts"].items():
        yield f"    {name:<{width}}  {_size(size):>9}"


def _size(bytes_: int) -> str:
    gib = bytes_ / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{bytes_ / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cost(prediction: Mapping[str, Any]) -> str:
    return f", cost {prediction['cost']:.2f}" if "cost" in prediction else ""
