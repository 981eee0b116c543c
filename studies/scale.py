"""A cost model of a step on 8 to 1,024 GPUs: seconds, memory and dollars; see docs/scale.md.

    python -m studies.scale    # prints the two tables of the page

Dense models with gated MLPs. All efficiencies are assumed, none was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

FLOPS, BANDWIDTH, MEMORY, LINK, NETWORK, NODE = 989e12, 3.35e12, 80e9, 450e9, 50e9, 8
"""An H100 by its data sheet: bfloat16, bytes/s of memory, in a node and across nodes."""
COMPUTE, DECODE, READ, SEND = 0.40, 0.50, 0.60, 0.70
"""The shares reached: of the flop/s in a pass and in decoding, of a memory's and a link's bytes."""
STEP, HOP, ACROSS = 5e-3, 15e-6, 10
"""Seconds that a decode step adds, and an all-reduce; across nodes it takes ten times as long."""
OVERHEAD, LOGITS, USABLE = 2 * 2**30, 96 * 2**20, 0.92
"""Bytes of context and workspaces, of chunks of logits; the share of the memory that is usable."""
DOLLARS, WORTH, BINS = 2.0, 1.5, 512
"""An hour of a GPU; a doubling that gains less does not scale; points of a tail's integral."""


@dataclass(frozen=True)
class Model:
    """The widths of a decoder; `vectors` counts the biases and norms of a layer."""

    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    vocabulary: int
    vectors: int
    tied: bool = False

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with: n = V·H + L·H·(2q + 2k + 3F)."""
        layer = self.hidden * (2 * self.query + 2 * self.key_value + 3 * self.mlp)
        return self.vocabulary * self.hidden + self.layers * layer

    @property
    def weights(self) -> int:
        """N = n + L·vectors + H, and the input embedding if it is not tied to the head."""
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        return self.multiplied + embedding + self.layers * self.vectors + self.hidden

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values, in bfloat16."""
        return 2 * self.layers * 2 * self.key_value

    def flops(self, context: float) -> float:
        """Forward, of a token: 2·n + 4·L·q·context (arXiv:2001.08361)."""
        return 2 * self.multiplied + 4 * self.layers * self.query * context


MODELS = {
    "Qwen2.5-1.5B": Model(28, 1536, 1536, 256, 8960, 151_936, 2 * 1536 + 2048, tied=True),
    "Qwen2.5-7B": Model(28, 3584, 3584, 512, 18_944, 152_064, 2 * 3584 + 4608),
    "Llama-3.1-8B": Model(32, 4096, 4096, 1024, 14_336, 128_256, 8192),
    "Llama-3.1-70B": Model(80, 8192, 8192, 1024, 28_672, 128_256, 16_384),
    "Qwen3-32B": Model(64, 5120, 8192, 1024, 25_600, 151_936, 2 * 5120 + 256),
}
APPLIED = ("Qwen2.5-7B", "Llama-3.1-70B")


@dataclass(frozen=True)
class Work:
    """A step: sequences of `group` share a prompt; `mean` and `most` completion tokens. Packed, a
    pass reads a prompt once for its group."""

    sequences: int
    group: int
    prompt: int
    mean: float
    most: int
    scored: int = 1
    minibatches: int = 1
    packed: bool = True

    @property
    def tokens(self) -> float:
        prompts = self.sequences / (self.group if self.packed else 1)
        return self.sequences * self.mean + prompts * self.prompt

    @property
    def context(self) -> float:
        """The mean position of a token: prompt + Σ_t t·S_t / Σ_t S_t."""
        alive = survival(self.mean, self.most)
        return self.prompt + float((np.arange(self.most) * alive).sum() / alive.sum())


WORK = Work(sequences=2048, group=16, prompt=512, mean=4096, most=16_384)


@dataclass(frozen=True)
class Layout:
    """Trained on `trainers`: each copy of the model over `model` GPUs (`pipeline` of them stages),
    its states over `shards` more. Sampled by engines of `tensor` GPUs, of the same devices or of
    `separate` ones. `offloaded`: the states leave the GPU while it samples."""

    trainers: int
    samplers: int
    tensor: int = 1
    model: int = 1
    pipeline: int = 1
    shards: int = 1
    separate: bool = False
    recompute: bool = True
    micro: int = 16_384
    offloaded: bool = False


@lru_cache(maxsize=64)
def end_probability(mean: float, most: int) -> float:
    """The p for which geometric lengths cut at `most` have this mean: Σ_{t<most} (1 − p)^t."""
    low, high = 0.0, 1.0
    for _ in range(80):
        p = (low + high) / 2
        whole = most if p < 1e-12 else (1 - (1 - p) ** most) / p
        low, high = (p, high) if whole > mean else (low, p)
    return (low + high) / 2


