"""Returns less a baseline: the greedy answer's, the group's, or one for each place in the answer.

NaN in `reward_S` means no reward: the sequence gets 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.gae import returns_to_go
from keel.objective.group import group_mean_baseline
from keel.objective.segments import Groups, on_last, segment_sum, spread, to_go


def greedy_baseline(
    reward_S: Float[Tensor, " S"], baseline_S: Float[Tensor, " S"]
) -> Float[Tensor, " S"]:
    """The reward less that of the greedy completion of the same prompt.

        A_i = R_i − R(greedy completion)

    0 where either is NaN: there is nothing to compare.

    Source: ReMax, arXiv:2310.10505 §4.
    """
    difference_S = reward_S - baseline_S
    return difference_S.masked_fill(difference_S.isnan(), 0.0)


def role_relative(
    reward_S: Float[Tensor, " S"],
    role_S: Int[Tensor, " S"],
    baseline_R: Float[Tensor, " R"],
    *,
    decay: float,
) -> tuple[Float[Tensor, " S"], Float[Tensor, " R"]]:
    """The reward less the moving average of the rewards of the same role; and that average after.

        A_i = R_i − b_r,   then   b_r ← α^m b_r + (1 − α^m) mean_r R

    over the m rewards of role r in the batch: the b of before the batch is used, so that no reward
    is in its own baseline, and the update has the weights of m single ones, b ← α b + (1 − α) R,
    without their order. (The authors' code takes one trajectory after the other, and reads b before
    it updates.) NaN gets 0 and moves nothing.

    Source: role-conditioned advantage estimation, SPIRAL, arXiv:2506.24119, α = 0.95.
    """
    present_S = reward_S.isnan().logical_not()
    known_S = torch.where(present_S, reward_S, torch.zeros_like(reward_S))
    size_R = torch.bincount(role_S, minlength=baseline_R.numel())
    order_S = role_S.argsort(stable=True)
    count_R = segment_sum(present_S.to(reward_S.dtype)[order_S], size_R)
    mean_R = segment_sum(known_S[order_S], size_R) / count_R.clamp(min=1)
    kept_R = torch.full_like(baseline_R, decay) ** count_R
    advantage_S = (known_S - baseline_R[role_S]).masked_fill(~present_S, 0.0)
    return advantage_S, kept_R * baseline_R + (1 - kept_R) * mean_R


def baselined_returns(
    reward_S: Float[Tensor, " S"],
    penalty_N: Float[Tensor, " N"],
    groups_S: Int[Tensor, " S"],
    lengths_S: Int[Tensor, " S"],
    *,
    gamma: float = 1.0,
    group_baseline: bool = False,
) -> Float[Tensor, " N"]:
    """REINFORCE++'s advantage before it is whitened.

        A_t = Σ_{k≥t} γ^{k−t} r_k,   r_k = penalty_k + [k is last] (R_i − b_i)

    `reward_S` is the outcome alone, `penalty_N` is −β k1 (zeros without a KL in the reward); b is
    the group's mean outcome with `group_baseline`, else 0. A sequence without reward gets 0.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    outcome_S = group_mean_baseline(reward_S, groups_S) if group_baseline else reward_S
    absent_N = spread(reward_S, lengths_S).isnan()
    reward_N = penalty_N + on_last(outcome_S, lengths_S)
    return_N = returns_to_go(reward_N, lengths_S, gamma=gamma)
    return torch.where(absent_N, torch.zeros_like(return_N), return_N)


def optimal_token(
    reward_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    old_squares_N: Float[Tensor, " N"],
    groups_S: Int[Tensor, " S"],
    lengths_S: Int[Tensor, " S"],
    *,
    zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Float[Tensor, " N"]:
    """The reward to go less the baseline of least variance for each place in the answer.

        A_t = G_t − B_t,   B_t = Σ_{i∈g} G_it W_it / (Σ_{i∈g} W_it + ε)
        W_t = Σ_{j≤t} (1 − 2 π_j + Σ_v π_v²)

    over the answers of the group that have a t-th token. Where only one has, B = 0 with
    `zero_tail`, else G, which leaves nothing (but for a group of one). The places are those of
    written tokens, so that it is also verl's form for conversations with tools.

    Source: the optimal token baseline, Li et al. 2026, as verl has it.
    """
    absent_S = segment_sum(reward_N, lengths_S).isnan()
    absent_N = spread(absent_S, lengths_S)
    return_N = to_go(reward_N.masked_fill(absent_N, 0.0), lengths_S)
    energy_N = 1 - 2 * old_log_prob_N.exp() + old_squares_N
    # The sum up to a token is the one to go of what is turned round.
    weight_N = to_go(energy_N.flip(0), lengths_S.flip(0)).flip(0).masked_fill(absent_N, 0.0)
    starts_S = lengths_S.cumsum(0) - lengths_S
    place_N = torch.arange(len(reward_N), device=reward_N.device) - spread(starts_S, lengths_S)
    group = Groups(groups_S)
    cell = Groups(spread(group.index_S, lengths_S) * (place_N.max() + 1) + place_N)
    mean_N = cell.sum(return_N * weight_N) / (cell.sum(weight_N) + epsilon)
    alone_N = cell.sum((~absent_N).to(weight_N)) == 1
    if not zero_tail:
        alone_N = spread(group.sum((~absent_S).to(weight_N)) == 1, lengths_S)
    advantage_N = return_N - torch.where(alone_N, 0.0, mean_N)
    return advantage_N.masked_fill(absent_N, 0.0)
