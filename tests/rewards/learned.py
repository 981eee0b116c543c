"""Tiny reward models in folders, and completions in a policy's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from keel.config.model import Model
from keel.config.sources import RewardSource
from keel.models.policy import Policy, load_policy
from keel.models.reward import RewardModel, reward_model_from
from keel.rewards import load_reward
from keel.rewards.registry import NamedReward, RewardContext
from keel.types import Completion, Content, Group, Prompt
from tests.models.tiny import build, stir

ALPHABET = "0123456789+=: ab\n;"


def policy(**keys: Any) -> Policy:
    """A tiny policy; a context of 64 tokens."""
    made = build(**{"family": "llama", "alphabet": ALPHABET, **keys})
    return load_policy(Model(build=made, device="cpu"), 0)


def save_model(
    folder: Path, kind: Literal["outcome", "process"], seed: int = 0, **keys: Any
) -> RewardModel:
    """A reward model of random weights, saved."""
    model = reward_model_from(policy(**keys), kind, 0)
    stir(model.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save(folder)
    return model


def completion(tokenizer: Any, text: str, *, end: bool = True) -> Completion:
    """The text in the policy's tokens, with an end of sequence after it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = np.array([*ids, *([tokenizer.eos_token_id] if end else [])], dtype=np.int64)
    return Completion(
        tokens=tokens,
        log_probs=np.full(len(tokens), -1.0, dtype=np.float32),
        written=np.ones(len(tokens), dtype=np.bool_),
        finish="eos" if end else "length",
        text=text,
    )


def group(
    tokenizer: Any, prompt: Content, texts: Sequence[str], name: str = "t/train/0", **columns: Any
) -> Group:
    """Answers to a prompt."""
    made = tuple(completion(tokenizer, text) for text in texts)
    return Group(Prompt(name, prompt, columns, "t"), made)


def reward(
    function: str, around: RewardContext, *, options: Any = None, **keys: Any
) -> NamedReward:
    """A reward of a recipe."""
    source = RewardSource.model_validate({"function": function, "options": options or {}, **keys})
    return load_reward(source, around)
