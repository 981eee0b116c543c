"""Reward functions, and the scorer that calls them."""

from keel.rewards.checking import Wrong
from keel.rewards.loading import NamedReward, load_reward
from keel.rewards.score import Scored, Scorer

__all__ = ["NamedReward", "Scored", "Scorer", "Wrong", "load_reward"]
