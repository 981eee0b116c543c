"""Perceptrons, policies against torch's own distributions, and running statistics."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, Independent, Normal, kl_divergence

from keel.config.control import Network
from keel.control.networks import (
    EPSILON,
    LIMIT,
    Actor,
    Categorical,
    DiagonalGaussian,
    Moments,
    Perceptron,
    TrainedNetwork,
    build_actor,
    perceptron,
)


def linear(network: Perceptron) -> list[nn.Linear]:
    return [layer for layer in network if isinstance(layer, nn.Linear)]


def test_layers_start_orthogonal_with_their_gains() -> None:
    network = perceptron(6, 3, Network(hidden=(8, 4)), 0.01, seed=1)
    gains = [2**0.5, 2**0.5, 0.01]
    for layer, gain in zip(linear(network), gains, strict=True):
        w = layer.weight.detach().double() / gain
        product = w @ w.T if len(w) <= w.shape[1] else w.T @ w
        # float32 weights: rows or columns of length 1, at right angles.
        torch.testing.assert_close(product, torch.eye(len(product)).double(), rtol=0, atol=1e-5)
        assert layer.bias.abs().max() == 0
    kinds = [type(layer) for layer in network]
    assert kinds == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]


def test_without_a_gain_they_start_uniform_as_torchs_own() -> None:
    network = perceptron(9, 4, Network(hidden=(100, 400)), None, seed=1)
    for layer, inputs in zip(linear(network), (9, 100, 400), strict=True):
        bound = inputs**-0.5
        for p in (layer.weight.detach(), layer.bias.detach()):
            assert 0.7 * bound < p.abs().max() <= bound
        # Of 900 numbers or more: three standard errors of a uniform one's deviation are 5 %.
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.fixture
def pair() -> tuple[Perceptron, Perceptron, TrainedNetwork]:
    first = perceptron(3, 2, Network(hidden=(4,)), 1.0, seed=1)
    second = perceptron(3, 1, Network(hidden=(4,)), 1.0, seed=2)
    return first, second, TrainedNetwork({"actor": first, "critic": second})


def test_the_vectors_gradient_is_the_parameters(
    pair: tuple[Perceptron, Perceptron, TrainedNetwork],
) -> None:
    first, second, trained = pair
    twins = deepcopy(first), deepcopy(second)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    (twins[0](x).square().sum() + twins[1](x).sum()).backward()
    trained.backward(first(x).square().sum() + second(x).sum())
    wanted = [p.grad.reshape(-1) for twin in twins for p in twin.parameters()]  # type: ignore[union-attr]
    assert trained.vector.grad is not None
    assert torch.equal(trained.vector.grad, torch.cat(wanted))


def test_a_quick_pass_sees_what_is_done_in_place(
    pair: tuple[Perceptron, Perceptron, TrainedNetwork],
) -> None:
    first, _, trained = pair
    forward, x = first.quick(), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    before = forward(x.numpy())
    saved = {name: tensor.clone() for name, tensor in trained.state().items()}
    with torch.no_grad():
        trained.vector.add_(1.0)
        wanted = first(x).numpy()
    # float32 sums of a few numbers up to 10, in another order.
    np.testing.assert_allclose(forward(x.numpy()), wanted, rtol=0, atol=1e-5)
    assert np.abs(wanted - before).max() > 1
    trained.restore(saved)
    np.testing.assert_array_equal(forward(x.numpy()), before)


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


Reals = npt.NDArray[np.float64]


def moments(*parts: Reals) -> Moments:
    made = Moments(parts[0].shape[1])
    for part in parts:
        made.add(part)
    return made


def rows(count: int) -> Reals:
    """Of very different means and deviations: a sum of squares would lose five digits here."""
    return np.random.default_rng(0).normal([3.0, -200.0, 0.0], [2.0, 0.1, 50.0], (count, 3))


def test_numbers_are_centred_scaled_and_cut() -> None:
    x = rows(1000)
    made = moments(x)
    deviation = np.sqrt(x.var(0) + EPSILON)
    normal = made.normal(x)
    assert normal.dtype == np.float32
    # float32 holds 1 to 6e-8; the numbers here are up to 4.
    np.testing.assert_allclose(normal, (x - x.mean(0)) / deviation, atol=1e-6)
    far = x.mean(0) + np.outer([-50, -9.5, 9.5, 50], deviation)
    cut = np.outer([-LIMIT, -9.5, 9.5, LIMIT], np.ones(3))
    np.testing.assert_allclose(made.normal(far), cut, rtol=1e-6)
    # Rewards keep their sign: they are scaled, and not centred.
    near = np.outer([-9.5, 0.0, 9.5], deviation)
    np.testing.assert_allclose(made.scaled(near), near / deviation, rtol=1e-6)
    assert made.scaled(50 * deviation).tolist() == [LIMIT] * 3


def test_without_a_deviation_they_stay_finite() -> None:
    x = rows(5)
    for before in (Moments(3).normal, Moments(3).scaled):
        np.testing.assert_array_equal(before(x), x.astype(np.float32))
    constant = moments(np.full((9, 1), 2.0))
    assert constant.normal(np.array([[2.0], [3.0]])).tolist() == [[0.0], [LIMIT]]
