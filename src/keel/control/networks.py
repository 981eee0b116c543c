"""Policies on vectors, the networks in them, and the normalisation of what they read.

A policy is categorical for discrete actions, a diagonal Gaussian for continuous ones. An action is
a function of observation, weights and noise, which is generated beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from jaxtyping import Float
from torch import Tensor, nn

from keel.config.control import Network
from keel.objective import divergences
from keel.objective.divergences import entropy

Array = npt.NDArray[np.float32]
ACTIVATIONS: Final = {"tanh": nn.Tanh, "relu": nn.ReLU}
QUICK: Final[Mapping[type[nn.Module], Callable[[Array], Array]]] = {
    nn.Tanh: np.tanh,
    nn.ReLU: lambda x: np.maximum(x, np.float32(0)),
}


class Perceptron(nn.Sequential):
    """Linear layers with activations between them."""

    def quick(self) -> Callable[[Array], Array]:
        """The outputs for a few inputs, in numpy, which costs a fifth of torch per call.

        It reads the weights in place, so it sees each optimizer step.
        """
        layers: list[Callable[[Array], Array]] = []
        for layer in self:
            if isinstance(layer, nn.Linear):
                layers.append(_affine(layer.weight.detach().numpy().T, layer.bias.detach().numpy()))
            else:
                layers.append(QUICK[type(layer)])

        def forward(x_EI: Array) -> Array:
            for apply in layers:
                x_EI = apply(x_EI)
            return x_EI

        return forward


def _affine(weight: Array, bias: Array) -> Callable[[Array], Array]:
    return lambda x: x @ weight + bias


def perceptron(
    inputs: int, outputs: int, choice: Network, last_gain: float | None, seed: int
) -> Perceptron:
    """Linear layers with activations between them.

    Orthogonal with gain √2, the last layer with `last_gain`, biases 0: small for a policy, so that
    it starts near uniform; 1 for its values (Engstrom et al. 2020, arXiv:2005.12729). Without a
    gain, weights and biases are uniform within ±1/√inputs (LeCun et al. 1998), less than half as
    large: Q-learning bootstraps on what a network makes of unseen actions, and diverges from more.
    """
    sizes = [inputs, *choice.hidden, outputs]
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for at, (n, m) in enumerate(pairwise(sizes)):
        last = at == len(sizes) - 2
        gain = last_gain if last or last_gain is None else 2**0.5
        layers.append(_linear(n, m, gain, generator))
        if not last:
            layers.append(ACTIVATIONS[choice.activation]())
    return Perceptron(*layers)


def _linear(inputs: int, outputs: int, gain: float | None, generator: torch.Generator) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    if gain is None:
        for parameter in (layer.weight, layer.bias):
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
        return layer
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class TrainedNetwork:
    """Networks whose parameters lie in one vector, so that an optimizer step is a few operations
    and not a few for each of them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.named = [
            (f"{name}/{key}", p) for name, m in modules.items() for key, p in m.named_parameters()
        ]
        self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for _, p in self.named]))
        sizes = [p.numel() for _, p in self.named]
        pieces = torch.split(self.vector.detach(), sizes)
        for (_, p), piece in zip(self.named, pieces, strict=True):
            p.data = piece.view_as(p)

    def backward(self, loss: Tensor) -> None:
        """The loss's gradient in every parameter, as the vector's."""
        gradients = torch.autograd.grad(loss, [p for _, p in self.named])
        self.vector.grad = torch.cat([gradient.reshape(-1) for gradient in gradients])

    def state(self) -> dict[str, Tensor]:
        """Every parameter by name."""
        return {name: p.detach() for name, p in self.named}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The state that `state` gave."""
        for name, p in self.named:
            p.copy_(state[name])


Actions = npt.NDArray[Any]
"""Of E environments: numbers from 0, or vectors (E, D)."""
Act = Callable[[Array, Array | None], Actions]
"""Observations (E, O) and noise -> actions."""


class Actor(ABC, nn.Module):
    """A policy: samples actions, and computes the log-probabilities of given ones."""

    def __init__(self, inputs: int, actions: int, choice: Network, seed: int) -> None:
        super().__init__()
        self.actions = actions
        self.network = perceptron(inputs, actions, choice, 0.01, seed)

    def forward(self, observation_NO: Tensor) -> Tensor:
        """The parameters of the distributions in these states."""
        parameters: Tensor = self.network(observation_NO)
        return parameters

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
        super().__init__(inputs, actions, choice, seed)
        self.log_std = nn.Parameter(torch.full((actions,), log_std))

    def evaluate_actions(self, observation_NO: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean_ND = self(observation_NO)
        log_std_1D = self.log_std.unsqueeze(0)
        entropy_N = divergences.gaussian_entropy(log_std_1D).expand(len(mean_ND))
        return divergences.gaussian_log_prob(mean_ND, log_std_1D, action), entropy_N

    def divergence(self, reference: Actor, observation_NO: Tensor) -> Tensor:
        assert isinstance(reference, DiagonalGaussian)
        return divergences.gaussian_kl(
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
    """The policy that fits the actions, which are flat (`control.environments`)."""
    if isinstance(actions, gym.spaces.Discrete):
        return Categorical(inputs, int(actions.n), choice, seed)
    assert actions.shape is not None
    return DiagonalGaussian(inputs, actions.shape[0], choice, log_std, seed)


LIMIT = 10.0
"""Normalised values are clipped at ± this."""
EPSILON = 1e-8


class Moments:
    """Mean and variance of all values so far, by Gymnasium's running statistics.

    Its wrappers count every step of every environment, those that wait for the others to finish
    their episodes included, and change within an iteration: here an iteration is added as a whole.
    """

    def __init__(self, size: int) -> None:
        self.running: Any = RunningMeanStd(epsilon=0.0, shape=(size,))  # type: ignore[no-untyped-call]

    def add(self, seen: npt.NDArray[np.floating]) -> None:
        """Count these values too."""
        self.running.update(np.asarray(seen, dtype=np.float64))

    def normal(self, x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Subtract the mean, divide by the standard deviation, and clip."""
        return self.scaled(x - self.running.mean)

    def scaled(self, x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Divide by the standard deviation, and clip; as they are before any value is known."""
        if self.running.count == 0:
            return np.asarray(x, dtype=np.float32)
        y = x / np.sqrt(self.running.var + EPSILON)
        cut: npt.NDArray[np.float32] = np.clip(y, -LIMIT, LIMIT).astype(np.float32)
        return cut
