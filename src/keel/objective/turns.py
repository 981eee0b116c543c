"""Advantages of turns: tokens between two observations, compared or valued as one action.

`turn_N` counts the turns of a sequence; each is a segment of tokens, numbered (U) over the batch in
order. NaN in `reward_N` means no reward: the sequence leaves every mean and gets 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.gae import gae, returns_to_go, td_error
from keel.objective.group import group_relative
from keel.objective.segments import continues, segment_sum, sequence_index, shift, spread


def turn_lengths(
    turn_N: Int[Tensor, " N"], lengths_S: Int[Tensor, " S"]
) -> tuple[Int[Tensor, " U"], Int[Tensor, " S"]]:
    """The tokens of each turn, and the turns of each sequence.

        L_u = #{ n : n lies in turn u },   K_i = #{ u : u lies in sequence i }

    Source: Blelloch 1990, "Prefix sums and their applications", §1.5 (segments).
    """
    sequence_N = sequence_index(lengths_S)
    pair_2U, lengths_U = torch.unique_consecutive(
        torch.stack([sequence_N, turn_N]), dim=1, return_counts=True
    )
    return lengths_U, torch.bincount(pair_2U[0], minlength=lengths_S.numel())


def group_in_group(
    reward_N: Float[Tensor, " N"],
    turn_N: Int[Tensor, " N"],
    anchor_N: Int[Tensor, " N"],
    groups_S: Int[Tensor, " S"],
    lengths_S: Int[Tensor, " S"],
    *,
    omega: float,
    gamma: float,
    scale: Literal["std", "none"],
    epsilon: float,
) -> Float[Tensor, " N"]:
    """A sequence against its group, and a turn against those that begin at the same state.

        A_n = A^E_i + ω A^S_u,   A^E_i = (R_i − mean_g R) / (std_g R + ε)
        A^S_u = (G_u − mean_a G) / (std_a G + ε),   G_u = Σ_k γ^k r_{u+k}

    with r_u the rewards in turn u and a the turns of the group that begin at the anchor state of u;
    a turn alone gets A^S = 0. `scale` "none" divides by nothing. `anchor_N` numbers the states,
    different ones in different groups.

    Source: GiGPO, arXiv:2505.10978 eq. 3, 6-8.
    """
    lengths_U, turns_S = turn_lengths(turn_N, lengths_S)
    return_U = returns_to_go(segment_sum(reward_N, lengths_U), turns_S, gamma=gamma)
    anchor_U = anchor_N[lengths_U.cumsum(0) - lengths_U]
    reward_S = segment_sum(reward_N, lengths_S)
    episode_S = group_relative(reward_S, groups_S, scale=scale, epsilon=epsilon)
    turn_U = group_relative(return_U, anchor_U, scale=scale, epsilon=epsilon, warn_alone=False)
    return spread(episode_S, lengths_S) + omega * spread(turn_U, lengths_U)


def turn_relative(
    reward_N: Float[Tensor, " N"],
    turn_N: Int[Tensor, " N"],
    groups_S: Int[Tensor, " S"],
    lengths_S: Int[Tensor, " S"],
    *,
    outcome_weight: float,
    epsilon: float,
) -> Float[Tensor, " N"]:
    """A turn's reward against those of the same turn of the group, and the outcome.

        A_{i,k} = A^T_{i,k} + λ A^O_i for k < K_i,   A_{i,K_i} = A^O_i
        A^T_{i,k} = (r_{i,k} − mean_g r_k) / (std_g r_k + ε),   A^O likewise of r_{i,K_i}

    The outcome is what the last turn gets. The k-th turns that are compared are those before the
    last one of their sequence; one alone gets A^T = 0.

    Source: MT-GRPO, arXiv:2505.11821 (two turns there, here any number).
    """
    lengths_U, turns_S = turn_lengths(turn_N, lengths_S)
    first_U, before_U = lengths_U.cumsum(0) - lengths_U, continues(turns_S)
    absent_U = spread(segment_sum(reward_N, lengths_S).isnan(), turns_S)
    reward_U = segment_sum(reward_N, lengths_U).masked_fill(absent_U, torch.nan)
    place_2U = torch.stack([spread(groups_S, turns_S), turn_N[first_U]])
    place_U = torch.unique(place_2U, dim=1, return_inverse=True)[1]
    last_U = reward_U.masked_fill(before_U, torch.nan)
    outcome_U = group_relative(last_U, place_2U[0], scale="std", epsilon=epsilon)
    outcome_U = spread(segment_sum(outcome_U, turns_S), turns_S)
    turn_U = reward_U.masked_fill(~before_U, torch.nan)
    turn_U = group_relative(turn_U, place_U, scale="std", epsilon=epsilon, warn_alone=False)
    return spread(torch.where(before_U, turn_U + outcome_weight * outcome_U, outcome_U), lengths_U)


def turn_gae(
    reward_N: Float[Tensor, " N"],
    value_N: Float[Tensor, " N"],
    next_value_N: Float[Tensor, " N"],
    turn_N: Int[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_lam: float,
) -> Float[Tensor, " N"]:
    """Generalised advantage estimation over turns, then over the tokens of each.

        A_u = δ_u + γ_T λ_T A_{u+1},   δ_u = r_u + γ_T V(s_{u+1}) − V(s_u), s_u the start of turn u
        A_n = r_n + γ V_{n+1} − V_n + γ λ A_{n+1} within a turn
        A_n = r_n + γ_T V(s_{u+1}) − V_n + γ_T λ_T A_{u+1} for the last token of turn u

    Of one turn it is `gae.gae`.

    Source: bi-level GAE, VAGEN, arXiv:2510.16907, whose code reads V at a turn's last token.
    """
    lengths_U, turns_S = turn_lengths(turn_N, lengths_S)
    inside_N = continues(lengths_U)
    first_N = inside_N.logical_not().roll(1)
    discount_N = torch.full_like(next_value_N, gamma).masked_fill(~inside_N, turn_gamma)
    delta_N = td_error(reward_N, value_N, discount_N * next_value_N, gamma=1.0)
    reward_U = segment_sum(reward_N, lengths_U)
    delta_U = td_error(reward_U, value_N[first_N], next_value_N[~inside_N], gamma=turn_gamma)
    advantage_U = gae(delta_U, continues(turns_S), gamma=turn_gamma, lam=turn_lam)
    ahead_U = turn_gamma * turn_lam * shift(advantage_U, turns_S)
    delta_N = delta_N.masked_scatter(~inside_N, delta_N[~inside_N] + ahead_U)
    return gae(delta_N, inside_N, gamma=gamma, lam=lam)
