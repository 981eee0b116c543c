"""Which tokens of an optimizer batch the surrogate keeps, read off the current policy.

None carries a gradient. A token that is left out keeps its place in the normaliser of the loss. A
batch is one optimizer step's: whole, before it is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.objective.segments import segment_mean, spread


def top_entropy(entropy_N: Float[Tensor, " N"], *, share: float) -> Bool[Tensor, " N"]:
    """The share of the tokens with the highest entropy: those where an answer branches.

        kept_n = [ H_n ≥ quantile_{1−q}(H) ]

    with the quantile interpolated linearly between the two tokens around it.

    Source: arXiv:2506.01939, q = 0.2.
    """
    return entropy_N >= quantile(entropy_N, 1 - share)


def off_policy_sequences(
    log_prob_N: Float[Tensor, " N"],
    engine_log_prob_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    bound: float,
) -> Bool[Tensor, " N"]:
    """Leaves out bad answers that the policy has moved away from.

        kept_n = [ A_n ≥ 0 or (1/L_i) Σ_{t∈i} (ℓ_engine,t − ℓ_t) ≤ δ ]

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv:2512.02556.
    """
    gap_S = segment_mean((engine_log_prob_N - log_prob_N).detach(), lengths_S)
    near_N = spread(gap_S <= bound, lengths_S, total=len(log_prob_N))
    return near_N | (advantage_N >= 0)


def total_variation(
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    *,
    low: float,
    high: float,
) -> Bool[Tensor, " N"]:
    """Leaves out the tokens whose probability has moved far already, where A pushes it further.

        kept_n = [ π − π_old ≤ ε_high ] where A_n > 0,   [ π − π_old ≥ −ε_low ] elsewhere

    Source: DPPO with total variation, arXiv:2602.04879.
    """
    moved_N = (log_prob_N.exp() - old_log_prob_N.exp()).detach()
    return torch.where(advantage_N > 0, moved_N <= high, moved_N >= -low)


def binary_kl(
    log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    *,
    low: float,
    high: float,
) -> Bool[Tensor, " N"]:
    """The same, by the divergence of the choice of this token against all others.

        kept_n = [ KL_n ≤ ε_high or π ≤ π_old ] where A_n > 0,   [ KL_n ≤ ε_low or π ≥ π_old ] else
        KL_n = π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π))

    Source: DPPO with the binary KL, arXiv:2602.04879.
    """
    log_p_N, log_q_N = old_log_prob_N.detach(), log_prob_N.detach()
    p_N = log_p_N.exp()
    # What float32 leaves of 1 − π near 0 is rounding.
    rest_p_N, rest_q_N = ((-x.expm1()).clamp(min=1e-8) for x in (log_p_N, log_q_N))
    kl_N = p_N * (log_p_N - log_q_N) + rest_p_N * (rest_p_N / rest_q_N).log()
    return torch.where(
        advantage_N > 0,
        (kl_N <= high) | (log_q_N <= log_p_N),
        (kl_N <= low) | (log_q_N >= log_p_N),
    )


def second_moment(
    log_prob_N: Float[Tensor, " N"], old_log_prob_N: Float[Tensor, " N"], *, bound: float
) -> Bool[Tensor, " N"]:
    """Leaves out the tokens with the largest log-ratios until their mean square is small.

        kept = the most tokens, smallest d² first, with  mean d² ≤ τ,   d = ℓ − ℓ_old

    Source: M2PO, arXiv:2510.01161.
    """
    square_N = (log_prob_N - old_log_prob_N).detach().square()
    sorted_N, order_N = square_N.sort(stable=True)
    count_N = torch.arange(1, len(square_N) + 1, device=square_N.device)
    kept_N = torch.zeros_like(order_N, dtype=torch.bool)
    # The means of the smallest rise with their number, so that those within the bound come first.
    kept_N[order_N] = sorted_N.cumsum(0) / count_N <= bound
    return kept_N


def covariance(
    log_prob_N: Float[Tensor, " N"], advantage_N: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Each token's part of the covariance of log-probability and advantage, which drives the
    entropy.

        cov_n = (A_n − mean A) · (ℓ_n − mean ℓ)

    Source: arXiv:2505.22617.
    """
    log_prob_N = log_prob_N.detach()
    return (advantage_N - advantage_N.mean()) * (log_prob_N - log_prob_N.mean())


def clip_cov(
    log_prob_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    clipped_N: Bool[Tensor, " N"],
    *,
    share: float,
    floor: float,
    cap: float,
    seed: int,
) -> Bool[Tensor, " N"]:
    """Leaves out a random few of the tokens with a high covariance.

        kept = all but max(1, ⌊q N⌋) at random of { n : floor < cov_n < cap, not clipped }

    Source: Clip-Cov, arXiv:2505.22617, q = 2e-4 and bounds 1 and 5 as in its code.
    """
    cov_N = covariance(log_prob_N, advantage_N)
    places = ((cov_N > floor) & (cov_N < cap) & ~clipped_N).nonzero().flatten()
    places = places[cov_N[places].argsort(stable=True)]  # by value: no order of sequences counts
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(places), generator=generator)[: max(1, int(share * len(cov_N)))]
    kept_N = torch.ones_like(clipped_N)
    kept_N[places[chosen.to(places.device)]] = False
    return kept_N


def highest(x_N: Float[Tensor, " N"], *, share: float) -> Bool[Tensor, " N"]:
    """The share of the tokens with the highest numbers, at least one; of equal ones the first.

        chosen = the max(1, ⌊k N⌋) largest x_n

    Source: the choice of KL-Cov, arXiv:2505.22617.
    """
    order_N = x_N.argsort(descending=True, stable=True)
    chosen_N = torch.zeros_like(order_N, dtype=torch.bool)
    chosen_N[order_N[: max(1, int(share * len(x_N)))]] = True
    return chosen_N


def quantile(x_N: Float[Tensor, " N"], share: float) -> Float[Tensor, ""]:
    """The number that a share of all are below, between two by linear interpolation.

        x_(⌊h⌋) + (h − ⌊h⌋) (x_(⌊h⌋+1) − x_(⌊h⌋)),   h = q (N − 1)

    Of as many numbers as there are: `torch.quantile` takes 16 million.

    Source: Hyndman and Fan 1996, definition 7.
    """
    sorted_N = x_N.sort().values
    at = share * (len(sorted_N) - 1)
    low = int(at)
    pair = sorted_N[low : low + 2]
    return torch.lerp(pair[0], pair[-1], at - low)
