"""Losses of a policy on judged answers as TRL 1.16 computes them, whatever the micro-batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.algorithms.preferences import PREFERENCE_LOSSES
from keel.config.load import load_recipe
from keel.config.model import Model
from keel.data.preferences import READERS
from keel.learn.memory import TokenBudget
from keel.models.policy import Policy, load_policy
from keel.models.reference import reference_for
from keel.models.reward import Reader
from keel.platform.files import write_jsonl
from keel.training.judged_data import encoder
from keel.training.judged_losses import PolicyLoss
from studies import trl_preferences, trl_sft

RECORDED = json.loads(trl_preferences.TARGET.read_text(encoding="utf-8"))["cases"]
TOLERANCE = 1e-6
"""TRL's language head, and its odds of ORPO, are float32 whatever the model is."""
OF_SUMS = 1e-5
"""Of differences between log-probabilities of about 50 nats, in float32."""
EXACT = 1e-10


def stage_of(name: str, folder: Path) -> Any:
    """The stage that a case is in Keel; its rows are those for validation, in their order."""
    case = {key: value for key, value in trl_preferences.CASES[name].items() if key != "moved"}
    rows = trl_preferences.rows(case["loss"] == "kto")
    write_jsonl(folder / "rows.jsonl", rows)
    write_jsonl(folder / "train.jsonl", [{**rows[1], "prompt": "another"}])
    data = {"path": str(folder / "train.jsonl"), "validation_path": str(folder / "rows.jsonl")}
    stage = {"stage": "dpo", "data": data, "batch_size": trl_preferences.BATCH, **case}
    model = {"name": str(folder / "model")}
    return load_recipe({"model": model, "stages": [stage]}).stages[0]


def loss_of(name: str, folder: Path) -> tuple[Policy, PolicyLoss, list[Any]]:
    """A case's policy, its loss, and its rows in tokens, each made as the stage makes it."""
    stage = stage_of(name, folder)
    trl_sft.build(folder / "model")
    policy = load_policy(Model(name=str(folder / "model"), dtype="float64", device="cpu"), 0)
    reference = reference_for(policy) if stage.keeps_reference else None
    trl_preferences.move(policy.model, trl_preferences.CASES[name].get("moved", 1.0))
    read = encoder(stage.records, Reader(policy.tokenizer, policy.context, raw=stage.raw))
    rows = [read(row) for row in READERS[stage.records](stage.data, 0).validation]
    chosen = PREFERENCE_LOSSES[stage.loss]
    keys = (policy, reference, TokenBudget(999), chosen, stage.loss_keys, policy.context)
    return policy, PolicyLoss(*keys), rows


@pytest.mark.parametrize("name", trl_preferences.CASES)
def test_loss_and_gradient_are_trls(name: str, tmp_path: Path) -> None:
    policy, loss, rows = loss_of(name, tmp_path)
    size, parameters = trl_preferences.BATCH, list(policy.model.parameters())
    assert len(rows) == size * trl_preferences.BATCHES
    for number, theirs in enumerate(RECORDED[name]):
        batch = rows[size * number : size * (number + 1)]
        found = {}
        for tokens in (10_000, 100, 1):
            policy.model.zero_grad()
            metrics = loss.backward(batch, tokens)
            found[tokens] = (metrics, [p.grad.clone() for p in parameters if p.grad is not None])
            assert metrics["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
            assert trl_preferences.norm(parameters) == pytest.approx(theirs["norm"], rel=TOLERANCE)
        for tokens in (100, 1):
            assert found[tokens][0] == pytest.approx(found[10_000][0], rel=EXACT, abs=EXACT)
            for a, b in zip(found[tokens][1], found[10_000][1], strict=True):
                torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)
        if "kl" in theirs:
            point = found[1][0]["kl/mismatched"]
            assert point == pytest.approx(theirs["kl"], abs=OF_SUMS)
            assert (point > 0) == ("moved" in trl_preferences.CASES[name])
