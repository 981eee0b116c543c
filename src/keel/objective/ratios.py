"""Logarithms of importance ratios, one for each token.

They have one signature; `exponential` makes a ratio of them. Nothing is clamped before a mean.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.segments import segment_mean, segment_sum, spread

LIMIT = 20.0
"""Log-ratios beyond this are cut inside the exponential: e^20 is 5e8, finite in every product."""


def exponential(log_ratio_N: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The ratio, finite for every log-ratio.

        ρ = exp(clip(log ρ, −20, 20))

    Source: the ratio of arXiv:1707.06347 §3; the bound is numerical and verl has it too.
    """
    return log_ratio_N.clamp(-LIMIT, LIMIT).exp()


def log_linear(
    log_prob_N: Float[Tensor, " N"],
    engine_log_prob_N: Float[Tensor, " N"],
    lag_N: Float[Tensor, " N"],
) -> Float[Tensor, " N"]:
    """The log-probability of a proximal policy between the policy and the one that sampled.

        ℓ_old,n = sg[ℓ_n + α_n (ℓ_engine,n − ℓ_n)],  α_n = 1 / max(d_n, 1)

    `lag_N` is d, by how many updates the weights that sampled are behind.

    Source: A-3PO, arXiv:2512.06547, with AReaL's α where d = 0.
    """
    now_N = log_prob_N.detach()
    return now_N.lerp(engine_log_prob_N.to(now_N), 1 / lag_N.clamp(min=1))


def none(
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " N"]:
    """No ratio: the log-probability itself, for the `log_prob` surrogate.

        ℓ_n = log π(o_n)

    Source: Williams 1992 (REINFORCE).
    """
    return log_prob_N


def token(
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " N"]:
    """The ratio of each token.

        log ρ_n = ℓ_n − ℓ_old,n

    Source: PPO, arXiv:1707.06347 §3; GRPO, arXiv:2402.03300 eq. 3.
    """
    return log_prob_N - old_log_prob_N


def sequence(
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " N"]:
    """The geometric mean of a sequence's token ratios, with a gradient through every token.

        log ρ_i = (1/L_i) Σ_t (ℓ_t − ℓ_old,t)

    Source: GSPO, arXiv:2507.18071 eq. 7.
    """
    mean_S = segment_mean(log_prob_N - old_log_prob_N, lengths_S)
    return spread(mean_S, lengths_S, total=len(log_prob_N))


def sequence_token(
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " N"]:
    """The sequence's ratio in value, with a gradient through the token alone.

        log ρ_n = sg[log ρ_i] + ℓ_n − sg[ℓ_n]

    Source: GSPO-token, arXiv:2507.18071 eq. 14.
    """
    ratio_N = sequence(log_prob_N.detach(), old_log_prob_N.detach(), lengths_S)
    return ratio_N + (log_prob_N - log_prob_N.detach())


def sequence_product(
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " N"]:
    """The ratio of the whole completion as one action.

        log ρ_i = Σ_t (ℓ_t − ℓ_old,t)

    Source: RLOO's off-policy form in TRL, after arXiv:2402.14740 §2.2.
    """
    sum_S = segment_sum(log_prob_N - old_log_prob_N, lengths_S)
    return spread(sum_S, lengths_S, total=len(log_prob_N))
