"""What was seen and done: episodes, or parts of them, end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from keel.learn.batch import Actions, Estimates, per_action


@dataclass(frozen=True, eq=False)
class Experience(Actions):
    """Sequences of actions with the observations they answered."""

    observation_NO: Float[Tensor, "N O"]
    action_N: Tensor
    """Numbers (N) or vectors (N, D)."""

    def minibatch(self, indices: Sequence[int], *, steps: bool) -> Experience:
        """These sequences; with `steps`, these actions, each as a sequence of its own."""
        if not steps:
            return self.select(indices)
        index_K = torch.tensor(list(indices))
        lengths = (1,) * len(index_K)
        return replace(self, lengths=lengths, groups_S=index_K, **per_action(self, index_K))

    def split(
        self, estimates: Estimates, count: int, rng: np.random.Generator, *, steps: bool
    ) -> Iterator[tuple[Experience, Estimates]]:
        """`count` mini-batches in random order, of whole sequences or of single steps."""
        if count == 1:
            yield self, estimates
            return
        order = rng.permutation(sum(self.lengths) if steps else self.sequences)
        for chosen in filter(len, np.array_split(order, count)):
            index_K = torch.from_numpy(chosen) if steps else self.action_index(chosen.tolist())
            yield self.minibatch(chosen.tolist(), steps=steps), estimates.select(index_K)
