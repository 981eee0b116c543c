"""Advantages per sequence: a reward against those of the other answers to the same prompt.

NaN in `reward_S` means no reward: the sequence leaves every mean and deviation and gets 0. A
group whose rewards are all equal gives exactly 0. A group of one gives 0, with a warning.
Group ids are any integers, in any order.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.segments import Groups, to_go


@dataclass(frozen=True, eq=False)
class _Deviation:
    """Rewards less the (weighted) mean of their group, and what a std of the group needs."""

    centred_S: Tensor
    """R_i − mean_g R; 0 where the reward is absent or the group's rewards are all equal."""
    mean_S: Tensor
    """mean_g R; 0 for a group without rewards."""
    unequal_S: Tensor
    """Whether the reward is present, in a group whose rewards differ."""
    count_S: Tensor
    """How many rewards the group has."""
    squares_S: Tensor
    """Σ_g (R_j − mean_g R)²."""


def _deviation(
    reward_S: Tensor, groups_S: Tensor, weight_S: Tensor | None = None, warn_alone: bool = True
) -> _Deviation:
    present_S = reward_S.isnan().logical_not()
    reward_S = torch.where(present_S, reward_S, torch.zeros_like(reward_S))
    weight_S = torch.ones_like(reward_S) if weight_S is None else weight_S
    weight_S = torch.where(present_S, weight_S, torch.zeros_like(weight_S))
    peers = Groups(groups_S)
    total, count_S = peers.sum, peers.sum(present_S.to(reward_S.dtype))
    if warn_alone and bool((present_S & (count_S == 1)).any()):
        warnings.warn(
            "a group of one answer has nothing to be compared with: its advantage is 0",
            stacklevel=3,
        )
    least_S, most_S = (
        sign * peers.max((sign * reward_S.detach()).masked_fill(~present_S, -torch.inf))
        for sign in (-1, 1)
    )
    unequal_S = present_S & (most_S > least_S)
    mass_S = total(weight_S)
    mean_S = total(weight_S * reward_S) / torch.where(mass_S > 0, mass_S, 1.0)
    centred_S = torch.where(unequal_S, reward_S - mean_S, torch.zeros_like(reward_S))
    return _Deviation(centred_S, mean_S, unequal_S, count_S, total(centred_S.square()))


def group_relative(
    reward_S: Float[Tensor, " S"],
    groups_S: Int[Tensor, " S"],
    *,
    scale: Literal["std", "batch", "none"],
    epsilon: float,
    ddof: int = 1,
    warn_alone: bool = True,
) -> Float[Tensor, " S"]:
    """The reward less the group's mean, over a standard deviation; a group of one may be expected.

        A_i = (R_i − mean_g R) / (std + ε),   std² = 1/(G−ddof) Σ (R_j − mean R)²

    `scale`: the std of the group, of the whole batch's rewards, or none (A_i = R_i − mean_g R).

    Source: GRPO, arXiv:2402.03300 §4.1.2; none: Dr. GRPO, arXiv:2503.20783 §3.2; batch:
    arXiv:2508.08221.
    """
    group = _deviation(reward_S, groups_S, warn_alone=warn_alone)
    if scale == "none":
        return group.centred_S
    if scale == "std":
        variance_S = group.squares_S / (group.count_S - ddof).clamp(min=1)
    else:
        variance_S = _variance(reward_S, ddof).expand_as(reward_S)
    std_S = torch.where(group.unequal_S, variance_S, 1.0).sqrt()
    return group.centred_S / (std_S + epsilon)


def _variance(reward_S: Tensor, ddof: int) -> Tensor:
    """Of all rewards that are there."""
    present_S = reward_S.isnan().logical_not()
    count = present_S.sum()
    mean = torch.where(present_S, reward_S, 0.0).sum() / count.clamp(min=1)
    squares = torch.where(present_S, reward_S - mean, 0.0).square().sum()
    return squares / (count - ddof).clamp(min=1)


def leave_one_out(
    reward_S: Float[Tensor, " S"], groups_S: Int[Tensor, " S"]
) -> Float[Tensor, " S"]:
    """The reward less the mean of the group's other rewards.

        A_i = R_i − 1/(G−1) Σ_{j≠i} R_j = G/(G−1) · (R_i − mean_g R)

    Source: RLOO, arXiv:2402.14740 §2.2; Kool et al. 2019.
    """
    group = _deviation(reward_S, groups_S)
    return group.centred_S * (group.count_S / (group.count_S - 1).clamp(min=1))


