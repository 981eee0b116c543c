"""A teacher's term: its log-ratio as an advantage, and its divergence over the vocabulary."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective import divergences
from keel.objective.gae import returns_to_go
from keel.objective.segments import segment_sum, spread

SMALLEST = 1e-8
"""Least sum of absolute advantages that is divided by."""
MOST = -1e-7
"""Highest log-probability of the listed tokens, so that the rest has one too."""


def teacher_log_ratio(
    old_log_prob_N: Float[Tensor, " N"],
    teacher_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    gamma: float,
) -> Float[Tensor, " N"]:
    """Minus k1 to the teacher, with those of the tokens that follow discounted.

        A_n = Σ_k γ^k (ℓ_teacher,n+k − ℓ_old,n+k)

    Each log-ratio is clamped to ±20, as in every estimator of a divergence. On policy, with tokens
    sampled from π_old, E[Σ_n A_n ∇ℓ_n] is minus

    | γ = 0 | Σ_n ∇KL(π‖π_teacher) of the next token, the distribution of states held fixed |
    | γ = 1 | ∇KL(π‖π_teacher) of whole completions |

    since the score has mean 0 in every state: E[∇ℓ_n d_n] = ∇E[d_n], and the terms of earlier
    tokens vanish. With γ = 0 a token answers only for how unlikely the teacher finds it where it
    stands, not for the states that it leads to.

    Source: Lu 2025, On-Policy Distillation (Thinking Machines Lab), where γ = 0; arXiv:2601.02780
    eq. 8.
    """
    log_ratio_N = -divergences.k1(old_log_prob_N, teacher_log_prob_N)
    return returns_to_go(log_ratio_N, lengths_S, gamma=gamma)


def prefix_weighted(
    advantage_N: Float[Tensor, " N"], lengths_S: Int[Tensor, " S"], *, gain: float
) -> Float[Tensor, " N"]:
    """Advantages whose early tokens count more: a teacher is surer before the policy has drifted.

        A_n ← A_n (1 + g (1 − Σ_{j<n} |A_j| / Σ_j |A_j|)),   sums over the sequence of n

    Source: IW-OPD, arXiv:2606.22600, g = 0.5.
    """
    size_N = advantage_N.abs()
    total_N = spread(segment_sum(size_N, lengths_S), lengths_S).clamp(min=SMALLEST)
    left_N = returns_to_go(size_N, lengths_S, gamma=1.0)  # 1 − Σ_{j<n} / Σ_j is Σ_{j≥n} / Σ_j
    return advantage_N * (1.0 + gain * (left_N / total_N))


def jensen_shannon(
    log_prob_NV: Float[Tensor, "N V"],
    teacher_NV: Float[Tensor, "N V"],
    *,
    mix: float,
    top_k: int | None = None,
) -> Float[Tensor, " N"]:
    """The generalised Jensen-Shannon divergence of the policy p and a teacher q, of the next token.

        D_n = β KL(q‖m) + (1 − β) KL(p‖m),   m = β q + (1 − β) p

    At the ends, where this is 0, it is its limit over β, or over 1 − β: `mix` 0 is KL(q‖p), 1 is
    KL(p‖q). Takes log-probabilities. With `top_k` both are distributions over the teacher's k
    likeliest tokens and one more, which has the rest (TRL's `add_tail`; verl's top-k has no rest).

    Source: GKD, arXiv:2306.13649 eq. 1; the ends as in TRL 1.16.
    """
    if top_k is not None and top_k < teacher_NV.shape[-1]:
        teacher_NV, index_NK = teacher_NV.topk(top_k, dim=-1)
        teacher_NV, log_prob_NV = (
            torch.cat(
                [x, torch.log(-torch.expm1(x.logsumexp(-1, keepdim=True).clamp(max=MOST)))], -1
            )
            for x in (teacher_NV, log_prob_NV.gather(-1, index_NK))
        )
    if mix == 0:
        return divergences.relative_entropy(teacher_NV, log_prob_NV)
    if mix == 1:
        return divergences.relative_entropy(log_prob_NV, teacher_NV)
    mixed_NV = torch.logaddexp(teacher_NV + math.log(mix), log_prob_NV + math.log1p(-mix))
    of_teacher_N = divergences.relative_entropy(teacher_NV, mixed_NV)
    return mix * of_teacher_N + (1 - mix) * divergences.relative_entropy(log_prob_NV, mixed_NV)
