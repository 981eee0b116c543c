"""Bytes of a rank, in training and in sampling."""

from __future__ import annotations

from dataclasses import dataclass

from keel.analysis.scale.counts import ADAM_BYTES, activation_bytes, cache_bytes, parameters
from keel.analysis.scale.shapes import Hardware, ModelShape, Parallelism

GIB = 2**30
OVERHEAD = 2 * GIB
"""The device's context, workspaces and collectives' buffers: an assumption."""
LOGITS = 3 * 32 * 2**20
"""Chunks of logits and of their gradients, see `keel.models.head`."""
USABLE = 0.92
"""Of the memory, before fragmentation ends a run: an assumption."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a trainer by part, of an engine's device, and whether both fit.

    `cache` is what remains for keys and values in sampling. Devices that do both hold the trainer's
    states while they sample.
    """

    states: float
    gathered: float
    activations: float
    sampling: float
    cache: float
    limit: float

    @property
    def training(self) -> float:
        return self.states + self.gathered + self.activations + LOGITS + OVERHEAD

    @property
    def peak(self) -> float:
        """The larger of both sides, the cache apart."""
        return max(self.training, self.sampling)


def state_bytes(shape: ModelShape, spread: Parallelism) -> float:
    """Weights, gradients and moments of a rank: 16·N / (model · shards)."""
    return ADAM_BYTES * parameters(shape) / (spread.model * spread.shards)


def gathered_bytes(shape: ModelShape, spread: Parallelism) -> float:
    """Two layers gathered in bfloat16 and a layer's gradient in float32, of what FSDP shards:
    (2·2 + 4)·N / (L · model); none where nothing is sharded (then a bfloat16 copy by autocast,
    2·N / model)."""
    own = parameters(shape) / spread.model
    return 8 * own / shape.layers if spread.shards > 1 else 2 * own


def rank_memory(shape: ModelShape, machine: Hardware, spread: Parallelism) -> RankMemory:
    """The memory of a rank under a layout."""
    per_token = activation_bytes(
        shape.layers,
        shape.hidden,
        shape.query,
        shape.key_value,
        shape.mlp_of_token,
        working=2,
        saved=not spread.checkpointing,
    )
    states = state_bytes(shape, spread)
    weights = 2 * parameters(shape) / spread.tensor
    sampling = weights + OVERHEAD + (0.0 if spread.separate or spread.offloaded else states)
    limit = USABLE * machine.memory
    return RankMemory(
        states=states,
        gathered=gathered_bytes(shape, spread),
        activations=spread.micro_tokens * per_token / spread.model,
        sampling=sampling,
        cache=limit - sampling,
        limit=limit,
    )


def rows_that_fit(shape: ModelShape, spread: Parallelism, memory: RankMemory, tokens: float) -> int:
    """Sequences of `tokens` whose keys and values an engine holds: cache · tensor / bytes. Latent
    attention's cache is on each device in whole."""
    copies = 1 if shape.cached else spread.tensor
    return int(max(memory.cache, 0.0) * copies / (cache_bytes(shape) * tokens))


def fits(shape: ModelShape, spread: Parallelism, memory: RankMemory, longest: int) -> bool:
    """Training fits, and so does sampling with at least one sequence of the longest length."""
    return memory.training <= memory.limit and rows_that_fit(shape, spread, memory, longest) >= 1
