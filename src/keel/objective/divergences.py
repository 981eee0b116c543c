"""How far the policy is from another one, estimated at the sampled tokens or over the vocabulary.

With `d = ℓ − ℓ_other` of one action (a whole sequence, or a token in its state) sampled from the
policy:

| as a loss | E[value] | E[gradient] |
|---|---|---|
| k1 | KL(π‖other) | 0 |
| k2 | biased | ∇KL(π‖other) |
| k3 | KL(π‖other) | ∇KL(other‖π) |
| ρ·k1, ρ·k3 | KL(π‖other) | ∇KL(π‖other) |

Summed token by token this holds for the per-token KL with the states' distribution held fixed, not
for the KL of sequences; k1 in the reward, summed from each token to the end, is exact for that.

Every estimator clamps d to ±20 before its formula: beyond it is constant, without gradient."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from keel.objective.ratios import LIMIT, exponential


def k1(
    log_prob_N: Float[Tensor, " N"], other_log_prob_N: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """The log-ratio: unbiased in value, of either sign; its gradient in a loss is 0 on average.

        k1 = d = ℓ − ℓ_other

    Source: Schulman 2020, "Approximating KL divergence".
    """
    return _difference(log_prob_N, other_log_prob_N)


def k2(
    log_prob_N: Float[Tensor, " N"], other_log_prob_N: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Half the squared log-ratio: biased in value, ∇KL(π‖other) in gradient.

        k2 = ½ d²

    Source: Schulman 2020, "Approximating KL divergence".
    """
    return 0.5 * _difference(log_prob_N, other_log_prob_N).square()