@lru_cache(maxsize=64)
def survival(mean: float, most: int) -> np.ndarray:
    """S_t = (1 − p)^t, the share of sequences that sample a token at t."""
    return (1 - end_probability(mean, most)) ** np.arange(most, dtype=np.float64)


def memory(model: Model, layout: Layout) -> tuple[float, float]:
    """Bytes of a GPU that trains, and of one that samples without its cache: 16·N / (model·shards)
    of states, two gathered layers and a layer's gradient (8·N/L), activations; 2·N / tensor."""
    own = model.weights / layout.model
    states = 16 * own / layout.shards
    gathered = 8 * own / model.layers if layout.shards > 1 else 2 * own
    inside = 2 * model.hidden + 2 * model.query + 2 * model.key_value
    layer = 8 * model.hidden + 2 * (inside + 3 * model.mlp)
    token = model.layers * 4 * model.hidden + layer if layout.recompute else model.layers * layer
    training = states + gathered + layout.micro * token / layout.model + LOGITS + OVERHEAD
    kept = 0.0 if layout.separate or layout.offloaded else states
    return training, 2 * model.weights / layout.tensor + OVERHEAD + kept


def capacity(model: Model, layout: Layout, tokens: float) -> int:
    """Sequences of so many tokens that an engine's cache holds."""
    room = max(USABLE * MEMORY - memory(model, layout)[1], 0)
    return int(room * layout.tensor / (model.cache * tokens))


def decode_seconds(model: Model, tensor: int, rows: float, context: float) -> float:
    """A decode step by the roofline: max(bytes / bandwidth, operations / peak) + overheads."""
    read = (2 * model.multiplied + rows * context * model.cache) / tensor / (BANDWIDTH * READ)
    computed = rows * model.flops(context) / tensor / (FLOPS * DECODE)
    hop = HOP * (ACROSS if tensor > NODE else 1) if tensor > 1 else 0.0
    return max(read, computed) + STEP + 2 * hop * model.layers


def generation_seconds(
    model: Model, layout: Layout, work: Work, carried: bool
) -> tuple[float, float]:
    """Seconds of sampling, and of them the tail's. An engine has R rows and decodes C at once:
    (R − C)·mean/C steps of C rows, then Σ_t P_t·decode(C·S_t/P_t) with P_t = 1 − (1 − S_t)^C.
    `carried`: unfinished sequences go on under new weights, R·mean/C steps without a tail."""
    rows = max(work.sequences * layout.tensor / layout.samplers, 1.0)
    live = max(min(rows, float(capacity(model, layout, work.context))), 1.0)
    full = decode_seconds(model, layout.tensor, live, work.context)
    if carried:
        return rows * work.mean / live * full, 0.0
    places = (np.arange(BINS) + 0.5) / BINS * work.most
    alive = (1 - end_probability(work.mean, work.most)) ** places
    some = 1 - (1 - np.minimum(alive, 1)) ** live
    steps = (
        p * decode_seconds(model, layout.tensor, live * s / p, work.prompt + t)
        for s, p, t in zip(alive, some, places, strict=True)
        if p > 1e-9
    )
    last = float(sum(steps)) * work.most / BINS
    prefill = max(rows / work.group, 1) * work.prompt * model.flops(work.prompt / 2)
    prefill /= FLOPS * COMPUTE * layout.tensor
    waiting = (rows - live) * work.mean / live * full
    return prefill + waiting + last, max(last - work.mean * full, 0.0)