def optimal(
    reward_S: Float[Tensor, " S"], groups_S: Int[Tensor, " S"], lengths_S: Int[Tensor, " S"]
) -> Float[Tensor, " S"]:
    """The reward less the length-weighted mean of the group, the baseline of least variance.

        A_i = R_i − b,   b = Σ_{j∈g} L_j R_j / Σ_{j∈g} L_j

    Source: OPO, arXiv:2505.23585 §3.
    """
    return _deviation(reward_S, groups_S, lengths_S.to(reward_S.dtype)).centred_S


def group_mean_baseline(
    reward_S: Float[Tensor, " S"], groups_S: Int[Tensor, " S"]
) -> Float[Tensor, " S"]:
    """The reward less the group's mean.

        A_i = R_i − mean_g R

    Source: REINFORCE++ with baseline, arXiv:2501.03262; Dr. GRPO, arXiv:2503.20783.
    """
    return _deviation(reward_S, groups_S).centred_S


def mean_relative(
    reward_S: Float[Tensor, " S"], groups_S: Int[Tensor, " S"], *, epsilon: float
) -> Float[Tensor, " S"]:
    """The reward less the group's mean, over that mean: of rewards that are not negative.

        A_i = (R_i − mean_g R) / (mean_g R + ε)

    Its expected gradient grows towards that of the log-likelihood of a right answer as G grows. A
    group whose mean is negative has no such meaning and gets 0.

    Source: MaxRL, arXiv:2602.02710.
    """
    group = _deviation(reward_S, groups_S)
    relative_S = group.centred_S / (group.mean_S + epsilon)
    return torch.where(group.mean_S > 0, relative_S, torch.zeros_like(relative_S))


def best_of_group(
    reward_S: Float[Tensor, " S"],
    groups_S: Int[Tensor, " S"],
    *,
    scale: Literal["std", "none"],
    epsilon: float,
) -> Float[Tensor, " S"]:
    """The best answer of a group gets its lead, all others nothing.

        A_i = (R_(1) − R_(2)) / (std_g + ε) for the best of the group, else 0

    Several best ones get 0 each: none leads.

    Source: pass@k policy optimisation, arXiv:2503.19595, as verl has it.
    """
    group = _deviation(reward_S, groups_S)
    known_S = reward_S.masked_fill(reward_S.isnan(), -torch.inf)
    peers = Groups(groups_S)
    best_S = known_S == peers.max(known_S)
    second_S = peers.max(known_S.masked_fill(best_S, -torch.inf))
    alone_S = second_S.isfinite() & (peers.sum(best_S.to(known_S)) == 1)
    lead_S = torch.where(best_S & alone_S, known_S - second_S, torch.zeros_like(known_S))
    if scale == "none":
        return lead_S
    variance_S = group.squares_S / (group.count_S - 1).clamp(min=1)
    return lead_S / (torch.where(group.unequal_S, variance_S, 1.0).sqrt() + epsilon)


def rescaled_baseline(
    reward_S: Float[Tensor, " S"], groups_S: Int[Tensor, " S"]
) -> Float[Tensor, " S"]:
    """The reward less the group's mean, larger the fewer rewards of the batch are not 0.

        A_i = α (R_i − mean_g R),   α = S / max(1, #{ j : R_j ≠ 0 })

    Source: GPG, arXiv:2504.02546, as verl has it.
    """
    present_S = reward_S.isnan().logical_not()
    rewarded = (present_S & (reward_S != 0)).to(reward_S.dtype).sum().clamp(min=1)
    return _deviation(reward_S, groups_S).centred_S * (present_S.sum() / rewarded)


def separately_normalised(
    rewards: Sequence[Float[Tensor, " S"]],
    groups_S: Int[Tensor, " S"],
    *,
    weights: Sequence[float],
    epsilon: float,
) -> Float[Tensor, " S"]:
    """Several rewards, each normalised within its group before they are added.

        A_i = Σ_k w_k (R_ki − mean_g R_k) / (std_g R_k + ε)

    before it is whitened over the tokens of the batch.

    Source: GDPO, arXiv:2601.05242.
    """
    parts = [
        weight * group_relative(reward_S, groups_S, scale="std", epsilon=epsilon)
        for weight, reward_S in zip(weights, rewards, strict=True)
    ]
    return torch.stack(parts).sum(0)


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
