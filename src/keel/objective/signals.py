"""What an advantage is computed from."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Signals:
    """Rewards, values and places of a batch, by the names that a user's function may ask for.

    `old_log_prob_N` and `teacher_log_prob_N` are there where the advantage reads a teacher.

    `penalty_N` is −β k1 where the divergence is in the reward, else 0; `reward_N` is the penalty
    plus the reward of each step on its last token and the outcome on the last of the sequence, and
    `reward_S` its sum over the sequence. NaN in `outcome_S` means that the sequence has no reward.
    Steps (K) come from process rewards: reward, index among the N of the last token, sequence.
    Rewards are float64.
    """

    outcome_S: Float[Tensor, " S"]
    penalty_N: Float[Tensor, " N"]
    reward_S: Float[Tensor, " S"]
    reward_N: Float[Tensor, " N"]
    lengths_S: Int[Tensor, " S"]
    groups_S: Int[Tensor, " S"]
    value_N: Float[Tensor, " N"] | None = None
    next_value_N: Float[Tensor, " N"] | None = None
    old_log_prob_N: Float[Tensor, " N"] | None = None
    teacher_log_prob_N: Float[Tensor, " N"] | None = None
    baseline_S: Float[Tensor, " S"] | None = None
    step_reward_K: Float[Tensor, " K"] | None = None
    step_end_K: Int[Tensor, " K"] | None = None
    step_sequence_K: Int[Tensor, " K"] | None = None

    def named(self) -> dict[str, Tensor]:
        """Those that are there."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in every.items() if value is not None}

    def need(self, name: str) -> Tensor:
        """The signal of this name. Raises ValueError where the batch has none."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"the advantage needs {name}, and the batch has none")
        return value
