"""GAE's λ and baselines against the exact advantage and the exact gradient of an enumerable model.

No sampling but for the group baselines: bias and variance are sums over all completions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.objective import gae, group, segments
from studies.common import markdown
from studies.evidence.enumerable import EnumerableLM

LAMBDAS = (0.0, 0.5, 0.9, 0.95, 1.0)
CRITICS = (0.0, 0.1, 0.3)
"""Standard deviation of the critic's error in each prefix, independent of each other."""
BATCH = 128
GROUP, GROUPS = 8, 4_000
PROMPTS = 10


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimator of the gradient, relative to the length of the exact gradient.

    `advantage_bias` and `advantage_std` are root mean squares over the tokens that the policy
    writes, in units of the root mean square of the exact advantage.
    """

    advantage_bias: float
    advantage_std: float
    gradient_bias: float
    gradient_std: float
    """Root of the trace of the covariance of one completion's gradient."""

    @property
    def error(self) -> float:
        """Root mean square error of the gradient of a batch of 128 completions."""
        return float((self.gradient_bias**2 + self.gradient_std**2 / BATCH) ** 0.5)


def estimate(model: EnumerableLM, advantage_N: Tensor) -> Estimate:
    """Bias and variance of an advantage, by summation."""
    exact_ZV, visits_ZV = model.advantage_ZV, model.visits_ZV
    scale = (visits_ZV * exact_ZV.square()).sum()
    mean_ZV = model.expectation_ZV(advantage_N)
    variance_ZV = model.expectation_ZV(advantage_N.square()) - mean_ZV.square()
    probability_S = model.probability_S
    score_SK = model.score_SK(advantage_N)
    exact_K = probability_S @ model.score_SK(exact_ZV[model.state_N, model.token_N])
    mean_K = probability_S @ score_SK
    trace = probability_S @ (score_SK - mean_K).square().sum(-1)
    length = exact_K.norm()
    return Estimate(
        float(((visits_ZV * (mean_ZV - exact_ZV).square()).sum() / scale).sqrt()),
        float(((visits_ZV * variance_ZV.clamp(min=0)).sum() / scale).sqrt()),
        float((mean_K - exact_K).norm() / length),
        float(trace.sqrt() / length),
    )


def lambda_estimate(seed: int, lam: float, critic_error: float) -> Estimate:
    """Keel's GAE with a critic that is wrong by noise, γ = 1."""
    model = EnumerableLM.drawn(seed)
    rng = torch.Generator().manual_seed(1_000 + seed)
    noise_Z = torch.randn(len(model.logits_ZV), generator=rng, dtype=torch.float64)
    value_N = (model.value_Z + critic_error * noise_Z)[model.state_N]
    reward_N = segments.on_last(model.reward_S, model.lengths_S)
    goes_on_N = segments.continues(model.lengths_S)
    next_N = torch.where(goes_on_N, value_N.roll(-1), torch.zeros_like(value_N))
    delta_N = gae.td_error(reward_N, value_N, next_N, gamma=1.0)
    return estimate(model, gae.gae(delta_N, goes_on_N, gamma=1.0, lam=lam))


# ---------------------------------------------------------------- baselines


