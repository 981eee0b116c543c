"""The optimizer: what weight decay applies to."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import Trainer

from keel.config.stage import Optimizer
from keel.learn.optimizer import AdamW, trainable
from keel.models.build import build_model
from keel.models.families import FAMILIES
from keel.models.head import ValueHead
from tests.models.tiny import build, policy


def decayed(module: nn.Module, choice: Optimizer) -> set[str]:
    """The parameters that a step without a gradient changes."""
    named = trainable(module)
    for _, parameter in named:
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    AdamW(named, choice).step(0.1)
    left = {name: parameter.detach().unique().tolist() for name, parameter in named}
    assert all(values in ([1.0], [pytest.approx(0.95)]) for values in left.values())
    return {name for name, values in left.items() if values != [1.0]}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_norms_and_biases_are_not_decayed(family: str) -> None:
    """The rule of transformers.Trainer, and no vector (gpt-oss has some of attention)."""
    model = build_model(build(family), 0, torch.float32)
    wanted = set(Trainer.get_decay_parameter_names(cast("Any", None), model))
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
    found = decayed(model, Optimizer(weight_decay=0.5))
    assert found == wanted & matrices
    every = {name for name, _ in model.named_parameters()}
    assert (found == every) == (family == "olmo")  # its norms have no weights


def test_adapters_and_value_heads_are_decayed_as_matrices() -> None:
    adapted = decayed(policy(rank=2), Optimizer(weight_decay=0.5))
    assert adapted
    assert all(".lora_" in name for name in adapted)
    assert decayed(ValueHead(8), Optimizer(weight_decay=0.5)) == {"linear.weight"}


def test_nothing_is_decayed_without_weight_decay() -> None:
    assert decayed(policy(), Optimizer()) == set()
