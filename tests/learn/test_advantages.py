"""From results to advantages: sequences without reward, baselines, and rewards of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from keel.algorithms.advantages import GAE, CustomAdvantage, MonteCarlo
from keel.algorithms.group_advantages import GroupRelative
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.learn.advantages import RolloutRewards, estimate, outcome, reads_steps
from keel.learn.batch import from_groups
from keel.learn.loss import prepare
from keel.rewards.outputs import RewardOutput, read_rewards
from keel.rewards.scorer import compose
from keel.types import Group, KeelError, Prompt, RewardResult, Step
from tests.learn.flat import answer, blank, sample
from tests.rewards.made import named

LENGTHS, GROUPS = (2, 3, 1, 1, 2), (0, 0, 1, 1, 1)
NAN = float("nan")


def algorithm(name: str, **changes: object) -> Algorithm:
    return PRESETS[name].algorithm.model_copy(update={"divergence": None, **changes})


TO_GO = algorithm("reinforce", advantage=MonteCarlo(baseline="none"))


def rewards(*values: float) -> RolloutRewards:
    return RolloutRewards(torch.tensor(values, dtype=torch.float64))


def group(size: int, written: Sequence[bool]) -> Group:
    """Completions with these tokens, of which the policy wrote some."""
    return Group(Prompt("p", "p", tokens=(7,)), (answer(range(len(written)), written),) * size)


def steps(*values: float) -> RewardResult:
    """A step at every token."""
    every = tuple(Step(end, value) for end, value in enumerate(values))
    return RewardResult(sum(values), {}, every)


def advantages(chosen: Algorithm, *results: RewardResult, tokens: int = 3) -> list[list[float]]:
    """By completion, for completions of so many tokens in one group."""
    made = group(len(results), [True] * tokens)
    batch = from_groups([made])
    if chosen.needs_value:
        batch = replace(batch, value_N=torch.zeros(tokens * len(results)))
    found = estimate(chosen, batch, outcome([made], [results], None), 0.0).advantage_N
    listed: list[list[float]] = found.view(len(results), tokens).tolist()
    return listed


# ---------------------------------------------------------------- outcomes


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "grpo"])
def test_sequence_without_reward_has_advantage_zero_and_is_not_whitened(name: str) -> None:
    chosen = algorithm(name)
    if name == "grpo":
        chosen = chosen.model_copy(update={"advantage": GroupRelative(whiten=True)})
    made = blank(LENGTHS, GROUPS)
    batch = prepare(chosen, made, estimate(chosen, made, rewards(1, 0, 3, 2, NAN), 0.0), 8)
    without, scored = batch.advantage_N[-2:], batch.advantage_N[:-2]
    assert without.tolist() == [0.0, 0.0]
    assert float(scored.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(scored.var()) == pytest.approx(1.0, abs=1e-6)  # ε = 1e-8 under the root


def test_value_baseline_is_one_number_a_sequence_with_returns_to_go() -> None:
    """With the divergence in the reward: A = Σ r − V(first state), returns Σ of what follows."""
    data = {**PRESETS["ppo"].algorithm.model_dump(), "advantage": {"kind": "value_baseline"}}
    chosen = Algorithm.model_validate({**data, "ratio": "sequence"})
    made = sample(LENGTHS, GROUPS, 3, shift=0.0).batch
    assert made.old_log_prob_N is not None
    assert made.reference_log_prob_N is not None
    assert made.value_N is not None
    values, beta = [1.0, 0.0, 3.0, 2.0, NAN], 0.3
    found = estimate(chosen, made, rewards(*values), beta)
    penalty_N = -beta * (made.old_log_prob_N - made.reference_log_prob_N)
    advantage: list[float] = []
    returns: list[float] = []
    for reward, own, value in zip(
        values, penalty_N.split(LENGTHS), made.value_N.split(LENGTHS), strict=True
    ):
        paid = [*own.tolist()[:-1], float(own[-1]) + reward]
        missing = reward != reward
        advantage += [0.0 if missing else sum(paid) - float(value[0])] * len(paid)
        returns += value.tolist() if missing else [sum(paid[n:]) for n in range(len(paid))]
    assert found.return_N is not None
    assert found.advantage_N.tolist() == pytest.approx(advantage, abs=1e-12)
    assert found.return_N.tolist() == pytest.approx(returns, abs=1e-12)


def test_greedy_completion_without_reward_is_no_baseline() -> None:
    made = group(2, [True] * 3)
    batch = from_groups([made])
    for baseline, expected in ((0.5, [0.5] * 3 + [2.5] * 3), (NAN, [0.0] * 6)):
        judged = outcome([made], [(RewardResult(1.0), RewardResult(3.0))], [baseline])
        found = estimate(algorithm("remax"), batch, judged, 0.0).advantage_N
        assert found.tolist() == pytest.approx(expected)


def test_advantages_keep_all_digits_of_large_rewards() -> None:
    """Around 1e5 a float32 is .008 apart: (x − mean) of .1 would be off in the first digits."""
    values = [1e5 + 0.1 * at for at in range(4)]
    centred = np.array(values) - np.mean(values)
    found = advantages(algorithm("grpo"), *map(RewardResult, values), tokens=1)
    assert np.ravel(found) == pytest.approx(centred / (np.std(values, ddof=1) + 1e-4), abs=1e-7)
    chosen, made = algorithm("reinforce_pp"), group(4, [True])
    batch = from_groups([made])
    judged = outcome([made], [tuple(map(RewardResult, values))], None)
    whitened = prepare(chosen, batch, estimate(chosen, batch, judged, 0.0), 8).advantage_N
    assert whitened.tolist() == pytest.approx(centred / np.std(values, ddof=1), abs=1e-5)


# ---------------------------------------------------------------- rewards of steps


def test_outcome_is_a_step_at_the_end() -> None:
    made = group(2, [True, False, True, True])
    results = (
        RewardResult(0.25, {}, (Step(0, 0.4), Step(2, 0.6)), outcome=-0.75),
        RewardResult(2.0, {}, (Step(3, 2.0),)),
    )
    found = outcome([made], [results], None)
    assert found.step_reward_K is not None
    assert found.step_end_K is not None
    assert found.step_sequence_K is not None
    listed = zip(
        found.step_sequence_K.tolist(), found.step_end_K.tolist(), found.step_reward_K.tolist(),
        strict=True,
    )  # fmt: skip
    # Ends count written tokens only: tokens 0, 2, 3 are the written 0, 1, 2.
    # The other completion of the group has such a step too, of 0.
    expected = [(0, 0, 0.4), (0, 1, 0.6), (0, 2, -0.75), (1, 2, 0.0), (1, 2, 2.0)]
    assert sorted(listed) == [pytest.approx(step) for step in expected]


def test_batch_without_steps_uses_each_reward_as_one_step() -> None:
    """As where a gate refuses every completion: equal rewards, so nothing to learn."""
    chosen = algorithm("grpo_process")
    # Two rewards, 1 and 0: less ½, over the unbiased deviation √½.
    first, _ = advantages(chosen, RewardResult(1.0), RewardResult(0.0))
    assert first == pytest.approx([0.5 / (0.5**0.5 + 1e-4)] * 3)
    assert advantages(chosen, RewardResult(-0.5), RewardResult(-0.5)) == [[0.0] * 3] * 2


def test_gae_gets_each_steps_reward_at_its_last_token() -> None:
    chosen = algorithm("ppo", advantage=GAE(lam=0.5))
    first, last, whole = advantages(
        chosen, steps(1, 0, 0), steps(0, 0, 1), RewardResult(1.0, outcome=1.0)
    )
    assert first == [1.0, 0.0, 0.0]
    assert last == whole == [0.25, 0.5, 1.0]


def test_return_to_go_counts_later_steps_and_the_outcome() -> None:
    with_outcome = replace(steps(1, 2, 0), reward=7.0, outcome=4.0)
    assert advantages(TO_GO, with_outcome) == [[7.0, 6.0, 4.0]]
    assert advantages(TO_GO, steps(1, 0, 0), RewardResult(None)) == [[1.0, 0.0, 0.0], [0.0] * 3]


def test_outcomes_that_are_all_zero_are_steps_where_a_reward_gave_them() -> None:
    chosen = algorithm("grpo_process")
    first, second = (replace(one, outcome=0.0) for one in (steps(1, 0), steps(0, 0)))
    bare = advantages(chosen, steps(1, 0), steps(0, 0), tokens=2)
    assert advantages(chosen, first, second, tokens=2) != bare


def test_composed_rewards_keep_the_outcome_apart_from_steps() -> None:
    functions = [named(None, "steps"), named(None, "right", weight=2.0)]
    of_steps = [RewardOutput(1.0, (Step(0, 1.0),)), RewardOutput(0.0, (Step(0, 0.0),))]
    first, second = compose(
        functions, {"steps": of_steps, "right": [RewardOutput(0.0), RewardOutput()]}, [0, 0]
    )
    assert (first.reward, first.outcome) == (1.0, 0.0)
    assert (second.reward, second.outcome) == (0.0, None)


def test_empty_list_of_steps_is_no_outcome() -> None:
    values = read_rewards([[(0, 1.0), (1, 0.0)], [(0, 0.0), (1, 1.0)], []], [range(2)] * 3)
    composed = compose([named(None, "steps")], {"steps": values}, [0, 0, 0])
    assert [(c.reward, c.outcome) for c in composed] == [(1.0, None), (1.0, None), (0.0, None)]
    results = [RewardResult(c.reward, {}, c.steps, c.outcome) for c in composed]
    first, second, third = advantages(algorithm("grpo_process"), *results, tokens=2)
    # Four steps of which two are right; nothing is added to them at the ends.
    assert [first, second] == advantages(algorithm("grpo_process"), *results[:2], tokens=2)
    assert third == [0.0, 0.0]


def test_steps_of_a_completion_without_written_tokens_reach_no_other() -> None:
    made = group(2, [True] * 3)
    unwritten = replace(made.completions[0], written=np.zeros(3, dtype=bool))
    both = Group(made.prompt, (unwritten, made.completions[1]))
    judged = outcome([both], [(steps(5, 5, 5), steps(0, 0, 1))], None)
    assert estimate(TO_GO, from_groups([both]), judged, 0.0).advantage_N.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp", "remax"])
def test_advantage_of_whole_answers_refuses_steps(name: str) -> None:
    with pytest.raises(KeelError, match=r'grpo_process.*aggregate = "min"'):
        advantages(algorithm(name), steps(1, 0, 0), steps(0, 0, 1))


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        ("keel.objective.gae:returns_to_go", True),
        ("keel.objective.group:process_group_relative", True),
        ("keel.objective.group:optimal", False),
    ],
)
def test_users_advantage_reads_steps_where_it_names_them(function: str, reads: bool) -> None:
    assert reads_steps(algorithm("grpo", advantage=CustomAdvantage(function=function))) is reads
