"""The equations as plain loops over Python floats, written apart from the code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Floats = Sequence[float]


def tensor(x: Floats) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def ints(x: Sequence[int]) -> Tensor:
    return torch.tensor(x, dtype=torch.int64)


def random(size: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dtype=torch.float64, generator=generator) * scale


def close(actual: Tensor, expected: Floats | Tensor, tolerance: float = 1e-10) -> None:
    """1e-10 in float64: sums of at most some hundred numbers of order 1, in another order."""
    expected = expected if isinstance(expected, Tensor) else tensor(expected)
    torch.testing.assert_close(
        actual.detach().double(),
        expected.detach().double(),
        atol=tolerance,
        rtol=tolerance,
        equal_nan=True,
    )


def split(x_N: Floats | Tensor, lengths: Sequence[int]) -> list[list[float]]:
    numbers = x_N.tolist() if isinstance(x_N, Tensor) else list(x_N)
    out, start = [], 0
    for length in lengths:
        out.append(numbers[start : start + length])
        start += length
    assert start == len(numbers)
    return out


def join(parts: Sequence[Floats]) -> list[float]:
    return [x for part in parts for x in part]


def members(groups: Sequence[int], i: int, rewards: Floats) -> list[int]:
    """The present members of i's group."""
    return [j for j in range(len(groups)) if groups[j] == groups[i] and not math.isnan(rewards[j])]


def deviation(x: Floats, ddof: int) -> float:
    mean = sum(x) / len(x)
    return math.sqrt(sum((v - mean) ** 2 for v in x) / (len(x) - ddof))


def group_relative(
    rewards: Floats, groups: Sequence[int], scale: str, epsilon: float, ddof: int = 1
) -> list[float]:
    present = [r for r in rewards if not math.isnan(r)]
    out = []
    for i, reward in enumerate(rewards):
        peers = [rewards[j] for j in members(groups, i, rewards)]
        if math.isnan(reward) or len(peers) < 2 or max(peers) == min(peers):
            out.append(0.0)
            continue
        std = {
            "none": 1.0 - epsilon,
            "std": deviation(peers, ddof),
            "batch": deviation(present, ddof) if len(present) > 1 else 0.0,
        }[scale]
        out.append((reward - sum(peers) / len(peers)) / (std + epsilon))
    return out


def leave_one_out(rewards: Floats, groups: Sequence[int]) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in members(groups, i, rewards) if j != i]
        if math.isnan(reward) or not others:
            out.append(0.0)
        else:
            out.append(reward - sum(others) / len(others))
    return out


def optimal(rewards: Floats, groups: Sequence[int], lengths: Sequence[int]) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        peers = members(groups, i, rewards)
        if math.isnan(reward) or len(peers) < 2:
            out.append(0.0)
            continue
        mass = sum(lengths[j] for j in peers)
        out.append(reward - sum(rewards[j] * lengths[j] for j in peers) / mass)
    return out


def to_go(rewards: Floats, gamma: float) -> list[float]:
    return [
        sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def whiten(x: Floats, epsilon: float = 1e-8) -> list[float]:
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / (len(x) - 1)
    return [(v - mean) / math.sqrt(variance + epsilon) for v in x]


def gae(deltas: Floats, carries: Floats, gamma: float, lams: Floats) -> list[float]:
    out, ahead = [0.0] * len(deltas), 0.0
    for t in reversed(range(len(deltas))):
        ahead = deltas[t] + gamma * lams[t] * carries[t] * ahead
        out[t] = ahead
    return out


def n_step(deltas: Floats, gamma: float, steps: int) -> list[float]:
    """Of one episode."""
    return [
        sum(gamma**k * deltas[t + k] for k in range(steps) if t + k < len(deltas))
        for t in range(len(deltas))
    ]


def n_step_target(
    rewards: Floats, ends: Sequence[bool], value: float, gamma: float, steps: int
) -> float:
    """Walk the window and stop where the episode does."""
    total = 0.0
    for k in range(steps):
        total += gamma**k * rewards[k]
        if ends[k]:
            return total
    return total + gamma**steps * value


def gaussian_log_prob(means: Floats, log_stds: Floats, actions: Floats) -> float:
    """The logarithm of a product of densities, each written out."""
    density = 1.0
    for mean, log_std, action in zip(means, log_stds, actions, strict=True):
        variance = math.exp(log_std) ** 2
        bell = math.exp(-((action - mean) ** 2) / (2 * variance))
        density *= bell / math.sqrt(2 * math.pi * variance)
    return math.log(density)


Table = Sequence[Sequence[float]]
Chances = Sequence[Sequence[Floats]]


def bellman(values: Floats, rewards: Table, chances: Chances, gamma: float) -> list[list[float]]:
    """Q of every state and action, given the values of the states after."""
    return [
        [
            reward + gamma * sum(p * v for p, v in zip(row, values, strict=True))
            for reward, row in zip(of_state, rows, strict=True)
        ]
        for of_state, rows in zip(rewards, chances, strict=True)
    ]


def values_of(
    choices: Sequence[int], rewards: Table, chances: Chances, gamma: float, sweeps: int
) -> list[float]:
    """V of a policy that takes `choices[state]`, by the expected reward of so many steps."""
    values = [0.0] * len(choices)
    for _ in range(sweeps):
        q = bellman(values, rewards, chances, gamma)
        values = [of_state[choice] for of_state, choice in zip(q, choices, strict=True)]
    return values


def clip(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    bounded = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, bounded * advantage)
    return max(value, dual * advantage) if dual is not None and advantage < 0 else value


def geometric(deltas: Floats, advantage: float, low: float, high: float) -> float:
    sign = (advantage > 0) - (advantage < 0)
    clipped = [sign * min(sign * d, sign * min(max(d, -low), high)) for d in deltas]
    return advantage * math.exp(sum(clipped) / len(clipped))
