"""Seconds of a stage from what was timed, reckoned by hand."""

from __future__ import annotations

from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.config.schema import Stage
from keel.preflight.duration import (
    DISK_BYTES,
    OPTIMIZER_SECONDS,
    Duration,
    StageSizes,
    Timed,
    checkpoints_of,
    evaluations_of,
    stage_duration,
)

TIMED = Timed(tokens=100, forward=2.0, sequences=4, sampling=6.0, scoring=1.0)
SIZES = StageSizes(step_tokens=200, step_sequences=8)


def rl(*overrides: str) -> Stage:
    return load_recipe("tiny", ["steps=10", "checkpoints.every=4", *overrides]).stages[0]


def rows(stage: str, **keys: Any) -> Stage:
    data = {"name": "jsonl", "path": "rows.jsonl"}
    kind = {"stage": stage, "steps": 10, "data": data, **keys}
    return load_recipe({"model": {"build": {}}, "stages": [kind]}).stages[0]


def parts(found: Duration) -> dict[str, float]:
    return dict(found.parts)


def test_sampling_and_scoring_scale_with_the_sequences() -> None:
    found = parts(stage_duration(rl("algorithm=grpo"), TIMED, SIZES))
    assert found["sampling"] == pytest.approx(6.0 / 4 * 8 * 10)
    assert found["scoring"] == pytest.approx(1.0 / 4 * 8 * 10)


def test_learning_is_three_forward_passes_for_each_epoch() -> None:
    stage = rl("algorithm=grpo", "epochs=2")

    def learning(**keys: Any) -> float:
        sizes = StageSizes(step_tokens=200, step_sequences=8, **keys)
        return parts(stage_duration(stage, TIMED, sizes))["learning"]

    # 200 tokens go forward in 4 seconds.
    assert learning() == pytest.approx(4.0 * 3 * 2 * 10)
    assert learning(adapters=True) == pytest.approx(4.0 * 2 * 2 * 10)
    assert learning(recomputes=True) == pytest.approx(4.0 * 4 * 2 * 10)
    assert learning(critic=True) == pytest.approx(4.0 * 6 * 2 * 10)
    assert learning(trained=10**9) - learning() == pytest.approx(1e9 * OPTIMIZER_SECONDS * 2 * 10)


@pytest.mark.parametrize(
    ("overrides", "critic", "passes"),
    [
        (("algorithm=grpo", "epochs=1"), False, 1),  # the reference
        (("algorithm=grpo", "epochs=2"), False, 2),  # and old
        (("algorithm=grpo", "epochs=2", "rollout.old_log_probs=engine"), False, 1),
        (("algorithm=ppo", "epochs=1"), True, 3),  # old, reference, critic
        (("algorithm=ppo", "epochs=1", "value.kind=head"), False, 2),
    ],
)
def test_what_is_measured_before_an_update(
    overrides: tuple[str, ...], critic: bool, passes: int
) -> None:
    sizes = StageSizes(step_tokens=200, step_sequences=8, critic=critic)
    stage = rl(*overrides)
    measuring = parts(stage_duration(stage, TIMED, sizes)).get("measuring", 0.0)
    assert measuring == pytest.approx(4.0 * passes * 10)


def test_evaluations_before_during_and_after() -> None:
    assert evaluations_of(rl("evaluation.every=0")) == 2
    assert evaluations_of(rl("evaluation.every=3")) == 2 + 3
    assert evaluations_of(rl("evaluation.every=5")) == 2 + 1  # the tenth is the last
    sizes = StageSizes(step_tokens=200, step_sequences=8, evaluation_sequences=16)
    once = parts(stage_duration(rl("evaluation.every=0"), TIMED, sizes))["evaluation"]
    assert once == pytest.approx(7.0 / 4 * 16 * 2)
    sampled = rl("evaluation.every=0", "evaluation.samples=3")
    assert parts(stage_duration(sampled, TIMED, sizes))["evaluation"] == pytest.approx(4 * once)


def test_checkpoints_and_what_they_take() -> None:
    assert checkpoints_of(rl()) == 3  # after 4, 8 and 10
    assert checkpoints_of(rl("checkpoints.every=5")) == 2
    assert checkpoints_of(rl("checkpoints.every=100")) == 1
    sizes = StageSizes(step_tokens=200, checkpoint_bytes=int(DISK_BYTES))
    assert parts(stage_duration(rl(), TIMED, sizes))["checkpoints"] == pytest.approx(3.0)


def test_stages_on_rows() -> None:
    sizes = StageSizes(step_tokens=200, evaluation_tokens=50)
    reward = parts(stage_duration(rows("reward_model"), TIMED, sizes))
    assert reward == pytest.approx({"learning": 4.0 * 3 * 10, "evaluation": 1.0 * 2})
    # DPO's reference reads every row too.
    dpo = parts(stage_duration(rows("dpo"), TIMED, sizes))
    assert dpo == pytest.approx({"learning": 4.0 * 4 * 10, "evaluation": 2.0 * 2})
    task = {"tasks": [{"name": "sort_digits"}], "steps": 10}
    sft = load_recipe({"model": {"build": {}}, "stages": [{"stage": "sft", **task}]}).stages[0]
    assert evaluations_of(sft) == 0
    assert parts(stage_duration(sft, TIMED, sizes)) == pytest.approx({"learning": 4.0 * 3 * 10})


def test_seconds_and_cost() -> None:
    found = Duration((("sampling", 5400.0), ("learning", 1800.0)))
    assert found.seconds == 7200.0
    assert found.cost(1.5) == pytest.approx(3.0)
