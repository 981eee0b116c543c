"""How fast a step was: tokens a second, the share of the card's peak, the memory of its phases.

They depend on the machine, so they are recorded with the timings, not with the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keel.analysis.cards import card_named
from keel.analysis.costs import attention_pairs, mfu
from keel.learn.batch import Batch
from keel.models.policy import Policy


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step did: completion `tokens` (of a stage that samples none, those of its examples),
    the seconds of `generation` (0: not known, or none), and the `operations` of its update with the
    `peak` of the card, in operations a second; None where the peak is not known."""

    tokens: float
    generation: float = 0.0
    operations: float = 0.0
    peak: float | None = None


def speeds_of(work: StepWork, seconds: float, update: float) -> dict[str, float]:
    """Tokens a second of the whole step (`seconds`, evaluation aside), of generation and of the
    `update`, and the model-flops utilisation of the update; what is not known is left out."""
    found = {}
    for name, spent in (("step", seconds), ("generation", work.generation), ("update", update)):
        if spent > 0 and work.tokens:
            found[f"speed/{name}"] = work.tokens / spent
    if work.peak and work.operations and update > 0:
        found["mfu/update"] = mfu(work.operations, update, work.peak)
    return found


def peak_of(device: torch.device) -> float | None:
    """Operations a second in bfloat16 of all cards that train; None on a CPU, or if unknown."""
    if device.type != "cuda":
        return None
    seen = torch.cuda.get_device_properties(device)
    peak = card_named(seen.name, seen.total_memory).peak
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    count = torch.distributed.get_world_size() if distributed else 1
    return None if peak is None else peak * count


def operations_of(policy: Policy, batch: Batch, moving: Sequence[int]) -> float:
    """Floating-point operations of the policy on a batch once: forward and backward on the
    sequences `moving`, which have a gradient, forward alone on the others.

    A prompt that a sequence shares with the one before counts once, if both are on the same side.
    """
    inside = frozenset(moving)
    shape, rank = policy.shape, policy.rank
    total = 0.0
    for side in (True, False):
        places = [i for i in range(batch.sequences) if (i in inside) is side]
        lengths = [batch.input_lengths[i] for i in places]
        common = batch.shared or (0,) * batch.sequences
        shared = [common[i] if i and ((i - 1) in inside) is side else 0 for i in places]
        tokens = sum(lengths) - sum(shared)
        extra = batch.extra_lengths or (0,) * batch.sequences
        scored = sum(batch.lengths[i] + extra[i] for i in places)
        pairs = attention_pairs(lengths, shared)
        if side:
            total += shape.update(tokens, pairs, scored, rank)
        else:
            total += shape.forward(tokens, pairs, scored)
    return total


class CudaMemory:
    """The peak of torch's allocations on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)
