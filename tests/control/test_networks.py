"""Perceptrons: how they begin, and their parameters as one vector."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from keel.config.control import Network
from keel.control.networks import Perceptron, TrainedNetwork, perceptron


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


def test_one_vector_holds_every_parameter(
    pair: tuple[Perceptron, Perceptron, TrainedNetwork],
) -> None:
    first, second, trained = pair
    every = [*first.parameters(), *second.parameters()]
    assert trained.vector.numel() == sum(p.numel() for p in every)
    with torch.no_grad():
        trained.vector.copy_(torch.arange(trained.vector.numel()))
    flat = torch.cat([p.reshape(-1) for p in every])
    assert torch.equal(flat, torch.arange(len(flat)).float())  # the networks moved with it


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
