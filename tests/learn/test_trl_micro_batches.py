"""TRL's loss on one batch depends on how the batch is cut into micro-batches. Keel's does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.algorithms.group_advantages import GroupRelative
from keel.algorithms.masks import TopEntropy
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip
from keel.config.stage import Optimizer
from keel.learn.batch import Estimates, from_groups
from keel.learn.learner import Learner
from keel.learn.loss import prepare
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.models.attention import install
from keel.models.build import byte_tokenizer
from keel.models.policy import Policy
from keel.types import Group, Prompt
from studies.trl_micro_batches import ADVANTAGES, PARTS, TARGET, build, rows
from tests.learn.flat import answer

RECORD = json.loads(TARGET.read_text())
FLOAT32 = 1e-6
"""Relative. TRL's model has its rotary embedding in float32, and so has Keel's."""
MOVES = 1e-3
"""Relative: the least by which TRL's gradient depends on the cut in a case that does."""
CASES: dict[str, dict[str, Any]] = {
    "mean of each sequence": {},
    "mean of all tokens": {"weights": Weights(kind="token_mean")},
    "tokens of high entropy": {"masks": (TopEntropy(share=0.3),)},
    "entropy bonus": {"entropy": 0.05},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build(path)
    return path


def updated(folder: Path, name: str, token_budget: int) -> tuple[float, float]:
    """Loss and norm of the gradient of the record's batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    install(model)
    policy = Policy(model, byte_tokenizer(model.config.vocab_size))
    choice = Optimizer(learning_rate=1e-3, max_grad_norm=None)
    learner = Learner(policy, WeightOptimizer(trainable(policy), choice), TokenBudget(token_budget))
    batch = from_groups(
        [
            Group(Prompt(str(at), "", tokens=tuple(prompt)), (answer(tokens),))
            for at, (prompt, tokens) in enumerate(zip(*rows(), strict=True))
        ]
    )
    each_S = torch.tensor(ADVANTAGES, dtype=torch.float64)
    estimates = Estimates(each_S.repeat_interleave(batch.lengths_S))
    parts = {"weights": Weights(kind="sequence_mean"), **CASES[name]}
    algorithm = Algorithm(advantage=GroupRelative(), surrogate=Clip(), ratio="token", **parts)
    made = learner.update(algorithm, prepare(algorithm, batch, estimates, 12), 0.0, (1e-3, None))
    return made.metrics["loss"], made.metrics["grad_norm"]


@pytest.mark.parametrize("name", CASES)
def test_loss_is_trls_however_the_batch_is_cut(name: str, folder: Path) -> None:
    trl = [RECORD[name]["by_parts"][str(parts)] for parts in PARTS]
    whole = updated(folder, name, 10_000)
    assert whole == pytest.approx((trl[0]["loss"], trl[0]["grad_norm"]), rel=FLOAT32, abs=FLOAT32)
    for token_budget in (40, 16):
        cut = updated(folder, name, token_budget)
        assert cut == pytest.approx(whole, rel=1e-10, abs=1e-10)
    moved = max(abs(one["grad_norm"] / trl[0]["grad_norm"] - 1) for one in trl)
    assert (moved > MOVES) == (name != "mean of each sequence")
