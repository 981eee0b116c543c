"""Policies: quick forward passes, draws, and what they find likely, against torch's own."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, Independent, Normal, kl_divergence

from keel.config.control import Network
from keel.control.actor import Actor, Categorical, DiagonalGaussian, build_actor
from keel.control.networks import perceptron

SIZE, ACTIONS = 5, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of a few terms


def loud(actor: Actor, seed: int) -> Actor:
    """The actor in float64 with weights that make its distributions far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    actor.double()
    with torch.no_grad():
        for p in actor.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.6)
    return actor


def categorical(seed: int) -> Actor:
    return loud(Categorical(SIZE, ACTIONS, Network(hidden=(8,)), seed=0), seed)


def gaussian(seed: int) -> Actor:
    return loud(DiagonalGaussian(SIZE, ACTIONS, Network(hidden=(8,)), 0.0, seed=0), seed)


def observations(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SIZE, generator=generator, dtype=torch.float64)


def of_torch(actor: Actor, observation_NO: Tensor) -> Distribution:
    """The same distributions as torch has them."""
    if isinstance(actor, DiagonalGaussian):
        scale = actor.log_std.exp().expand(len(observation_NO), -1)
        return Independent(Normal(actor(observation_NO), scale), 1)
    return TorchCategorical(logits=actor(observation_NO))


# ---------------------------------------------------------------- quick


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (7,), (64, 32)])
def test_quick_is_torchs_forward(
    activation: Literal["tanh", "relu"], hidden: tuple[int, ...]
) -> None:
    network = perceptron(SIZE, 3, Network(hidden=hidden, activation=activation), 1.0, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            if p.ndim == 1:  # biases start at 0
                p.copy_(torch.randn(p.shape, generator=generator))
        x = observations(50).float()
        wanted = network(x).numpy()
    found = network.quick()(x.numpy())
    assert found.dtype == np.float32
    # float32 sums in another order; relative to the largest, since outputs may cancel to 0.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


# ---------------------------------------------------------------- draws


def test_gumbel_draws_have_the_softmax_frequencies() -> None:
    actor = categorical(2).float()
    x = observations(1, 4).float()
    with torch.no_grad():
        probability = torch.softmax(actor(x)[0], -1).double().numpy()
    assert probability.min() > 0.02  # enough of each for the test below
    assert probability.max() > 0.4  # and not uniform
    draws = 40_000
    noise = actor.noise(np.random.default_rng(7), (draws,))
    assert noise.shape == (draws, ACTIONS)
    chosen = actor.acting()(np.repeat(x.numpy(), draws, 0), noise)
    counts = np.bincount(chosen, minlength=ACTIONS)
    wanted = draws * probability
    # The 0.999 quantile for 3 degrees of freedom.
    assert ((counts - wanted) ** 2 / wanted).sum() < 16.27
    best = actor.acting()(x.numpy(), None)
    assert best.tolist() == [int(probability.argmax())]


def test_gaussian_draws_have_mean_and_deviation() -> None:
    actor = gaussian(3).float()
    assert isinstance(actor, DiagonalGaussian)
    x = observations(1, 5).float()
    draws = 40_000
    noise = actor.noise(np.random.default_rng(8), (draws,))
    drawn = actor.acting()(np.repeat(x.numpy(), draws, 0), noise)
    with torch.no_grad():
        mean, deviation = actor(x)[0].numpy(), actor.log_std.exp().numpy()
    assert np.ptp(deviation) > 0.2
    # Four standard errors: σ/√n of the mean, σ/√(2n) of the deviation.
    assert (np.abs(drawn.mean(0) - mean) < 4 * deviation / draws**0.5).all()
    assert (np.abs(drawn.std(0) - deviation) < 4 * deviation / (2 * draws) ** 0.5).all()
    correlation = np.corrcoef(drawn.T) - np.eye(ACTIONS)
    assert np.abs(correlation).max() < 4 / draws**0.5
    np.testing.assert_allclose(actor.acting()(x.numpy(), None)[0], mean, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- likelihoods


@pytest.mark.parametrize("make", [categorical, gaussian])
def test_judge_is_torchs_distribution(make: Any) -> None:
    actor, x = make(4), observations(30)
    distribution = of_torch(actor, x)
    torch.manual_seed(0)
    action = distribution.sample()
    log_prob, entropy = actor.evaluate_actions(x, action)
    torch.testing.assert_close(log_prob, distribution.log_prob(action), **EXACT)
    torch.testing.assert_close(entropy, distribution.entropy(), **EXACT)
    # And the gradients, of a sum that neither part cancels out of.
    parameters = list(actor.parameters())
    mine = torch.autograd.grad((log_prob + 0.3 * entropy).sum(), parameters)
    other = distribution.log_prob(action) + 0.3 * distribution.entropy()
    torchs = torch.autograd.grad(other.sum(), parameters)
    for one, two in zip(mine, torchs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [categorical, gaussian])
def test_divergence_is_torchs(make: Any) -> None:
    actor, reference, x = make(5), make(6), observations(30)
    found = actor.divergence(reference, x)
    wanted = kl_divergence(of_torch(actor, x), of_torch(reference, x))
    assert wanted.min() > 0.01
    torch.testing.assert_close(found, wanted, **EXACT)
    torch.testing.assert_close(actor.divergence(actor, x), torch.zeros(30).double(), **EXACT)
    found.sum().backward()
    # The reference stands still; each weight of the policy moves.
    assert all(p.grad is None for p in reference.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in actor.parameters())


# ---------------------------------------------------------------- beginnings


def test_the_policy_fits_the_actions() -> None:
    discrete = build_actor(SIZE, Discrete(3), Network(), -0.5, 0)
    assert isinstance(discrete, Categorical)
    assert discrete(observations(2).float()).shape == (2, 3)
    real = build_actor(SIZE, Box(-1, 1, (6,)), Network(), -0.5, 0)
    assert isinstance(real, DiagonalGaussian)
    assert real(observations(2).float()).shape == (2, 6)
    assert real.log_std.tolist() == [-0.5] * 6
