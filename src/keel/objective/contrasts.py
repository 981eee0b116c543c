"""Surrogates that compare the completions of one prompt, as losses of classes or of pairs.

Each is a pair of functions: the loss of a group and its slope, from the whole group, and the
surrogate of each token, which has that value and gradient. Of the signature of those in
`surrogates`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from keel.objective.segments import Groups, segment_mean, segment_sum, spread


def real_shares(
    log_ratio_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    outcome_S: Float[Tensor, " S"],
    groups_S: Int[Tensor, " S"],
    *,
    threshold: float,
    temperature: float,
) -> Float[Tensor, " S 2"]:
    """What the loss of a group is to each of its completions: its share of the value, and slope.

        L_g = log(1 + Σ_{right} e^{−m_i/τ}) + log(1 + Σ_{wrong} e^{m_j/τ}),   m_i = mean_t log ρ_t
        shares:  (L_g / G,  ∂L_g/∂m_i)

    A completion is right if R_i > threshold; one without reward is in no sum.

    Source: REAL, arXiv:2602.05630, τ = 0.5.
    """
    mean_S = segment_mean(log_ratio_N.detach(), lengths_S)
    right_S, known_S = outcome_S > threshold, ~outcome_S.isnan()
    slope_S = torch.where(right_S, -1.0, 1.0).to(mean_S) / temperature
    score_S = torch.where(known_S, slope_S * mean_S, -torch.inf)
    group, side, one_S = Groups(groups_S), Groups(2 * groups_S + right_S), known_S.to(mean_S)
    top_S = side.max(score_S).clamp(min=0)
    value_S = top_S + ((-top_S).exp() + side.sum((score_S - top_S).exp())).log()
    # Each side once, whatever its size.
    share_S = group.sum(one_S * value_S / side.sum(one_S).clamp(min=1)) / group.sum(one_S)
    shares = torch.stack([share_S, slope_S * (score_S - value_S).exp()], dim=1)
    return torch.where(known_S[:, None], shares, torch.zeros_like(shares))


def real(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    prepared_N: Float[Tensor, " N 2"],
) -> Float[Tensor, " N"]:
    """Rewards as labels: a classifier of right and wrong answers by their log-ratios.

        s_n = −( L_g/G + ∂L_g/∂m_i · (m_i − sg[m_i]) ),   m_i = mean_t log ρ_t

    with L_g as in `real_shares`, from the whole group: the value and the gradient of −L_g. No
    advantage is in it.

    Source: REAL, arXiv:2602.05630.
    """
    mean_N = spread(segment_mean(log_ratio_N, lengths_S), lengths_S, total=len(log_ratio_N))
    return _of_loss(mean_N, prepared_N)


def _of_loss(x_N: Tensor, prepared_N: Tensor) -> Tensor:
    """Less a loss of x whose value and slope are known."""
    value_N, slope_N = prepared_N.unbind(1)
    return -(value_N + slope_N * (x_N - x_N.detach()))


def online_dpo_shares(
    log_prob_N: Float[Tensor, " N"],
    reference_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    outcome_S: Float[Tensor, " S"],
    groups_S: Int[Tensor, " S"],
    *,
    beta: float,
) -> Float[Tensor, " S 2"]:
    """What DPO's loss of the best against the worst completion of a group is to each of the group.

        L_g = −log σ( β (h_c − h_r) ),   h_i = Σ_t (ℓ_t − ℓ_ref,t)
        shares:  (L_g, G ∂L_g/∂h_i)

    so that their mean over the completions is that over the groups. Of several best ones c is that
    of the lowest h, of several worst ones r that of the highest; several of the same h share. Equal
    rewards are no loss, and a completion without reward is no candidate.

    Source: online DPO, arXiv:2402.04792 (of two completions); the loss: arXiv:2305.18290 eq. 7.
    """
    margin_S = segment_sum((log_prob_N - reference_log_prob_N).detach(), lengths_S)
    group, known_S = Groups(groups_S), ~outcome_S.isnan()
    ends = [(sign * outcome_S).masked_fill(~known_S, -torch.inf) for sign in (1, -1)]
    best_S, worst_S = (reward_S == group.max(reward_S) for reward_S in ends)
    unequal_S = known_S & ~(best_S & worst_S)
    slope_S = torch.zeros_like(margin_S)
    for sign, candidate_S in ((1.0, best_S), (-1.0, worst_S)):
        hard_S = (-sign * margin_S).masked_fill(~candidate_S, -torch.inf)
        chosen_S = (unequal_S & (hard_S == group.max(hard_S))).to(margin_S)
        slope_S = slope_S + sign * chosen_S / group.sum(chosen_S).clamp(min=1)
    gap_S = beta * group.sum(slope_S * margin_S)
    count_S = group.sum(known_S.to(margin_S))
    slope_S = -beta * torch.sigmoid(-gap_S) * count_S * slope_S
    compared_S = known_S & (group.sum(unequal_S.to(margin_S)) > 0)
    loss_S = torch.where(compared_S, -logsigmoid(gap_S), torch.zeros_like(gap_S))
    return torch.stack([loss_S, slope_S], dim=1)


def online_dpo(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    prepared_N: Float[Tensor, " N 2"],
) -> Float[Tensor, " N"]:
    """DPO's loss of pairs that the policy has sampled itself (ratio "none").

        s_n = −( L_g + G ∂L_g/∂h_i · (l_i − sg[l_i]) ),   l_i = Σ_t ℓ_t

    with the numbers of `online_dpo_shares`. No advantage is in it.

    Source: online DPO, arXiv:2402.04792.
    """
    total_N = spread(segment_sum(log_ratio_N, lengths_S), lengths_S, total=len(log_ratio_N))
    return _of_loss(total_N, prepared_N)
