"""Seconds of a step by part, synchronous and asynchronous."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keel.analysis.scale.counts import (
    cache_bytes,
    forward_flops,
    parameters,
    pipeline_bubble,
    ring_bytes,
    training_flops,
    weight_bytes_read,
)
from keel.analysis.scale.lengths import any_alive, end_probability, mean_position
from keel.analysis.scale.memory import rank_memory, rows_that_fit
from keel.analysis.scale.shapes import Efficiency, Hardware, ModelShape, Parallelism, Workload

BINS = 512
"""Points at which the integral over a tail's decode steps is taken."""
OPTIMIZER_BYTES = 28
"""Adam reads 16 bytes of a float32 parameter and writes 12."""
ACROSS = 10
"""How much longer an all-reduce's latency is across nodes than within one."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step. `tail` is the part of `generation` that engines lose to their longest
    sequences: what it takes longer than the same tokens with all rows busy."""

    generation: float
    tail: float
    reward: float
    score: float
    update: float
    sync: float
    separate: bool
    devices: int
    tokens: float

    @property
    def seconds(self) -> float:
        """generation + reward + score + update + sync; where both sides have devices of their own,
        max(generation + reward, score + update) + sync."""
        sampled, learned = self.generation + self.reward, self.score + self.update
        return (max if self.separate else _sum)(sampled, learned) + self.sync

    @property
    def tokens_per_device(self) -> float:
        """Tokens that one pass over the batch reads, over seconds and devices."""
        return self.tokens / self.seconds / self.devices

    def price(self, dollars: float, steps: int = 1000) -> float:
        """Dollars of `steps` steps: devices · hours · dollars of a device hour."""
        return self.devices * self.seconds * steps / 3600 * dollars


def _sum(first: float, second: float) -> float:
    return first + second


def decode_seconds(
    shape: ModelShape,
    machine: Hardware,
    rate: Efficiency,
    tensor: int,
    rows: float,
    context: float,
    size: int = 2,
) -> float:
    """A decode step of `rows` sequences on `tensor` devices; the roofline (Williams et al. 2009)

    max((weights + rows·context·cache) / (tensor·bandwidth), rows·flops / (tensor·peak)) + overheads

    with efficiencies on bandwidth and peak. Latent attention's cache is read whole by each device.
    """
    cache = rows * context * cache_bytes(shape, size)
    read = weight_bytes_read(shape, rows, size) / tensor
    read += cache / (1 if shape.cached else tensor)
    flops = rows * forward_flops(shape, context) / tensor
    roof = max(read / (machine.bandwidth * rate.bandwidth), flops / (machine.flops * rate.decode))
    hop = rate.hop * (ACROSS if tensor > machine.node else 1) if tensor > 1 else 0.0
    return roof + rate.step_overhead + shape.layers * (rate.layer_overhead + 2 * hop)


def generation_seconds(
    shape: ModelShape,
    machine: Hardware,
    rate: Efficiency,
    work: Workload,
    engines: float,
    tensor: int,
    capacity: int,
    size: int = 2,
) -> tuple[float, float]:
    """Seconds of sampling a batch, and of them the tail's.

    An engine has R = sequences / engines rows and decodes C = min(R, capacity) at once. While
    others wait it takes (R − C)·mean / C steps of C rows; then, the geometric law having no memory,
    Σ_t P_t·decode(C·S_t / P_t) with S_t the survival and P_t = 1 − (1 − S_t)^C. Prompts enter
    first: one pass a group, 2·N flops a token.
    """
    rows = max(work.sequences / engines, 1.0)
    live = max(min(rows, float(capacity)), 1.0)
    context = work.prompt + mean_position(work.mean, work.most)
    full = decode_seconds(shape, machine, rate, tensor, live, context, size)
    waiting = (rows - live) * work.mean / live * full
    places = (np.arange(BINS) + 0.5) / BINS * work.most
    alive = (1.0 - end_probability(work.mean, work.most)) ** places
    some = any_alive(alive, live)
    steps = [
        p * decode_seconds(shape, machine, rate, tensor, live * s / p, work.prompt + t, size)
        for s, p, t in zip(alive, some, places, strict=True)
        if p > 1e-9
    ]
    last = float(sum(steps)) * work.most / BINS
    share = 1.0 if not shape.experts else rate.sparse
    prompts = max(rows / work.group, 1.0) * work.prompt
    prefill = prompts * forward_flops(shape, work.prompt / 2)
    prefill /= machine.flops * rate.forward * share * tensor
    return prefill + waiting + last, max(last - work.mean * full, 0.0)


def carried_generation_seconds(
    shape: ModelShape,
    machine: Hardware,
    rate: Efficiency,
    work: Workload,
    engines: float,
    tensor: int,
    capacity: int,
    size: int = 2,
) -> float:
    """Sampling where unfinished sequences go on under new weights: (R·mean / C)·decode(C), without
    a tail."""
    rows = max(work.sequences / engines, 1.0)
    live = max(min(rows, float(capacity)), 1.0)
    context = work.prompt + mean_position(work.mean, work.most)
    return (
        rows * work.mean / live * decode_seconds(shape, machine, rate, tensor, live, context, size)
    )


def staleness(longest: float, decode_step: float, step_seconds: float) -> int:
    """Versions of the policy that the oldest token of a batch may lie behind where generation runs
    ahead: 1 + ⌊longest·decode / step⌋, with `longest` the expected maximum of the lengths."""
    return 1 + int(longest * decode_step / step_seconds)


