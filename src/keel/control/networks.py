"""Small networks: multilayer perceptrons from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from keel.config.control import Network

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
