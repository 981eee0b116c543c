"""Policies on vectors: categorical for discrete actions, a diagonal Gaussian for continuous ones.

An action is a function of observation, weights and noise, which is generated beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from keel.config.control import Network
from keel.control.networks import perceptron
from keel.objective import divergences, gaussian
from keel.objective.divergences import entropy

Array = npt.NDArray[np.float32]
Actions = npt.NDArray[Any]
"""Of E environments: numbers from 0, or vectors (E, D)."""


Act = Callable[[Array, Array | None], Actions]
"""Observations (E, O) and noise -> actions."""


class Actor(ABC, nn.Module):
    """A policy: samples actions, and computes the log-probabilities of given ones."""

    @abstractmethod
    def forward(self, observation_NO: Tensor) -> Tensor:
        """The parameters of the distributions in these states."""

    @abstractmethod
    def evaluate_actions(
        self, observation_NO: Tensor, action: Tensor
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-probabilities (or densities) of the actions, and entropies."""

    @abstractmethod
    def divergence(self, reference: Actor, observation_NO: Tensor) -> Float[Tensor, " N"]:
        """The exact KL(this‖reference) in these states."""

    @abstractmethod
    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """The noise that `act` needs for actions of this shape."""

    @abstractmethod
    def acting(self) -> Act:
        """A function that samples actions with the noise given, or takes the most likely ones."""


class Categorical(Actor):
    """π(a|s) = softmax of one logit per action."""

    def __init__(self, inputs: int, actions: int, choice: Network, seed: int) -> None:
        super().__init__()
        self.actions = actions
        self.network = perceptron(inputs, actions, choice, 0.01, seed)

    def forward(self, observation_NO: Tensor) -> Tensor:
        logits: Tensor = self.network(observation_NO)
        return logits

    def evaluate_actions(self, observation_NO: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        logits_NA = self(observation_NO)
        log_prob_NA = torch.log_softmax(logits_NA, dim=-1)
        chosen_N = log_prob_NA.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return chosen_N, entropy(log_prob_NA)

    def divergence(self, reference: Actor, observation_NO: Tensor) -> Tensor:
        return divergences.full(self(observation_NO), reference(observation_NO).detach())

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.gumbel(size=(*shape, self.actions)).astype(np.float32)

    def acting(self) -> Act:
        forward = self.network.quick()

        def act(observation_EO: Array, noise_EA: Array | None) -> Actions:
            logits_EA = forward(observation_EO)
            # argmax of logits plus Gumbel noise is a sample of their softmax (Gumbel 1954).
            chosen: Actions = (logits_EA if noise_EA is None else logits_EA + noise_EA).argmax(-1)
            return chosen

        return act


class DiagonalGaussian(Actor):
    """π(a|s) = N(μ(s), σ²), with σ a parameter; environments clip actions at their bounds."""

    def __init__(
        self, inputs: int, actions: int, choice: Network, log_std: float, seed: int
    ) -> None:
        super().__init__()
        self.actions = actions
        self.network = perceptron(inputs, actions, choice, 0.01, seed)
        self.log_std = nn.Parameter(torch.full((actions,), log_std))

    def forward(self, observation_NO: Tensor) -> Tensor:
        mean: Tensor = self.network(observation_NO)
        return mean

    def evaluate_actions(self, observation_NO: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean_ND = self(observation_NO)
        log_std_1D = self.log_std.unsqueeze(0)
        entropy_N = gaussian.entropy(log_std_1D).expand(len(mean_ND))
        return gaussian.log_prob(mean_ND, log_std_1D, action), entropy_N

    def divergence(self, reference: Actor, observation_NO: Tensor) -> Tensor:
        assert isinstance(reference, DiagonalGaussian)
        return gaussian.full(
            self(observation_NO),
            self.log_std.unsqueeze(0),
            reference(observation_NO).detach(),
            reference.log_std.detach().unsqueeze(0),
        )

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.standard_normal(size=(*shape, self.actions), dtype=np.float32)

    def acting(self) -> Act:
        forward, std_D = self.network.quick(), np.exp(self.log_std.detach().numpy())

        def act(observation_EO: Array, noise_EA: Array | None) -> Actions:
            mean_ED = forward(observation_EO)
            return mean_ED if noise_EA is None else mean_ED + std_D * noise_EA

        return act


def build_actor(
    inputs: int, actions: gym.Space[Any], choice: Network, log_std: float, seed: int
) -> Actor:
    """The policy that fits the actions, which are flat (`control.spaces`)."""
    if isinstance(actions, gym.spaces.Discrete):
        return Categorical(inputs, int(actions.n), choice, seed)
    assert actions.shape is not None
    return DiagonalGaussian(inputs, actions.shape[0], choice, log_std, seed)
