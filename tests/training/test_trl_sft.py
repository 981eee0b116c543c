"""Supervised fine-tuning as TRL 1.16 does it: losses, learning rates, evaluation, weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.config.model import Model
from keel.config.stage import Optimizer
from keel.learn.optimizer import learning_rate
from keel.models.policy import load_policy
from keel.platform.files import write_jsonl
from keel.runs.reader import load
from keel.training.run import train
from studies import trl_sft
from tests.training.small import info, metrics

RECORDED = json.loads(trl_sft.TARGET.read_text(encoding="utf-8"))["cases"]
LOSS = 1e-5
"""Of losses about 4: sums in float32 in another order; after some steps AdamW has magnified it."""
WEIGHTS = 1e-4
"""Of weighted sums of up to 1,600 weights, each moved by 2e-3 in a step."""


def recipe_of(case: dict[str, Any], folder: Path) -> Any:
    """The recipe of what TRL was asked for."""
    trl_sft.build(folder / "model")
    count = case.get("rows", trl_sft.ROWS)
    write_jsonl(folder / "train.jsonl", trl_sft.rows(case["form"], count))
    write_jsonl(folder / "held.jsonl", trl_sft.rows(case["form"], trl_sft.HELD, 100))
    warm = {"warmup_ratio": case.get("warm_up"), "schedule": "linear", "min_lr_ratio": 0.0}
    data = {"path": str(folder / "train.jsonl"), "validation_path": str(folder / "held.jsonl")}
    whole = case["form"] == "messages" and not case.get("assistant")
    stage = {
        "stage": "sft",
        "data": [{**data, "raw": case["form"] == "completion"}],
        "num_train_epochs": case.get("epochs", 1),
        "batch_size": case.get("batch", trl_sft.BATCH),
        "loss_on": "all" if whole else "assistant",
        "packing": case.get("packed", False),
        "max_tokens": case.get("longest", "none"),
        "shuffle": False,
        "evaluation": {"every": 0},
        "optimizer": {"learning_rate": trl_sft.RATE, **(warm if "warm_up" in case else {})},
    }
    return load_recipe({"model": {"name": str(folder / "model")}, "stages": [stage]})


@pytest.mark.parametrize("name", trl_sft.CASES)
def test_sft_gives_trls_losses_and_weights(name: str, tmp_path: Path) -> None:
    case, theirs = trl_sft.CASES[name], RECORDED[name]
    run = train(recipe_of(case, tmp_path), tmp_path / "run")
    steps = metrics(run)
    assert [one["loss"] for one in steps] == pytest.approx(theirs["loss"], abs=LOSS)
    assert [one["learning_rate"] for one in steps] == pytest.approx(theirs["rates"], abs=1e-12)
    after = info(run)["measured"]["sft"]["after"]
    assert after["loss"] == pytest.approx(theirs["eval_loss"], abs=LOSS)
    accuracy = theirs["eval_mean_token_accuracy"]
    assert after["mean_token_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    place = load(run.path).checkpoints()[-1].path / "policy"
    model = load_policy(Model(name=str(place)), 0).model
    assert trl_sft.digest(model) == pytest.approx(theirs["weights"], abs=WEIGHTS)


def test_warm_up_is_transformers_one_step_early() -> None:
    """Its first step has a rate of 0; Keel's first is its second, and the lengths are the same."""
    theirs = RECORDED["epochs with a warm-up"]["schedule"]
    steps, rising = theirs["steps"], theirs["rising"]
    ratio = Optimizer(learning_rate=1.0, warmup_ratio=0.3)
    assert (ratio.warm_up(steps), rising) == (4, 4)
    rates = [learning_rate(ratio, step, steps) for step in range(steps - 1)]
    assert rates == pytest.approx(theirs["constant_with_warmup"][1:])
