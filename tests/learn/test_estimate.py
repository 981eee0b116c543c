"""From verdicts to advantages: silent rewards, greedy baselines, steps beside outcomes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm, GroupRelative
from keel.learn.advantages import RolloutRewards, estimate, outcome
from keel.learn.batch import from_groups
from keel.learn.loss import prepare
from keel.types import Completion, Group, Prompt, Step, Verdict
from tests.learn.flat import blank, sample

LENGTHS, GROUPS = (2, 3, 1, 1, 2), (0, 0, 1, 1, 1)
NAN = float("nan")


def judged(*rewards: float) -> RolloutRewards:
    return RolloutRewards(torch.tensor(rewards, dtype=torch.float64))


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "grpo"])
def test_a_silent_sequence_gets_zero_and_leaves_the_whitening(name: str) -> None:
    row = PRESETS[name].algorithm.model_copy(update={"divergence": None})
    if name == "grpo":
        row = row.model_copy(update={"advantage": GroupRelative(whiten=True)})
    made = blank(LENGTHS, GROUPS)
    batch = prepare(row, made, estimate(row, made, judged(1, 0, 3, 2, NAN), 0.0), 8)
    silent, spoken = batch.advantage_N[-2:], batch.advantage_N[:-2]
    assert silent.tolist() == [0.0, 0.0]
    assert float(spoken.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(spoken.var()) == pytest.approx(1.0, abs=1e-6)  # ε = 1e-8 under the root


def test_a_value_baseline_is_one_number_a_sequence_and_its_returns_go_to_the_end() -> None:
    """With the divergence in the reward: A = Σ r − V(first state), returns Σ of what follows."""
    data = {**PRESETS["ppo"].algorithm.model_dump(), "advantage": {"kind": "value_baseline"}}
    row = Algorithm.model_validate({**data, "ratio": "sequence"})
    made = sample(LENGTHS, GROUPS, 3, shift=0.0).batch
    assert made.old_log_prob_N is not None
    assert made.reference_log_prob_N is not None
    assert made.value_N is not None
    rewards, beta = [1.0, 0.0, 3.0, 2.0, NAN], 0.3
    found = estimate(row, made, judged(*rewards), beta)
    old, other = made.old_log_prob_N.tolist(), made.reference_log_prob_N.tolist()
    value = made.value_N.tolist()
    advantage: list[float] = []
    returns: list[float] = []
    at = 0
    for reward, length in zip(rewards, LENGTHS, strict=True):
        own = range(at, at + length)
        paid = [-beta * (old[n] - other[n]) + (reward if n == at + length - 1 else 0) for n in own]
        silent = reward != reward
        for n in own:
            advantage.append(0.0 if silent else sum(paid) - value[at])
            returns.append(value[n] if silent else sum(paid[n - at :]))
        at += length
    assert found.return_N is not None
    assert found.advantage_N.tolist() == pytest.approx(advantage, abs=1e-12)
    assert found.return_N.tolist() == pytest.approx(returns, abs=1e-12)


def group(*rewards: tuple[float | None, tuple[Step, ...]]) -> tuple[Group, tuple[Verdict, ...]]:
    """Completions of four tokens of which the second is a tool's."""
    written = np.array([True, False, True, True])
    completion = Completion(
        tokens=np.arange(4),
        log_probs=np.zeros(4, np.float32),
        written=written,
        finish="eos",
        text="",
    )
    verdicts = tuple(Verdict(reward, {}, steps) for reward, steps in rewards)
    return Group(Prompt("p", "p", tokens=(7,)), (completion,) * len(rewards)), verdicts


def test_a_greedy_completion_without_reward_is_no_baseline() -> None:
    made, verdicts = group((1.0, ()), (3.0, ()))
    row = PRESETS["remax"].algorithm.model_copy(update={"divergence": None})
    batch = from_groups([made])
    for baseline, expected in ((0.5, [0.5] * 3 + [2.5] * 3), (NAN, [0.0] * 6)):
        found = estimate(row, batch, outcome([made], [verdicts], [baseline]), 0.0).advantage_N
        assert found is not None
        assert found.tolist() == pytest.approx(expected)


def test_what_a_reward_holds_beside_its_steps_is_a_step_at_the_end() -> None:
    """Steps sum to 1 and the reward is 0.25: the −0.75 beside them ends with the completion."""
    made, verdicts = group((0.25, (Step(0, 0.4), Step(2, 0.6))), (2.0, (Step(3, 2.0),)))
    found = outcome([made], [verdicts], None, torch.float64)
    assert found.step_reward_K is not None
    assert found.step_end_K is not None
    assert found.step_sequence_K is not None
    rows = zip(
        found.step_sequence_K.tolist(), found.step_end_K.tolist(), found.step_reward_K.tolist(),
        strict=True,
    )  # fmt: skip
    # Ends count written tokens only: tokens 0, 2, 3 are the written 0, 1, 2.
    # The other completion of the group has such a step too, of 0.
    expected = [(0, 0, 0.4), (0, 1, 0.6), (0, 2, -0.75), (1, 2, 0.0), (1, 2, 2.0)]
    assert sorted(rows) == [pytest.approx(row) for row in expected]


def test_a_batch_without_any_step_learns_from_each_answers_reward_as_its_step() -> None:
    """As where a gate shuts every completion out: equal rewards, so nothing to learn."""
    made, verdicts = group((1.0, ()), (0.0, ()))
    row: Algorithm = PRESETS["grpo_process"].algorithm.model_copy(update={"divergence": None})
    batch = from_groups([made])
    apart = estimate(row, batch, outcome([made], [verdicts], None), 0.0).advantage_N
    assert apart is not None
    # Two rewards, 1 and 0: less ½, over the unbiased deviation √½.
    first = int(batch.lengths_S[0])
    assert apart[:first].tolist() == pytest.approx([0.5 / (0.5**0.5 + 1e-4)] * first)
    made, shut = group((-0.5, ()), (-0.5, ()))
    same = estimate(row, from_groups([made]), outcome([made], [shut], None), 0.0).advantage_N
    assert same is not None
    assert same.abs().max() == 0
