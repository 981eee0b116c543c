"""The terms of the loss: factors, metrics, and the user's own functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from keel.algorithms.advantages import CustomAdvantage
from keel.algorithms.corrections import MaskWeights, Truncate
from keel.algorithms.group_advantages import GroupRelative
from keel.algorithms.losses import Adaptive, AdaptiveEntropy, Divergence
from keel.algorithms.presets import PRESETS
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip, CustomSurrogate, Geometric
from keel.algorithms.weighted import Cispo
from keel.learn.advantages import RolloutRewards, estimate
from keel.learn.loss import adapted_beta, adapted_bonus, loss, prepare, with_bonus
from keel.models.head import Scores
from keel.objective import preference
from keel.objective.group import group_relative
from keel.objective.surrogates import clip
from keel.types import KeelError
from tests.learn.flat import Sample, blank, gradient, per_sequence, sample

LENGTHS, GROUPS = (5, 1, 9, 3), (0, 1, 0, 1)


def algorithm(**choices: Any) -> Algorithm:
    base = {"advantage": GroupRelative(), "ratio": "token", "surrogate": Clip()}
    return Algorithm(**{**base, "weights": Weights(), **choices})


def grad(chosen: Algorithm, made: Sample, beta: float = 0.1) -> Tensor:
    leaf = made.log_prob_N.clone().requires_grad_()
    whole = prepare(chosen, made.batch, made.estimates, 16)
    out = loss(chosen, whole, Scores(leaf, None, None, None), beta)
    (found,) = torch.autograd.grad(out.total, leaf)
    return found


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_multiplies_the_surrogate_and_not_the_divergence(level: str) -> None:
    made = per_sequence(sample(LENGTHS, GROUPS, 0, shift=0.1))
    # So that weights lie on either side of the cap.
    batch = replace(made.batch, engine_log_prob_N=made.batch.engine_log_prob_N - 0.05)
    made = replace(made, batch=batch)
    divergence = Divergence(estimator="k3", beta=0.1)
    correction = Truncate(level=level, cap=1.0)  # type: ignore[arg-type]
    plain = grad(algorithm(), made)
    both = grad(algorithm(divergence=divergence, corrections=(correction,)), made)
    kl_alone = grad(algorithm(divergence=divergence), made) - plain
    assert batch.old_log_prob_N is not None
    gap_N = batch.old_log_prob_N - batch.engine_log_prob_N
    if level == "sequence":
        sums = torch.stack([part.sum() for part in gap_N.split(LENGTHS)])
        gap_N = sums.repeat_interleave(torch.tensor(LENGTHS))
    expected = plain * gap_N.exp().clamp(max=1.0) + kl_alone
    assert (gap_N.exp() > 1.0).any()
    torch.testing.assert_close(both, expected, rtol=0, atol=1e-15)


def test_masked_token_counts_in_the_normaliser() -> None:
    made = per_sequence(sample(LENGTHS, GROUPS, 0, shift=0.0))
    batch = made.batch
    masked = algorithm(corrections=(MaskWeights(floor=0.9, cap=1.1),))
    found = grad(masked, made)
    plain = grad(algorithm(), made)
    assert batch.old_log_prob_N is not None
    weight_N = (batch.old_log_prob_N - batch.engine_log_prob_N).exp()
    inside_N = (weight_N >= 0.9) & (weight_N <= 1.1)
    assert 0 < int(inside_N.sum()) < inside_N.numel()
    torch.testing.assert_close(found, plain * weight_N * inside_N, rtol=0, atol=1e-15)


def mine(log_ratio_N: Tensor, advantage_N: Tensor, lengths_S: Tensor, *, width: float) -> Tensor:
    return clip(log_ratio_N, advantage_N, lengths_S, low=width, high=width)


def doubled(reward_S: Tensor, groups_S: Tensor, *, factor: float = 2.0) -> Tensor:
    return factor * group_relative(reward_S, groups_S, scale="std", epsilon=1e-4)


def wrong_shape(reward_S: Tensor) -> Tensor:
    return reward_S[:1]


def asks_too_much(moon_phase_N: Tensor) -> Tensor:
    return moon_phase_N


def test_users_surrogate_and_advantage_equal_built_in_ones() -> None:
    made = per_sequence(sample(LENGTHS, GROUPS, 0, shift=0.3))
    own = CustomSurrogate(function=f"{__name__}:mine", options={"width": 0.1})
    ours = Clip(low=0.1, high=0.1)
    assert torch.equal(grad(algorithm(surrogate=own), made), grad(algorithm(surrogate=ours), made))
    judged = RolloutRewards(torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64))
    expected = estimate(algorithm(), blank(LENGTHS, GROUPS), judged, 0.0).advantage_N
    custom = CustomAdvantage(function=f"{__name__}:doubled", options={"factor": 3.0})
    found = estimate(algorithm(advantage=custom), blank(LENGTHS, GROUPS), judged, 0.0).advantage_N
    assert torch.equal(found, 3 * expected)


@pytest.mark.parametrize(
    ("function", "reason"),
    [("wrong_shape", "wanted one number"), ("asks_too_much", "moon_phase_N"), ("none", "none")],
)
def test_error_in_a_users_function_is_named(function: str, reason: str) -> None:
    custom = CustomAdvantage(function=f"{__name__}:{function}")
    judged = RolloutRewards(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(KeelError, match=reason):
        estimate(algorithm(advantage=custom), blank(LENGTHS, GROUPS), judged, 0.0)


@pytest.mark.parametrize(
    "surrogate",
    [Clip(low=0.1, high=0.3), Cispo(floor=0.9, cap=1.3), Geometric(low=0.1, high=0.3)],
    ids=lambda s: s.kind,
)
def test_clip_fractions_count_ratios_outside_the_surrogates_edges(surrogate: Any) -> None:
    made = per_sequence(sample(LENGTHS, GROUPS, 0, shift=0.0))
    whole = prepare(algorithm(surrogate=surrogate), made.batch, made.estimates, 16)
    assert made.batch.old_log_prob_N is not None
    ratio_N = torch.tensor([0.8, 0.95, 1.4], dtype=torch.float64).repeat(6)
    scores = Scores(made.batch.old_log_prob_N + ratio_N.log(), None, None, None)
    metrics = loss(algorithm(surrogate=surrogate), whole, scores, 0.0).metrics
    low, high = (0.9, 1.3) if surrogate.kind != "geometric" else (math.exp(-0.1), math.exp(0.3))
    below = ((ratio_N < low) & (whole.advantage_N < 0)).double().mean()
    above = ((ratio_N > high) & (whole.advantage_N > 0)).double().mean()
    assert below > 0
    assert above > 0
    assert float(metrics["clip_ratio/low_mean"]) == pytest.approx(float(below), rel=1e-12)
    assert float(metrics["clip_ratio/high_mean"]) == pytest.approx(float(above), rel=1e-12)


def test_online_dpo_of_one_pair_is_the_loss_of_its_stage() -> None:
    made = sample((4, 3), (0, 0), 1, shift=0.2)
    chosen = PRESETS["online_dpo"].algorithm
    for rewards in ((1.0, 0.0), (0.2, 0.7), (0.5, 0.5)):
        outcome_N = torch.tensor(rewards, dtype=torch.float64).repeat_interleave(
            made.batch.lengths_S
        )
        estimates = replace(made.estimates, outcome_N=outcome_N)
        value, slope = gradient(chosen, replace(made, estimates=estimates), [[0, 1]])
        leaf, reference_N = (
            made.log_prob_N.clone().requires_grad_(),
            made.batch.reference_log_prob_N,
        )
        assert reference_N is not None
        first, second = (part.sum() for part in (leaf - reference_N).split([4, 3]))
        gap = first - second if rewards[0] > rewards[1] else second - first
        one = torch.ones(1, dtype=torch.float64)
        wanted = preference.dpo(gap.view(1), one, beta=0.1, smoothing=0.0).sum()
        if rewards[0] == rewards[1]:
            wanted = 0 * wanted  # nothing is compared
        torch.testing.assert_close(value, wanted.detach(), rtol=0, atol=1e-14)
        expected = torch.autograd.grad(wanted, leaf)[0]
        torch.testing.assert_close(slope[:7], expected, rtol=0, atol=1e-14)


def test_entropy_bonus_lowers_the_loss_by_its_mean_over_tokens() -> None:
    made = per_sequence(sample(LENGTHS, GROUPS, 0, shift=0.1))
    scores = Scores(made.log_prob_N, made.entropy_N, None, None)
    whole = prepare(algorithm(), made.batch, made.estimates, 16)
    plain, bonus = (loss(algorithm(entropy=b), whole, scores, 0.0).total for b in (0.0, 0.3))
    torch.testing.assert_close(bonus - plain, -0.3 * made.entropy_N.mean(), rtol=0, atol=1e-12)


def test_adaptive_bonus_is_the_loop() -> None:
    """Of Skywork-OR1: c grows while the entropy is low, and is applied only then."""
    rule = {"coefficient": 0.01, "target": 0.5, "delta": 0.02, "maximum": 0.05}
    chosen = algorithm(entropy=AdaptiveEntropy(**rule))
    state: Sequence[float] = ()
    c, low = 0.01, True
    for entropy in (0.6, 0.4, 0.5, 0.3, 0.7, 0.2, 0.2):
        assert with_bonus(chosen, state).entropy == (c if low else 0.0)
        state = adapted_bonus(chosen, state, entropy)
        low = entropy <= 0.5
        c = min(c + 0.02, 0.05) if low else max(c - 0.02, 0.0)
        assert state == (c, entropy)
    fixed = algorithm(entropy=0.3)
    assert with_bonus(fixed, ()) is fixed
    assert adapted_bonus(fixed, (), 0.1) == ()


@pytest.mark.parametrize("rule", ["ppo", "ziegler"])
def test_beta_follows_finite_divergences_only(rule: Literal["ppo", "ziegler"]) -> None:
    adaptive = Adaptive(rule=rule)
    assert adapted_beta(adaptive, 0.1, kl=1.0, sequences=64) > 0.1
    for kl in (math.nan, math.inf):
        assert adapted_beta(adaptive, 0.1, kl=kl, sequences=64) == 0.1