def baseline_variances(seed: int) -> dict[str, float]:
    """The variance of the gradient of one completion with each baseline; without one it is 1.

    A group's mean that holds a completion's own reward shortens the mean gradient too (OPO: by
    about 1/8), so each variance is divided by the squared length of its own mean gradient.

    Ten prompts, each a model of its own, from one with 1 right completion in 10 to one with 9.
    """
    shares = torch.linspace(0.1, 0.9, PROMPTS).tolist()
    models = [EnumerableLM.drawn(100 * seed + k, share) for k, share in enumerate(shares)]
    means = [float(m.probability_S @ m.reward_S) for m in models]
    overall = sum(means) / PROMPTS

    def spread(model: EnumerableLM, advantage_S: Tensor) -> Tensor:
        return segments.spread(advantage_S, model.lengths_S)

    exact: dict[str, Callable[[EnumerableLM, float], Tensor]] = {
        "none": lambda m, mean: spread(m, m.reward_S),
        "mean of the batch": lambda m, mean: spread(m, m.reward_S - overall),
        "exact mean of the prompt": lambda m, mean: spread(m, m.reward_S - mean),
        "exact value of each prefix": lambda m, mean: spread(m, m.reward_S) - m.value_Z[m.state_N],
        "exact advantage": lambda m, mean: m.advantage_ZV[m.state_N, m.token_N],
    }
    found = {
        name: _relative([moments(m, make(m, mean)) for m, mean in zip(models, means, strict=True)])
        for name, make in exact.items()
    }
    grouped: dict[str, Callable[..., Tensor]] = {
        "mean of the other 7 (RLOO)": lambda r, g, n: group.leave_one_out(r, g),
        "length-weighted mean of 8 (OPO)": group.optimal,
    }
    for name, make_group in grouped.items():
        found[name] = _relative([group_moments(m, seed, make_group) for m in models])
    return {name: value / found["none"] for name, value in found.items()}


def _relative(moments_of_prompts: list[tuple[float, float]]) -> float:
    """The variance over the squared length of the mean gradient, prompts being independent."""
    variance = sum(one for one, _ in moments_of_prompts)
    return variance / sum(length for _, length in moments_of_prompts)


def moments(model: EnumerableLM, advantage_N: Tensor) -> tuple[float, float]:
    """Of one completion's gradient: the trace of the covariance, the mean's squared length."""
    score_SK, p_S = model.score_SK(advantage_N), model.probability_S
    mean_K = p_S @ score_SK
    return float(p_S @ (score_SK - mean_K).square().sum(-1)), float(mean_K.square().sum())


def group_moments(
    model: EnumerableLM, seed: int, make: Callable[..., Tensor]
) -> tuple[float, float]:
    """The same where advantages come from groups of 8, estimated from sampled groups.

    The covariance is that of a group's mean gradient, times 8.
    """
    rng = torch.Generator().manual_seed(seed)
    chosen = model.probability_S.multinomial(GROUPS * GROUP, replacement=True, generator=rng)
    groups = torch.arange(GROUPS).repeat_interleave(GROUP)
    advantage_S = make(model.reward_S[chosen], groups, model.lengths_S[chosen])
    unit_SK = model.score_SK(torch.ones(len(model.state_N), dtype=torch.float64))
    gradient_GK = (advantage_S[:, None] * unit_SK[chosen]).reshape(GROUPS, GROUP, -1).mean(1)
    mean_K = gradient_GK.mean(0)
    variance = float((gradient_GK - mean_K).square().sum(-1).mean())
    return GROUP * variance, float(mean_K.square().sum()) - variance / GROUPS


# ---------------------------------------------------------------- tables


def lambda_table(seeds: int = 10) -> str:
    """Each λ with each critic, as Markdown: medians over models."""
    fields = ("advantage_bias", "advantage_std", "gradient_bias", "gradient_std", "error")
    head = ("error of the values", "λ", *(field.replace("_", " ") for field in fields))
    rows = []
    for critic in CRITICS:
        for lam in LAMBDAS:
            found = [lambda_estimate(seed, lam, critic) for seed in range(seeds)]
            middle = (statistics.median(getattr(one, f) for one in found) for f in fields)
            rows.append((f"{critic:g}", f"{lam:g}", *(f"{value:.3f}" for value in middle)))
    return markdown(head, rows)


def baseline_table(seeds: int = 10) -> str:
    """The variance with each baseline, as Markdown: medians over sets of prompts."""
    variances = [baseline_variances(seed) for seed in range(seeds)]
    rows = [
        (name, f"{statistics.median(one[name] for one in variances):.2f}") for name in variances[0]
    ]
    return markdown(("baseline", "variance"), rows)
