"""The processes that share an update: each computes some sequences of the batch.

Every rank holds the whole batch and the same results; what is shared is the models' work. As the
weights of the loss are set before a batch is cut, the gradient is the sum over the ranks, and no
result depends on their number but by rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from keel.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process's number among the `count` of its group."""

    number: int
    count: int
    group: Any = None

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in order. All ranks have to call; tensors go over the CPU."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found


ONE = Ranks(0, 1)
"""A process alone."""


def spans(costs: Sequence[int], count: int) -> list[range]:
    """`count` ranges of neighbours whose costs are nearly equal; some are empty where few are left.

    Neighbours stay together, since completions of one prompt share its computation. A range ends
    where the sum so far is nearest to its share, so no sum is further from the mean than the
    largest cost.
    """
    total, ends, done = sum(costs), [], 0
    place = 0
    for part in range(1, count):
        target = total * part / count
        while place < len(costs) and abs(done + costs[place] - target) <= abs(done - target):
            done += costs[place]
            place += 1
        ends.append(place)
    bounds = [0, *ends, len(costs)]
    return [range(bounds[at], bounds[at + 1]) for at in range(count)]


def prompt_units(prompts: Sequence[Prompt], max_tokens: int, count: int) -> list[list[int]]:
    """`count` lists of places of prompts, for which sampling costs nearly the same.

    All occurrences of a prompt are in one, since their random numbers depend on their order.
    """
    costs: Counter[str] = Counter()
    for prompt in prompts:
        costs[prompt.id] += len(prompt.tokens) + max_tokens
    ids = list(costs)
    units = []
    for span in spans(list(costs.values()), count):
        own = {ids[at] for at in span}
        units.append([at for at, prompt in enumerate(prompts) if prompt.id in own])
    return units
