"""The fastest layout of a step on a number of devices, and where more devices stop to help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keel.analysis.scale.memory import RankMemory, fits, rank_memory
from keel.analysis.scale.shapes import Efficiency, Hardware, ModelShape, Parallelism, Workload
from keel.analysis.scale.step import StepCost, step_cost

TENSOR = (1, 2, 4, 8, 16, 32)
MODEL = (8, 16, 32, 64)
"""Devices of a copy of the model, where sharding alone does not fit (tensor or expert parallel)."""
PORTIONS = (1, 2, 3, 4, 5, 6, 7)
"""Eighths of the devices that sample, where they are separate."""
MICRO = (1, 2, 4)
"""Longest sequences that a micro-batch may hold."""
WORTH = 1.5
"""A doubling of the devices that makes steps less than this faster does not scale."""


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """A layout with its memory and seconds; `fits` is false where no layout does, and then the
    layout is the one that needs the least memory."""

    spread: Parallelism
    memory: RankMemory
    cost: StepCost
    fits: bool


def layouts(devices: int, work: Workload, separate: bool, model: int = 1) -> Iterator[Parallelism]:
    """Data parallelism sharded over powers of two (FSDP2), engines of up to 32 devices, and copies
    of the model over `model` devices."""
    splits = [(devices, devices)]
    if separate:
        splits = [(devices - devices * k // 8, devices * k // 8) for k in PORTIONS]
    for trainers, samplers in splits:
        for tensor in TENSOR:
            if samplers % tensor or trainers % model:
                continue
            for shards in _shards(trainers // model):
                for micro in MICRO:
                    for checkpointing in (False, True):
                        yield Parallelism(
                            trainers,
                            samplers,
                            tensor=tensor,
                            model=model,
                            shards=shards,
                            separate=separate,
                            checkpointing=checkpointing,
                            micro_tokens=micro * work.longest,
                        )


def _shards(trainers: int) -> list[int]:
    """Powers of two that divide the trainers, and all of them."""
    return sorted({2**k for k in range(13) if trainers % 2**k == 0} | {trainers})


def best_plan(
    shape: ModelShape,
    machine: Hardware,
    rate: Efficiency,
    devices: int,
    work: Workload,
    separate: bool,
    models: Sequence[int] = (1, *MODEL),
) -> ScalePlan:
    """The layout with the fewest seconds among those that fit, of the first of `models` with one.

    Asynchronous steps carry unfinished sequences on.
    """
    tight: list[tuple[float, Parallelism]] = []
    for model in models:
        found: list[tuple[float, Parallelism]] = []
        # Of a step, sampling depends on these alone: it is integrated once for all with them.
        sampled: dict[tuple[int, int, int], StepCost] = {}
        for spread in layouts(devices, work, separate, model):
            memory = rank_memory(shape, machine, spread)
            if not fits(shape, spread, memory, work.longest):
                tight.append((memory.peak, spread))
                continue
            key = (spread.samplers, spread.tensor, spread.shards)
            known = sampled.get(key)
            cost = step_cost(shape, machine, rate, spread, work, separate, known)
            sampled.setdefault(key, cost)
            found.append((cost.seconds, spread))
        if found:
            break
    spread = min(found or tight, key=lambda one: one[0])[1]
    memory = rank_memory(shape, machine, spread)
    cost = step_cost(shape, machine, rate, spread, work, separate)
    return ScalePlan(spread, memory, cost, bool(found))


@dataclass(frozen=True, slots=True)
class Limit:
    """The devices up to which each doubling is worth it; the next doubling's gain, and the part of
    a step that is largest there and at twice as many."""

    first: int
    devices: int
    gain: float
    part: str


def scaling_limit(
    shape: ModelShape,
    machine: Hardware,
    rate: Efficiency,
    work: Workload,
    separate: bool,
    most: int = 4096,
) -> Limit | None:
    """Where doubling the devices on one batch stops to make steps `WORTH` times as fast; None where
    nothing fits. A gain of 0 says that the search ended at `most`."""
    devices, first, last = 8, 0, None
    while devices <= most:
        plan = best_plan(shape, machine, rate, devices, work, separate)
        if plan.fits:
            first = first or devices
            if last is not None and (gain := last.cost.seconds / plan.cost.seconds) < WORTH:
                return Limit(first, devices // 2, gain, largest_part(plan.cost))
            last = plan
        devices *= 2
    return None if last is None else Limit(first, devices // 2, 0.0, largest_part(last.cost))


def largest_part(cost: StepCost) -> str:
    """The part with the most seconds; of generation, the tail is a part of its own."""
    parts = {
        "decoding": cost.generation - cost.tail,
        "tail": cost.tail,
        "reward": cost.reward,
        "scoring": cost.score,
        "update": cost.update,
        "sync": cost.sync,
    }
    return max(parts, key=lambda name: parts[name])
