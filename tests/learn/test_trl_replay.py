"""Two recorded GRPO steps of TRL, replayed through Keel's update, give TRL's weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from keel.algorithms.group_advantages import GroupRelative
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip
from keel.config.stage import Optimizer
from keel.learn.batch import Batch, Estimates, from_groups
from keel.learn.learner import Learner
from keel.learn.loss import prepare
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.models.attention import install
from keel.models.build import byte_tokenizer
from keel.models.policy import Policy
from keel.types import Group, Prompt
from tests.learn.flat import answer
from tests.shared import shared_path

WEIGHTS = 1e-4
"""AdamW at 1e-2 divides by the gradient's size, so where that is near rounding it magnifies it:
plain padded torch differs by 3.3e-5 after two steps, packing sums in another order again. A wrong
step is off by 1e-2; clipping, which the record does not have, by 2e-4."""


def batch_of(step: dict[str, Any]) -> Batch:
    groups = []
    for prompt, tokens, mask in zip(
        step["prompt_ids"], step["completion_ids"], step["completion_mask"], strict=True
    ):
        ids = [token for token, kept in zip(tokens, mask, strict=True) if kept]
        groups.append(Group(Prompt("p", "", tokens=tuple(prompt)), (answer(ids),)))
    batch = from_groups(groups)
    each = torch.tensor(step["advantages"])
    return batch, Estimates(each.repeat_interleave(batch.lengths_S))


@pytest.mark.parametrize("token_budget", [10_000, 11])
def test_replay_of_a_trl_run_gives_its_weights(token_budget: int) -> None:
    folder = shared_path("oracles/trl_grpo_replay/steps.json").parent
    record = json.loads((folder / "steps.json").read_text())
    config = dict(record["model_config"])
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    model.load_state_dict(load_file(folder / "start.safetensors"))
    install(model)
    policy = Policy(model, byte_tokenizer(64))
    optimizer = record["optimizer"]
    lr = optimizer["lr"]
    choice = Optimizer(
        learning_rate=optimizer["lr"],
        betas=tuple(optimizer["betas"]),
        epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=None,
    )
    learner = Learner(policy, WeightOptimizer(trainable(policy), choice), TokenBudget(token_budget))
    algorithm = Algorithm(
        advantage=GroupRelative(),
        ratio="token",
        surrogate=Clip(),
        weights=Weights(kind="token_mean"),
    )
    for step, logged in zip(record["steps"], record["logs"], strict=True):
        batch, estimates = batch_of(step)
        assert batch.target_N.numel() == step["num_items_in_batch"]
        prepared = prepare(algorithm, batch, estimates, 9)
        metrics = learner.update(algorithm, prepared, 0.0, (lr, lr)).metrics
        assert metrics["loss"] == pytest.approx(logged["loss"], abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-5)
    end = load_file(folder / "end.safetensors")
    own = model.state_dict()
    assert own.keys() == end.keys()
    worst = max(float((own[name] - end[name]).abs().max()) for name in end)
    moved = load_file(folder / "start.safetensors")
    least = min(float((moved[name] - end[name]).abs().max()) for name in end)
    assert least > 100 * WEIGHTS  # every tensor moved by far more than the tolerance
    assert worst <= WEIGHTS
