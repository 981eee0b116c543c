"""The advantage with its sign turned: a twin that must not learn."""

from __future__ import annotations

from torch import Tensor

from keel.objective.group import group_relative


def turned(reward_S: Tensor, groups_S: Tensor) -> Tensor:
    """−A of GRPO: A_i = −(R_i − mean) / (std + ε)."""
    return -group_relative(reward_S, groups_S, scale="std", epsilon=1e-4)
