"""What was seen and done: episodes, or parts of them, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from keel.learn.actions import Actions


@dataclass(frozen=True, eq=False)
class Experience(Actions):
    """Sequences of actions with the observations they answered."""

    observation_NO: Float[Tensor, "N O"]
    action_N: Tensor
    """Numbers (N) or vectors (N, D)."""

    def select(self, indices: npt.NDArray[np.int64], *, steps: bool) -> Experience:
        """The experience of these sequences; with `steps`, of these actions, each for itself."""
        index_N = torch.from_numpy(indices if steps else self._places(indices))
        per_action = {
            f.name: getattr(self, f.name)[index_N]
            for f in fields(self)
            if "_N" in f.name and getattr(self, f.name) is not None
        }
        if steps:
            return replace(self, lengths=(1,) * len(index_N), groups_S=index_N, **per_action)
        chosen = torch.from_numpy(indices)
        lengths = tuple(self.lengths[i] for i in indices)
        return replace(self, lengths=lengths, groups_S=self.groups_S[chosen], **per_action)

    def parts(self, count: int, rng: np.random.Generator, *, steps: bool) -> Iterator[Experience]:
        """The experience in `count` parts, in random order; as it is where one is asked for."""
        if count == 1:
            yield self
            return
        order = rng.permutation(len(self.engine_log_prob_N) if steps else self.sequences)
        for chosen in np.array_split(order, count):
            if len(chosen):
                yield self.select(chosen, steps=steps)

    def _places(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        ends = np.cumsum(self.lengths)
        spans = [np.arange(ends[i] - self.lengths[i], ends[i]) for i in indices]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