def k3(
    log_prob_N: Float[Tensor, " N"], other_log_prob_N: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Never negative, KL(π‖other) in value, ∇KL(other‖π) in gradient; by token, states fixed.

        k3 = e^{−d} + d − 1

    Source: Schulman 2020, "Approximating KL divergence"; GRPO, arXiv:2402.03300 eq. 4.
    """
    difference_N = _difference(log_prob_N, other_log_prob_N)
    return (-difference_N).expm1() + difference_N


def absolute(
    log_prob_N: Float[Tensor, " N"], other_log_prob_N: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """The size of the log-ratio; no KL, kept because verl has it.

        abs = |d|

    Source: verl's `abs` penalty, arXiv:2409.19256.
    """
    return _difference(log_prob_N, other_log_prob_N).abs()


def full(
    logits_NV: Float[Tensor, "N V"], reference_logits_NV: Float[Tensor, "N V"]
) -> Float[Tensor, " N"]:
    """The exact divergence of the next token's distribution; takes logits or log-probabilities.

        D_n = Σ_v π(v) (log π(v) − log π_ref(v))

    A token that the policy rules out (−inf) adds 0.

    Source: Kullback and Leibler 1951.
    """
    reference_NV = torch.log_softmax(reference_logits_NV, dim=-1)
    return relative_entropy(torch.log_softmax(logits_NV, dim=-1), reference_NV)


def relative_entropy(
    log_prob_NV: Float[Tensor, "N V"], other_NV: Float[Tensor, "N V"]
) -> Float[Tensor, " N"]:
    """The same of log-probabilities.

        KL(a‖b) = Σ_v a(v) (log a(v) − log b(v))

    Source: Kullback and Leibler 1951.
    """
    impossible_NV = log_prob_NV == -torch.inf
    difference_NV = log_prob_NV.masked_fill(impossible_NV, 0.0) - other_NV.masked_fill(
        impossible_NV, 0.0
    )
    return (log_prob_NV.exp() * difference_NV).sum(-1)


def weighted(
    divergence_N: Float[Tensor, " N"],
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
) -> Float[Tensor, " N"]:
    """An estimate under the sampling policy, weighed by the ratio: exact in value and gradient.

        ρ·k,   ρ = exp(ℓ − ℓ_old)

    By token ratios it is exact for the per-token KL in the states of the sampling policy. Where
    the ratio is at its bound, the whole product is constant: neither factor has a gradient.

    Source: DeepSeek-V3.2, arXiv:2512.02556 §3.1 (unbiased KL estimate).
    """
    log_ratio_N = log_prob_N - old_log_prob_N
    bounded_N = log_ratio_N.detach().abs() <= LIMIT
    divergence_N = torch.where(bounded_N, divergence_N, divergence_N.detach())
    return exponential(log_ratio_N) * divergence_N


def old_to_policy(
    log_prob_N: Float[Tensor, " N"], old_log_prob_N: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """The KL from the old policy, which drew the samples: exact in value and gradient.

        E_old[e^d − d − 1] = KL(old‖π),   d = ℓ − ℓ_old

    Source: the penalty of arXiv:1707.06347 eq. 8, by k3 of Schulman 2020.
    """
    return k3(old_log_prob_N, log_prob_N)


def policy_to_old(
    log_prob_N: Float[Tensor, " N"], old_log_prob_N: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """The KL to the old policy, from the old policy's samples: exact in value and gradient.

        E_old[ρ d − (ρ − 1)] = KL(π‖old),   ρ = e^d,   d = ℓ − ℓ_old

    Source: arXiv:1707.06347 eq. 8 with its sides exchanged, ρ·k3 of Schulman 2020.
    """
    difference_N = _difference(log_prob_N, old_log_prob_N)
    return difference_N.exp() * difference_N - difference_N.expm1()


def adapt_ppo(beta: float, kl: float, *, target: float) -> float:
    """PPO's rule for the coefficient of a KL penalty.

        β ← 2β if KL > 1.5 target,   β/2 if KL < target/1.5,   else β (β' = β)

    Source: arXiv:1707.06347 §4.
    """
    if kl > 1.5 * target:
        return beta * 2.0
    return beta / 2.0 if kl < target / 1.5 else beta


def adapt_ziegler(
    beta: float, kl: float, *, target: float, horizon: float, sequences: int
) -> float:
    """Ziegler's proportional rule; KL is the mean over sequences of the summed k1.

        β' = β (1 + clip(KL/target − 1, −0.2, 0.2) · m / horizon),   m the sequences of the step

    Source: Ziegler et al. 2019, arXiv:1909.08593 §2.2.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return beta * (1.0 + error * sequences / horizon)


def adapt_entropy(
    coefficient: float, entropy: float, *, target: float, delta: float, maximum: float
) -> float:
    """The coefficient of an entropy bonus that holds the entropy at a target.

        c ← min(c + Δ, c_max) if H ≤ target,   max(c − Δ, 0) else

    Source: Skywork-OR1, arXiv:2505.22312; the bounds as in TRL.
    """
    low = entropy <= target
    return min(coefficient + delta, maximum) if low else max(coefficient - delta, 0.0)


def _difference(log_prob_N: Tensor, other_log_prob_N: Tensor) -> Tensor:
    # Clamped here and not inside an exponential, so that value and gradient agree. The estimators
    # take e^x − 1 by expm1: near 0 the difference would lose its digits.
    return (log_prob_N - other_log_prob_N).clamp(-LIMIT, LIMIT)


def entropy(logits_NV: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """The exact entropy over the vocabulary, in nats; a logit of −inf adds 0.

        H_n = −Σ_v p(v) log p(v),   p = softmax(logits)

    Source: Shannon 1948; as a bonus, Williams and Peng 1991 and arXiv:1602.01783.
    """
    log_prob_NV = torch.log_softmax(logits_NV, dim=-1)
    finite_NV = log_prob_NV.masked_fill(log_prob_NV == -torch.inf, 0.0)
    return -(log_prob_NV.exp() * finite_NV).sum(-1)


def gaussian_log_prob(
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


def gaussian_entropy(log_std_ND: Float[Tensor, "#N D"]) -> Float[Tensor, "#N"]:
    """The differential entropy, in nats; below 0 where the density is above 1.

        H = Σ_d [ ½ + ½ log 2π + log σ_d ]

    Source: Cover and Thomas 2006, theorem 8.4.1.
    """
    return (log_std_ND + 0.5 + 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_kl(
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