# ---------------------------------------------------------------- learning


def granularity(work: Workload, spread: Parallelism) -> float:
    """How much longer the fullest rank works than the mean: ⌈x⌉ / x with x = sequences of an
    optimizer step for each copy of the model."""
    each = work.sequences / work.minibatches / (spread.trainers / spread.model)
    return math.ceil(each) / each


def micro_batches(work: Workload, spread: Parallelism) -> float:
    """Micro-batches of a rank in an optimizer step: ⌈tokens / (copies · micro_tokens)⌉."""
    each = work.tokens / work.minibatches / (spread.trainers / spread.model)
    return max(1.0, math.ceil(each / spread.micro_tokens))


def trainer_link(machine: Hardware, spread: Parallelism) -> float:
    """Bytes/s of the slowest link that a shard group uses."""
    return machine.link if spread.model * spread.shards <= machine.node else machine.network


def pass_seconds(
    shape: ModelShape,
    machine: Hardware,
    rate: Efficiency,
    spread: Parallelism,
    work: Workload,
    learn: bool,
) -> float:
    """A pass over the batch: max(computation, communication), which FSDP overlaps.

    computation = tokens·flops / (trainers·peak·efficiency·(1 − bubble)) · granularity
    + micro-batches·overhead;
    communication = micro-batches · (all-gathers of 2·N/model bytes: one forward, one backward; and
    a reduce-scatter of 4·N/model) / link (FSDP: Zhao et al., arXiv:2304.11277), and where there are
    replicas an all-reduce of 4·N / (model·shards) in each optimizer step.
    """
    context = work.prompt + mean_position(work.mean, work.most)
    share = rate.sparse if shape.experts else 1.0
    if learn:
        flops, reached = training_flops(shape, context, spread.checkpointing), rate.train
    else:
        flops, reached = forward_flops(shape, context), rate.forward
    # A micro-batch of a pipeline holds at least one sequence.
    count = micro_batches(work, spread)
    bubble = pipeline_bubble(spread.pipeline, count)
    computing = work.tokens * flops / (spread.trainers * machine.flops * reached * share)
    computing *= granularity(work, spread) / (1.0 - bubble)
    computing += count * work.minibatches * rate.pass_overhead
    own = parameters(shape) / spread.model
    moved = ring_bytes(2 * own, spread.shards) * (2 if learn else 1)
    moved += ring_bytes(4 * own, spread.shards) if learn else 0.0
    talking = moved * count * work.minibatches / (trainer_link(machine, spread) * rate.network)
    replicas = spread.trainers // (spread.model * spread.shards)
    if learn and replicas > 1:
        reduced = 2 * ring_bytes(4 * own / spread.shards, replicas)
        inside = spread.trainers <= machine.node
        link = machine.link if inside else machine.network
        talking += reduced * work.minibatches / (link * rate.network)
    return max(computing, talking)


def optimizer_seconds(
    shape: ModelShape, machine: Hardware, rate: Efficiency, spread: Parallelism
) -> float:
    """An optimizer step: 28·N / (model·shards) bytes of memory."""
    own = parameters(shape) / (spread.model * spread.shards)
    return OPTIMIZER_BYTES * own / (machine.bandwidth * rate.bandwidth)


def sync_seconds(
    shape: ModelShape, machine: Hardware, rate: Efficiency, spread: Parallelism
) -> float:
    """New weights into the engines: the 2·N / tensor bytes that each device receives, over the
    slowest link; devices that also train hold 1 / (model·shards) of them already."""
    kept = 0.0 if spread.separate else 1.0 / (spread.model * spread.shards)
    received = 2 * parameters(shape) / spread.tensor * (1.0 - kept)
    inside = spread.devices <= machine.node or (
        not spread.separate and spread.model * spread.shards <= machine.node
    )
    link = machine.link if inside else machine.network
    return received / (link * rate.network)


def step_cost(
    shape: ModelShape,
    machine: Hardware,
    rate: Efficiency,
    spread: Parallelism,
    work: Workload,
    carried: bool = False,
    sampled: StepCost | None = None,
) -> StepCost:
    """All parts of a step; `carried`: unfinished sequences go on under new weights. A step that is
    `sampled` in the same way saves the work of its generation."""
    memory = rank_memory(shape, machine, spread)
    context = work.prompt + mean_position(work.mean, work.most)
    capacity = rows_that_fit(shape, spread, memory, context)
    engines = spread.samplers / spread.tensor
    batch = (shape, machine, rate, work, engines, spread.tensor, capacity)
    if sampled is not None:
        generation, tail = sampled.generation, sampled.tail
    elif carried:
        generation, tail = carried_generation_seconds(*batch), 0.0
    else:
        generation, tail = generation_seconds(*batch)
    passes = (shape, machine, rate, spread, work)
    update = pass_seconds(*passes, learn=True)
    update += work.minibatches * optimizer_seconds(shape, machine, rate, spread)
    return StepCost(
        generation=generation,
        tail=tail,
        reward=work.reward,
        score=work.scored * pass_seconds(*passes, learn=False),
        update=work.epochs * update,
        sync=sync_seconds(shape, machine, rate, spread),
        separate=spread.separate,
        devices=spread.devices,
        tokens=work.tokens,
    )
