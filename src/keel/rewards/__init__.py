"""Reward functions, and the scorer that calls them."""

from keel.rewards.outputs import Wrong
from keel.rewards.registry import NamedReward, load_reward
from keel.rewards.scorer import Scored, Scorer

__all__ = ["NamedReward", "Scored", "Scorer", "Wrong", "load_reward"]
