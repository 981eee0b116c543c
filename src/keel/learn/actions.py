"""What the loss reads of the actions taken, whatever they were: tokens, or moves in a game."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Actions:
    """Sequences (S) of actions (N), end to end, with no padding.

    `lengths` says how many actions each sequence has, `groups_S` which start it has in common with
    others. Per action: log-probabilities under the policy as it was (`old_log_prob_N`, None on an
    on-policy step with one update, where the current ones stand for them), under the engine that
    drew it, under the reference; values and returns where a value model is trained; advantages, and
    whether a reward spoke at all (None: of all of them); and the weights, which are set once for an
    optimizer batch.
    """

    lengths: tuple[int, ...]
    groups_S: Int[Tensor, " S"]
    engine_log_prob_N: Float[Tensor, " N"]
    old_log_prob_N: Float[Tensor, " N"] | None = None
    reference_log_prob_N: Float[Tensor, " N"] | None = None
    value_N: Float[Tensor, " N"] | None = None
    return_N: Float[Tensor, " N"] | None = None
    advantage_N: Float[Tensor, " N"] | None = None
    present_N: Bool[Tensor, " N"] | None = None
    weight_N: Float[Tensor, " N"] | None = None
    token_weight: float = 0.0
    """1/N of the optimizer batch: value loss and entropy are means over its actions, those that are
    left out of the loss included."""
    metric_weight: float = 0.0
    """1/N of the actions that enter the loss: metrics are means over these."""

    @property
    def lengths_S(self) -> Int[Tensor, " S"]:
        """Actions of each sequence."""
        return torch.tensor(self.lengths, device=self.engine_log_prob_N.device)

    @property
    def sequences(self) -> int:
        return len(self.lengths)