def pass_seconds(model: Model, layout: Layout, work: Work, learn: bool) -> float:
    """A pass over the batch: max(computation, communication), which FSDP overlaps. Computation is
    3 × forward to learn (4 × with recomputation), of ⌈x⌉ sequences where a copy has x; all-gathers
    move 2·N/model bytes, a reduce-scatter 4·N/model, a ring (s − 1)/s of that."""
    factor = (4 if layout.recompute else 3) if learn else 1
    copies = layout.trainers / layout.model
    each = work.sequences / work.minibatches / copies
    count = max(1, math.ceil(work.tokens / work.minibatches / copies / layout.micro))
    bubble = (layout.pipeline - 1) / (count + layout.pipeline - 1)
    computing = work.tokens * factor * model.flops(work.context)
    computing /= layout.trainers * FLOPS * COMPUTE
    computing *= math.ceil(each) / each / (1 - bubble)
    own = model.weights / layout.model
    moved = (8 if learn else 2) * own * (layout.shards - 1) / layout.shards
    link = SEND * (LINK if layout.model * layout.shards <= NODE else NETWORK)
    talking = moved * count * work.minibatches / link
    replicas = layout.trainers // (layout.model * layout.shards)
    if learn and replicas > 1:  # an all-reduce of each optimizer step
        reduced = 8 * own / layout.shards * (replicas - 1) / replicas * work.minibatches
        talking += reduced / (SEND * (LINK if layout.trainers <= NODE else NETWORK))
    return max(computing, talking)


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part; `tail` is a part of the generation."""

    layout: Layout
    generation: float
    tail: float
    score: float
    update: float

    @property
    def seconds(self) -> float:
        join = max if self.layout.separate else sum
        return float(join((self.generation, self.score + self.update)))


def step(model: Model, layout: Layout, work: Work, carried: bool = False) -> Step:
    """All parts but the sync, which is under a second; the optimizer moves 28 bytes a weight."""
    score = work.scored * pass_seconds(model, layout, work, learn=False)
    update = pass_seconds(model, layout, work, learn=True)
    held = layout.model * layout.shards * BANDWIDTH * READ
    update += work.minibatches * 28 * model.weights / held
    return Step(layout, *generation_seconds(model, layout, work, carried), score, update)


# ---------------------------------------------------------------- the tables


def published() -> Iterator[tuple[str, ...]]:
    """Steps of NeMo RL 0.4 (docs/about/performance-summary.md): prompts of 110 tokens, two scoring
    passes, optimizer batches of 512; half of the GPUs for each side where it is one step off."""
    for name, separate, mean, devices, tensor, train, pipeline, measured in (
        ("Llama-3.1-8B", False, 1060, 16, 1, 1, 2, 97.7),
        ("Llama-3.1-8B", True, 1129, 16, 1, 1, 2, 74.6),
        ("Qwen3-32B", False, 3206, 32, 4, 4, 4, 393.0),
        ("Qwen3-32B", True, 3207, 64, 4, 4, 4, 215.0),
    ):
        side = devices // 2 if separate else devices
        layout = Layout(side, side, tensor, train * pipeline, pipeline, separate=separate,
                        micro=4096, offloaded=True)  # fmt: skip
        work = Work(2048, 32, 110, mean, 4096 - 110, scored=2, minibatches=4, packed=False)
        predicted = step(MODELS[name], layout, work).seconds
        run = f"{devices} H100, 2,048 × {mean:,} of 4,096, {'one step off' if separate else 'sync'}"
        error = f"{100 * (predicted / measured - 1):+.0f} %"
        yield name, run, f"{measured:g}", f"{predicted:.0f}", error


def best(model: Model, devices: int, separate: bool) -> Step | None:
    """The fastest layout of FSDP that fits: powers of two of shards, engines of up to 32 GPUs."""
    parts = [(devices * (8 - k) // 8, devices * k // 8) for k in range(1, 8)]
    found = []
    for trainers, samplers in parts if separate else [(devices, devices)]:
        for tensor in (n for n in (1, 2, 4, 8, 16, 32) if samplers % n == 0):
            for shards in sorted({2**k for k in range(13) if trainers % 2**k == 0} | {trainers}):
                for recompute in (False, True):
                    layout = Layout(trainers, samplers, tensor, shards=shards, separate=separate,
                                    recompute=recompute, micro=WORK.prompt + WORK.most)  # fmt: skip
                    fits = memory(model, layout)[0] <= USABLE * MEMORY
                    if fits and capacity(model, layout, WORK.prompt + WORK.most):
                        found.append(step(model, layout, WORK, carried=separate))
    return min(found, key=lambda one: one.seconds, default=None)


def plans() -> Iterator[tuple[str, ...]]:
    """The fastest layouts that fit 8, 64 and 1,024 GPUs, and how far doubling them pays."""
    for name in APPLIED:
        for separate in (False, True):
            steps = {n: best(MODELS[name], n, separate) for n in (2**k for k in range(3, 12))}
            known = {n: one.seconds for n, one in steps.items() if one is not None}
            limit = next((n for n in known if known[n] / known.get(2 * n, math.inf) < WORTH), 0)
            for devices in (8, 64, 1024):
                if (one := steps[devices]) is None:
                    continue
                first = (name, f"{devices:,}", "async" if separate else "sync")
                layout = f"{one.layout.trainers}+{one.layout.samplers}, " if separate else ""
                layout += f"s{one.layout.shards}, t{one.layout.tensor}"
                layout += ", recompute" if one.layout.recompute else ""
                numbers = (one.generation, one.tail, one.score + one.update, one.seconds,
                           devices * one.seconds / 3.6 * DOLLARS, limit)  # fmt: skip
                yield *first, layout, *(f"{value:,.0f}" for value in numbers)


if __name__ == "__main__":
    for rows in (published(), plans()):
        print(*(f"| {' | '.join(row)} |" for row in rows), "", sep="\n")
