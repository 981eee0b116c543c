"""GRPO's two biases, exactly: by the difficulty of a prompt, and by the length of an answer.

Rewards are 1 or 0 and a group has G completions, so the expected gradient of a prompt is

    c(p) ∇p,   c(p) = E[A | right] − E[A | wrong],   p the probability of a right answer,

where weights do not depend on lengths. Expectations are sums over how many of the other G − 1 are
right [Dr. GRPO, arXiv:2503.20783 §3.1].
"""

from __future__ import annotations

import math
import statistics
from typing import Literal

import torch
from torch import Tensor

from keel.objective import group, weights
from studies.common import markdown
from studies.evidence.enumerable import LENGTH, EnumerableLM

GROUPS = (8, 64)
SHARES = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
Scale = Literal["std", "none"]
EPSILON = 1e-4
OBJECTIVES: tuple[tuple[str, Scale, bool], ...] = (
    ("GRPO", "std", True),
    ("GRPO without the standard deviation", "none", True),
    ("GRPO with constant weights", "std", False),
    ("Dr. GRPO", "none", False),
)
"""Name, what the advantage is divided by, whether weights are shared among tokens."""


def expected_advantages(p: float, size: int, scale: Scale) -> tuple[float, float]:
    """E[A | right] and E[A | wrong] of a completion in a group of `size`."""
    right = wrong = 0.0
    for others in range(size):
        chance = math.comb(size - 1, others) * p**others * (1 - p) ** (size - 1 - others)
        rest = [1.0] * others + [0.0] * (size - 1 - others)
        for own in (1.0, 0.0):
            reward_S = torch.tensor([own, *rest], dtype=torch.float64)
            groups_S = torch.zeros(size, dtype=torch.long)
            advantage_S = group.group_relative(reward_S, groups_S, scale=scale, epsilon=EPSILON)
            right += chance * float(advantage_S[0]) * own
            wrong += chance * float(advantage_S[0]) * (1 - own)
    return right, wrong


def difficulty_weight(p: float, size: int, scale: Scale) -> float:
    """c(p), what a prompt of difficulty p counts, over c(½)."""

    def weight(share: float) -> float:
        right, wrong = expected_advantages(share, size, scale)
        return right - wrong

    return weight(p) / weight(0.5)


def length_drift(seed: int, scale: Scale, by_length: bool, size: int = 8) -> tuple[float, float]:
    """How fast right and wrong answers grow, in tokens, along the expected gradient of one step.

    The first letter decides the reward, so the policy knows from then on whether it is right.
    (Wrong answers are those that begin with the second letter; one that is empty has no length to
    change.) With `by_length` a completion's weight is shared among its tokens (GRPO), else each
    token has the same (Dr. GRPO). Divided by the gradient's norm: tokens for a step of norm 1.
    """
    model = EnumerableLM.drawn(seed)
    first_S = model.token_N[model.lengths_S.cumsum(0) - model.lengths_S]
    right_S = first_S == 0
    probability_S = model.probability_S
    p = float(probability_S[right_S].sum())
    good, bad = expected_advantages(p, size, scale)
    advantage_S = torch.where(right_S, good, bad).double()
    weight_N = (
        weights.sequence_mean(model.lengths_S)
        if by_length
        else weights.constant(model.lengths_S, constant=LENGTH)
    )
    advantage_N = advantage_S.repeat_interleave(model.lengths_S)
    gradient_K = probability_S @ model.score_SK(weight_N * len(model.lengths_S) * advantage_N)
    unit_SK = model.score_SK(torch.ones(len(model.state_N), dtype=torch.float64))

    def drift(chosen_S: Tensor) -> float:
        share_S = probability_S * chosen_S
        share_S = share_S / share_S.sum()
        length_S = model.lengths_S.double()
        slope_K = (share_S * (length_S - share_S @ length_S)) @ unit_SK
        return float(slope_K @ gradient_K / gradient_K.norm())

    return drift(right_S), drift(first_S == 1)


def difficulty_table() -> str:
    """What prompts of several difficulties count, as Markdown."""
    kinds: tuple[tuple[str, Scale], ...] = (("GRPO", "std"), ("Dr. GRPO", "none"))
    columns = [(name, size, scale) for name, scale in kinds for size in GROUPS]
    head = ("p", *(f"{name}, G = {size}" for name, size, _ in columns))
    rows = [
        (f"{p:g}", *(f"{difficulty_weight(p, size, scale):.2f}" for _, size, scale in columns))
        for p in SHARES
    ]
    return markdown(head, rows)


def drift_table(seeds: int = 10) -> str:
    """How fast answers grow under four objectives, as Markdown: medians over models."""
    rows = []
    for name, scale, by_length in OBJECTIVES:
        found = [length_drift(seed, scale, by_length) for seed in range(seeds)]
        middle = (statistics.median(one[k] for one in found) for k in (0, 1))
        rows.append((name, *("0" if abs(value) < 1e-9 else f"{value:+.3f}" for value in middle)))
    return markdown(("objective", "right answers", "wrong answers"), rows)
