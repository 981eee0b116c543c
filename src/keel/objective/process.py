"""Advantages from rewards of single reasoning steps."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.group import group_relative
from keel.objective.segments import to_go


def process_group_relative(
    step_reward_K: Float[Tensor, " K"],
    step_end_K: Int[Tensor, " K"],
    step_sequence_K: Int[Tensor, " K"],
    groups_S: Int[Tensor, " S"],
    lengths_S: Int[Tensor, " S"],
    *,
    epsilon: float,
) -> Float[Tensor, " N"]:
    """A token's advantage is the sum of the normalised rewards of the steps that are yet to end.

        r̃_k = (r_k − mean) / (std + ε) over all steps of the group,   A_t = Σ_{k : end(k) ≥ t} r̃_k

    `step_end_K` is the index among the N of a step's last token, `step_sequence_K` the sequence
    that it lies in. A NaN step reward is no reward. Tokens after the last step get 0.

    Source: GRPO with process supervision, arXiv:2402.03300 §4.1.3.
    """
    normalised_K = group_relative(
        step_reward_K, groups_S[step_sequence_K], scale="std", epsilon=epsilon
    )
    total = int(lengths_S.sum())
    at_end_N = normalised_K.new_zeros(total).index_add(0, step_end_K, normalised_K)
    return to_go(at_end_N, lengths_S)
