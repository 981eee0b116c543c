"""Diagonal Gaussians: the policies of continuous actions (D numbers each).

`log_std` has the shape of the mean, or broadcasts to it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def log_prob(
    mean_ND: Float[Tensor, "N D"],
    log_std_ND: Float[Tensor, "#N D"],
    action_ND: Float[Tensor, "N D"],
) -> Float[Tensor, " N"]:
    """The logarithm of the density of an action.

        log π(a|s) = −Σ_d [ ½ ((a_d − μ_d)/σ_d)² + log σ_d + ½ log 2π ]

    Source: Williams 1992 §6 (Gaussian units); arXiv:1502.05477 appendix D.
    """
    standard_ND = (action_ND - mean_ND) * (-log_std_ND).exp()
    return -(0.5 * standard_ND.square() + log_std_ND + 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(log_std_ND: Float[Tensor, "#N D"]) -> Float[Tensor, "#N"]:
    """The differential entropy, in nats; below 0 where the density is above 1.

        H = Σ_d [ ½ + ½ log 2π + log σ_d ]

    Source: Cover and Thomas 2006, theorem 8.4.1.
    """
    return (log_std_ND + 0.5 + 0.5 * math.log(2 * math.pi)).sum(-1)


def full(
    mean_ND: Float[Tensor, "N D"],
    log_std_ND: Float[Tensor, "#N D"],
    reference_mean_ND: Float[Tensor, "N D"],
    reference_log_std_ND: Float[Tensor, "#N D"],
) -> Float[Tensor, " N"]:
    """The exact divergence from the reference.

        KL(π‖ref) = Σ_d [ log(σ_ref/σ) + (σ² + (μ − μ_ref)²) / (2 σ_ref²) − ½ ]

    Source: Kullback 1959, the divergence of two normal densities.
    """
    variance_ND = (2 * log_std_ND).exp() + (mean_ND - reference_mean_ND).square()
    scaled_ND = 0.5 * variance_ND * (-2 * reference_log_std_ND).exp()
    return torch.sum(reference_log_std_ND - log_std_ND + scaled_ND - 0.5, dim=-1)
