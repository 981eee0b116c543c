"""What the terms of an algorithm read of a batch: one frozen value each time.

Everything is there by the name that a user's function may ask for; None is what the batch lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Signals:
    """What is known of the sequences (S) of a batch, and of their tokens (N), before an update.

    Log-probabilities are those of the engine that sampled, of the policy before the update, of the
    reference and of the teacher; `old_entropy_N` and `old_squares_N` (Σ_v π²) are of the policy
    before the update, where an algorithm asks for them. `outcome_S` is the reward without the
    divergence, NaN for a sequence without one. `turn_N` counts the turns of a conversation: a token
    after tool output has a higher one than the token before it. `version_S` is the number of the
    weights that a completion was begun with.
    """

    lengths_S: Int[Tensor, " S"]
    groups_S: Int[Tensor, " S"]
    engine_log_prob_N: Float[Tensor, " N"] | None = None
    old_log_prob_N: Float[Tensor, " N"] | None = None
    reference_log_prob_N: Float[Tensor, " N"] | None = None
    teacher_log_prob_N: Float[Tensor, " N"] | None = None
    old_entropy_N: Float[Tensor, " N"] | None = None
    old_squares_N: Float[Tensor, " N"] | None = None
    value_N: Float[Tensor, " N"] | None = None
    turn_N: Int[Tensor, " N"] | None = None
    version_S: Int[Tensor, " S"] | None = None
    outcome_S: Float[Tensor, " S"] | None = None

    def named(self) -> dict[str, Any]:
        """Those that are there."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in every.items() if value is not None}

    def need(self, name: str) -> Tensor:
        """The signal of this name. Raises ValueError where the batch has none."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"the algorithm needs {name}, and the batch has none")
        return value


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardSignals(Signals):
    """What an advantage is computed from.

    `penalty_N` is −β k1 where the divergence is in the reward, else 0; `reward_N` is the penalty
    plus the reward of each step on its last token and the outcome on the last of the sequence, and
    `reward_S` its sum over the sequence. `components` are the values of the single rewards, NaN
    for none, and `component_weights` what they are weighed with. Steps (K) come from process
    rewards: reward, index among the N of the last token, sequence. `anchor_N` numbers the states
    that turns begin at: equal where two turns of one group begin at the same. `roles` are the names
    of the sequences' roles, `state` is that of the advantage before the step. Rewards are float64.
    """

    outcome_S: Float[Tensor, " S"]
    penalty_N: Float[Tensor, " N"]
    reward_S: Float[Tensor, " S"]
    reward_N: Float[Tensor, " N"]
    next_value_N: Float[Tensor, " N"] | None = None
    baseline_S: Float[Tensor, " S"] | None = None
    components: Mapping[str, Float[Tensor, " S"]] = field(default_factory=dict)
    component_weights: Mapping[str, float] = field(default_factory=dict)
    step_reward_K: Float[Tensor, " K"] | None = None
    step_end_K: Int[Tensor, " K"] | None = None
    step_sequence_K: Int[Tensor, " K"] | None = None
    anchor_N: Int[Tensor, " N"] | None = None
    roles: Sequence[str] = ()
    state: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class LossSignals(Signals):
    """What a surrogate or a mask is computed from: the same, with the current policy's numbers.

    `log_prob_N`, `log_ratio_N` (log ρ_n of the algorithm's ratio) and `entropy_N` carry gradients
    in the loss. `advantage_N` is whitened where the algorithm asks for it. `old_log_prob_N` is
    `log_prob_N` without gradient on a step with one update. `prepared_N` is what the term made of
    the whole optimizer batch before it was cut, if it is one that does. `edges` are the ratios
    outside which the surrogate clips, and `seed` is the optimizer step's.
    """

    old_log_prob_N: Float[Tensor, " N"]
    log_prob_N: Float[Tensor, " N"]
    log_ratio_N: Float[Tensor, " N"]
    advantage_N: Float[Tensor, " N"]
    entropy_N: Float[Tensor, " N"] | None = None
    prepared_N: Float[Tensor, " N *K"] | None = None
    edges: tuple[float, float] = (0.0, math.inf)
    seed: int = 0

    @property
    def clipped(self) -> tuple[Tensor, Tensor]:
        """Which tokens are below the edges, and which above, towards where the advantage pushes
        them."""
        ratio_N, (low, high) = self.log_ratio_N.detach().exp(), self.edges
        return (ratio_N < low) & (self.advantage_N < 0), (ratio_N > high) & (self.advantage_N > 0)

    @property
    def clipped_N(self) -> Tensor:
        """Which tokens are clipped on either side."""
        return self.clipped[0] | self.clipped[1]
