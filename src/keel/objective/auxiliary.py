"""What is maximised besides the surrogate, of log-probabilities alone."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def of_right(
    log_prob_N: Float[Tensor, " N"], outcome_N: Float[Tensor, " N"], *, threshold: float
) -> Float[Tensor, " N"]:
    """The log-probability of the tokens of right answers; 0 elsewhere, also without a reward.

        x_n = ℓ_n [ R_{i(n)} > threshold ]

    Source: L_NLL of VAPO, arXiv:2504.05118 §4.3.
    """
    return torch.where(outcome_N > threshold, log_prob_N, torch.zeros_like(log_prob_N))


def uncertain(log_prob_M: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """The log-probability, weighed by how unsure the policy is of the token: most at p = ½.

        x_m = sg[ p_m (1 − p_m) ] · ℓ_m,   p_m = exp(ℓ_m)

    Source: CHORD-φ, arXiv:2508.11408.
    """
    prob_M = log_prob_M.detach().exp()
    return prob_M * (1 - prob_M) * log_prob_M
