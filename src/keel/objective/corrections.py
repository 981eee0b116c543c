"""Weights for an engine whose log-probabilities differ from the trainer's.

They multiply the surrogate alone, carry no gradient, and are exactly 1 where the two agree. With

    ω = exp(ℓ_old − ℓ_engine)

per token, or the product over a sequence. A token or a sequence of weight 0 keeps its place in the
normaliser of the loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.objective.ratios import exponential
from keel.objective.segments import segment_mean, segment_sum, spread

Level = Literal["token", "sequence"]
Statistic = Literal["k1", "k2", "k3"]
Over = Literal["token", "sum", "mean", "max"]


def weight(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    level: Level,
) -> Float[Tensor, " N"]:
    """The importance weight of each token, or the unnormalised product over its sequence.

        ω_n = exp(ℓ_old,n − ℓ_engine,n),   or   exp( Σ_{t∈i} (ℓ_old,t − ℓ_engine,t) )

    Source: importance sampling, Kahn and Marshall 1953.
    """
    log_N = (old_log_prob_N - engine_log_prob_N).detach()
    if level == "sequence":
        log_N = spread(segment_sum(log_N, lengths_S), lengths_S, total=len(log_N))
    return exponential(log_N)


def truncate(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    level: Level,
    cap: float,
) -> Float[Tensor, " N"]:
    """Truncated importance sampling.

        c_n = sg[ min(ω_n, C) ]

    Source: Ionides 2008; for engines, Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training", C = 2.
    """
    return weight(engine_log_prob_N, old_log_prob_N, lengths_S, level=level).clamp(max=cap)


def mask(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    level: Level,
    floor: float,
    cap: float,
) -> Float[Tensor, " N"]:
    """The importance weight inside a band, 0 outside.

        c_n = sg[ ω_n · 1(floor ≤ ω_n ≤ cap) ]

    Source: IcePop, Ling Team 2025, arXiv:2510.18855 (masked importance sampling).
    """
    weight_N = weight(engine_log_prob_N, old_log_prob_N, lengths_S, level=level)
    inside_N = (weight_N >= floor) & (weight_N <= cap)
    return torch.where(inside_N, weight_N, torch.zeros_like(weight_N))


def geometric_mask(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    floor: float,
    cap: float,
) -> Bool[Tensor, " N"]:
    """Whether a sequence's weights are near 1 in their geometric mean, which no length moves.

        kept_i = [ floor ≤ exp( (1/L_i) Σ_{t∈i} log ω_t ) ≤ cap ]

    Source: Liu et al. 2025, "When speed kills stability" (geometric sequence masking).
    """
    log_N = (old_log_prob_N - engine_log_prob_N).detach()
    mean_S = exponential(segment_mean(log_N, lengths_S))
    return spread((mean_S >= floor) & (mean_S <= cap), lengths_S, total=len(log_N))


def reject(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    statistic: Statistic,
    over: Over,
    cap: float,
    floor: float = 0.0,
) -> Bool[Tensor, " N"]:
    """Whether a statistic of the weights of a token, or of its sequence, is within its bounds.

        k1 = −log ω:                             floor ≤ exp(k1) ≤ cap
        k2 = ½ (log ω)²,   k3 = ω − 1 − log ω:   k ≤ cap

    of the token, or their sum, mean or maximum over the sequence: estimates of KL(engine‖old).

    Source: Schulman 2020 (the estimators); as rejection, verl 2026, "rollout correction".
    """
    log_N = (old_log_prob_N - engine_log_prob_N).detach()
    value_N = {
        "k1": lambda: -log_N,
        "k2": lambda: log_N.square() / 2,
        "k3": lambda: exponential(log_N) - 1 - log_N,
    }[statistic]()
    value_N = _over(value_N, lengths_S, over)
    if statistic != "k1":
        return value_N <= cap
    ratio_N = exponential(value_N)
    return (ratio_N >= floor) & (ratio_N <= cap)


def outlier_mask(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    floor: float,
    cap: float,
) -> Bool[Tensor, " N"]:
    """Whether no token of the sequence has a weight outside wide bounds.

        kept_i = Π_{t∈i} [ floor ≤ ω_t ≤ cap ]

    Source: SkyRL 2026, outlier token masking.
    """
    weight_N = weight(engine_log_prob_N, old_log_prob_N, lengths_S, level="token")
    outside_N = ((weight_N < floor) | (weight_N > cap)).to(weight_N)
    return spread(segment_sum(outside_N, lengths_S) == 0, lengths_S, total=len(weight_N))


def normalise(
    weight_N: Float[Tensor, " N"], lengths_S: Int[Tensor, " S"], *, level: Level
) -> Float[Tensor, " N"]:
    """Weights over their mean: over tokens, or over sequences of the weights of each one's tokens.

        c_n ← c_n / ( (1/N) Σ_m c_m ),   or   c_n / ( (1/S) Σ_i (1/L_i) Σ_{t∈i} c_t )

    Unchanged where the mean is 0.

    Source: self-normalised importance sampling, Hesterberg 1995.
    """
    mean = weight_N.mean() if level == "token" else segment_mean(weight_N, lengths_S).mean()
    return weight_N / torch.where(mean > 0, mean, torch.ones_like(mean))


def effective_sample_size(weight_N: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """The share of its N tokens that an importance-weighted mean is worth, in [1/N, 1].

        ESS/N = (Σ_n ω_n)² / (N Σ_n ω_n²)

    Source: Kish 1965; for importance weights Kong 1992.
    """
    return weight_N.sum().square() / (weight_N.square().sum() * len(weight_N))


def chi_squared(weight_N: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """The χ² divergence of the trainer from the engine, by the weights of tokens or of sequences.

        χ² = (1/N) Σ_n ω_n² − 1

    About 1/ESS − 1.

    Source: Pearson 1900; as a metric, verl 2026, "rollout correction".
    """
    return weight_N.square().mean() - 1


def perplexity_ratio(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, ""]:
    """How much higher the trainer's perplexity of a sequence is than the engine's, on average.

        r = (1/S) Σ_i exp( (1/L_i) Σ_{t∈i} (ℓ_engine,t − ℓ_old,t) )

    Source: Jelinek et al. 1977 (perplexity); as a metric, verl 2026, "rollout correction".
    """
    return exponential(segment_mean(engine_log_prob_N - old_log_prob_N, lengths_S)).mean()


def _over(value_N: Tensor, lengths_S: Tensor, over: Over) -> Tensor:
    if over == "token":
        return value_N
    if over == "max":
        # Segments of length 0 have no maximum, and no token to give it to. The lengths are not
        # checked on a GPU, whose host would wait, nor where there are none, which fails.
        unchecked = lengths_S.is_cuda or lengths_S.numel() == 0
        found_S = torch.segment_reduce(
            value_N, "max", lengths=lengths_S, initial=-torch.inf, unsafe=unchecked
        )
    else:
        found_S = (segment_sum if over == "sum" else segment_mean)(value_N, lengths_S)
    return spread(found_S, lengths_S, total=len(value_N))
