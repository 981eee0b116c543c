"""A run on rewards of steps: what it records, what it refuses; filters and weights of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from keel.learn.batch import Estimates, from_groups
from keel.rewards.scorer import Scorer
from keel.runs.reader import load
from keel.training.rl import minibatches
from keel.training.rollout import all_alike
from keel.types import Completion, Group, Prompt, RewardResult, Step
from tests.rewards.made import named
from tests.training.small import run, small

BOTH = (
    "rewards.functions=[{function='tests.training.rewards:digits_in_order'}, "
    "{function='place_match', weight=0.5}]"
)


def group(lengths: tuple[int, ...]) -> Group:
    completions = tuple(
        Completion(
            tokens=np.arange(n), log_probs=np.zeros(n, np.float32),
            written=np.ones(n, dtype=bool), finish="length", text="",
        )
        for n in lengths
    )  # fmt: skip
    return Group(Prompt("p", "p", tokens=(7,)), completions)


def test_process_advantages_follow_from_recorded_rewards(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "algorithm=grpo_process", BOTH, "steps=1")
    rows = load(folder.path).rollouts(1)
    assert any(row["outcome"] for row in rows)
    for number in {row["group"] for row in rows}:
        members = [row for row in rows if row["group"] == number]
        every = [[*row["step_rewards"], row["outcome"]] for row in members]
        flat = np.concatenate(every)
        for row, rewards in zip(members, every, strict=True):
            assert row["reward"] == pytest.approx(sum(rewards))
            normal = (np.array(rewards) - flat.mean()) / (flat.std(ddof=1) + 1e-4)
            ends = np.array([*row["step_ends"], len(row["tokens"]) - 1])
            expected = [normal[ends >= at].sum() for at in range(len(row["tokens"]))]
            assert row["advantages"] == pytest.approx(expected, abs=1e-5)


def test_overlong_penalty_is_no_variance_for_dynamic_sampling() -> None:
    made = group((2, 6, 7, 8))
    wrong = named(lambda completions: [0.0] * len(completions), "right")
    scorer = Scorer([wrong], overlong_buffer=4, max_tokens=8)
    [judged] = scorer([made], 0).results
    scorer.close()
    assert len({result.reward for result in judged}) == 4
    assert all_alike(judged, of_steps=False)
    right = replace(judged[0], reward=1.0, unshaped=1.0)
    assert not all_alike((right, *judged[1:]), of_steps=False)
    # Right and long against wrong and short: equal once shaped, and yet 0 < correct < G.
    shaped = (RewardResult(0.0, unshaped=1.0), RewardResult(0.0, unshaped=0.0))
    assert not all_alike(shaped, of_steps=False)


def test_different_steps_are_variance_for_process_advantages() -> None:
    first = RewardResult(1.0, {}, (Step(0, 1.0), Step(1, 0.0)), unshaped=1.0)
    second = RewardResult(1.0, {}, (Step(0, 0.0), Step(1, 1.0)), unshaped=1.0)
    assert all_alike((first, second), of_steps=False)
    assert not all_alike((first, second), of_steps=True)
    assert all_alike((RewardResult(None), RewardResult(None)), of_steps=True)


@pytest.mark.parametrize("kind", ["sequence_mean", "token_mean", "constant", "sequence_sum"])
def test_weights_count_sequences_left_out_of_the_loss(kind: str) -> None:
    stage = small(f"algorithm.weights.kind={kind}").stages[0]
    made = group((2, 3, 4, 3))
    estimates = Estimates(torch.ones(12, dtype=torch.float64))
    batch, algorithm = from_groups([made]), stage.algorithm  # type: ignore[union-attr]
    whole, chosen = (
        minibatches(
            algorithm, batch, estimates, keep, count=1, max_tokens=stage.rollout.max_tokens, seed=0
        )[0]  # type: ignore[union-attr]
        for keep in (range(4), [1])
    )
    assert chosen.places == [1]
    part = chosen.batch
    assert part.weight_N.tolist() == whole.batch.weight_N[2:5].tolist()
    assert (part.token_weight, part.metric_weight) == (1 / 12, 1 / 3)
