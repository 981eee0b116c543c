"""Seconds of a stage from what was timed, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.config.schema import Stage
from keel.preflight.duration import (
    Duration,
    Timed,
    checkpoints_of,
    evaluations_of,
    stage_duration,
)

TIMED = Timed(measuring=2.0, learning=3.0, checkpoint=0.5, sequences=8, sampling=6.0, scoring=2.0)


def rl(*overrides: str) -> Stage:
    return load_recipe("tiny", ["steps=10", "checkpoints.every=4", *overrides]).stages[0]


def on_rows(stage: str, **keys: Any) -> Stage:
    data = {"name": "jsonl", "path": "rows.jsonl"}
    kind = {"stage": stage, "steps": 10, "data": data, **keys}
    return load_recipe({"model": {"build": {}}, "stages": [kind]}).stages[0]


def parts(stage: Stage, **keys: Any) -> dict[str, float]:
    timed = Timed(**{name: getattr(TIMED, name) for name in Timed.__slots__} | keys)
    return dict(stage_duration(stage, timed).parts)


def test_a_step_is_multiplied_and_each_epoch_learns() -> None:
    assert parts(rl("algorithm=grpo", "epochs=2")) == pytest.approx(
        {"sampling": 60, "scoring": 20, "measuring": 20, "learning": 60, "checkpoints": 1.5}
    )
    data = parts(on_rows("dpo"), sampling=0.0, scoring=0.0, measuring=0.0)
    assert data == pytest.approx({"learning": 30, "checkpoints": 0.5})


def test_evaluations_before_during_and_after() -> None:
    assert evaluations_of(rl("evaluation.every=0")) == 2
    assert evaluations_of(rl("evaluation.every=3")) == 2 + 3
    assert evaluations_of(rl("evaluation.every=5")) == 2 + 1  # the tenth is the last
    assert evaluations_of(on_rows("reward_model")) == 2
    once = parts(rl("evaluation.every=0"), evaluated=16)["evaluation"]
    assert once == pytest.approx(8.0 / 8 * 16 * 2)
    sampled = parts(rl("evaluation.every=0", "evaluation.samples=3"), evaluated=16)
    assert sampled["evaluation"] == pytest.approx(4 * once)
    task = {"tasks": [{"name": "sort_digits"}], "steps": 10}
    sft = load_recipe({"model": {"build": {}}, "stages": [{"stage": "sft", **task}]}).stages[0]
    assert evaluations_of(sft) == 0


def test_checkpoints() -> None:
    assert checkpoints_of(rl()) == 3  # after 4, 8 and 10
    assert checkpoints_of(rl("checkpoints.every=5")) == 2
    assert checkpoints_of(rl("checkpoints.every=100")) == 1


def test_seconds_and_cost() -> None:
    found = Duration((("sampling", 5400.0), ("learning", 1800.0)))
    assert found.seconds == 7200.0
    assert found.cost(1.5) == pytest.approx(3.0)
