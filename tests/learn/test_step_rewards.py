"""Rewards of steps: their places, outcomes of 0 besides them, and who refuses them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import GAE, Algorithm, CustomAdvantage, MonteCarlo
from keel.learn.advantages import estimate, outcome, reads_steps
from keel.learn.batch import from_groups
from keel.learn.loss import prepare
from keel.rewards.compose import compose
from keel.rewards.registry import NamedReward
from keel.rewards.validation import Said, read_rewards
from keel.types import Completion, Group, KeelError, Prompt, Step, Verdict


def group(size: int, tokens: int) -> Group:
    completion = Completion(
        tokens=np.arange(tokens),
        log_probs=np.zeros(tokens, np.float32),
        written=np.ones(tokens, dtype=bool),
        finish="eos",
        text="",
    )
    return Group(Prompt("p", "p", tokens=(7,)), (completion,) * size)


def steps(*rewards: float) -> Verdict:
    """A step at every token."""
    every = tuple(Step(end, reward) for end, reward in enumerate(rewards))
    return Verdict(sum(rewards), {}, every)


def row(name: str) -> Algorithm:
    return PRESETS[name].row.model_copy(update={"divergence": None})


def advantages(chosen: Algorithm, *verdicts: Verdict, tokens: int = 3) -> list[list[float]]:
    made = group(len(verdicts), tokens)
    batch = from_groups([made])
    if chosen.needs_value:
        batch = replace(batch, value_N=torch.zeros(tokens * len(verdicts)))
    found = estimate(chosen, batch, outcome([made], [verdicts], None), 0.0).advantage_N
    assert found is not None
    rows: list[list[float]] = found.view(len(verdicts), tokens).tolist()
    return rows


def test_gae_gets_each_steps_reward_at_its_last_token() -> None:
    chosen = row("ppo").model_copy(update={"advantage": GAE(lam=0.5)})
    first, last, whole = advantages(chosen, steps(1, 0, 0), steps(0, 0, 1), Verdict(1.0))
    assert first == [1.0, 0.0, 0.0]
    assert last == whole == [0.25, 0.5, 1.0]


def test_a_return_to_go_counts_the_steps_that_are_yet_to_end_and_the_outcome() -> None:
    chosen = row("reinforce").model_copy(update={"advantage": MonteCarlo(baseline="none")})
    with_outcome = replace(steps(1, 2, 0), reward=7.0, outcome=4.0)
    assert advantages(chosen, with_outcome) == [[7.0, 6.0, 4.0]]


def test_a_completion_without_reward_stays_without_advantage_where_others_have_steps() -> None:
    chosen = row("reinforce").model_copy(update={"advantage": MonteCarlo(baseline="none")})
    assert advantages(chosen, steps(1, 0, 0), Verdict(None)) == [[1.0, 0.0, 0.0], [0.0] * 3]


@pytest.mark.parametrize("outcome_said", [True, False], ids=["said", "by difference"])
def test_an_outcome_of_zero_is_a_step_where_another_of_the_group_has_one(
    outcome_said: bool,
) -> None:
    """Steps of 1 and 1 in both; one answer is right (3), the other wrong (2)."""
    right = replace(steps(1, 1), reward=3.0, outcome=1.0 if outcome_said else None)
    wrong = replace(steps(1, 1), outcome=0.0 if outcome_said else None)
    found = advantages(row("grpo_process"), right, wrong, tokens=2)
    rewards = np.array([1, 1, 1, 1, 1, 0])
    normal = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert found[0] == pytest.approx([normal[:3].sum(), normal[1:3].sum()])
    assert found[1] == pytest.approx([normal[3:].sum(), normal[4:].sum()])


def test_outcomes_that_are_all_zero_are_steps_too_where_a_reward_gave_them() -> None:
    first = replace(steps(1, 0), outcome=0.0)
    second = replace(steps(0, 0), outcome=0.0)
    bare = advantages(row("grpo_process"), steps(1, 0), steps(0, 0), tokens=2)
    assert advantages(row("grpo_process"), first, second, tokens=2) != bare


def test_the_weighed_rewards_say_what_part_is_of_the_whole_answer() -> None:
    functions = [NamedReward("steps", None), NamedReward("right", None, weight=2.0)]
    said = {
        "steps": [Said(1.0, (Step(0, 1.0),)), Said(0.0, (Step(0, 0.0),))],
        "right": [Said(0.0), Said()],
    }
    first, second = compose(functions, said, [0, 0])
    assert (first.reward, first.outcome) == (1.0, 0.0)
    assert (second.reward, second.outcome) == (0.0, None)


def test_an_empty_list_of_steps_is_no_outcome() -> None:
    functions = [NamedReward("steps", None)]
    one, other, none = read_rewards([[(0, 1.0), (1, 0.0)], [(0, 0.0), (1, 1.0)], []], [2, 2, 2])
    composed = compose(functions, {"steps": [one, other, none]}, [0, 0, 0])
    assert [(c.reward, c.outcome) for c in composed] == [(1.0, None), (1.0, None), (0.0, None)]
    verdicts = [Verdict(c.reward, {}, c.steps, c.outcome) for c in composed]
    chosen = row("grpo_process")
    first, second, third = advantages(chosen, *verdicts, tokens=2)
    # Four steps of which two are right; nothing is added to them at the ends.
    assert [first, second] == advantages(chosen, *verdicts[:2], tokens=2)
    assert third == [0.0, 0.0]


def test_a_closed_gate_is_an_outcome_beside_steps() -> None:
    gate = NamedReward("format", None, gate_below=1.0, gated_reward=0.0)
    said = {"format": [Said(1.0), Said(0.0)], "steps": [Said(1.0, (Step(0, 1.0),)), Said(0.0, ())]}
    _, shut = compose([gate, NamedReward("steps", None)], said, [0, 0])
    assert (shut.reward, shut.steps, shut.outcome) == (0.0, (), 0.0)


def test_steps_of_a_completion_without_written_tokens_reach_no_other() -> None:
    made = group(2, 3)
    unwritten = replace(made.completions[0], written=np.zeros(3, dtype=bool))
    chosen = row("reinforce").model_copy(update={"advantage": MonteCarlo(baseline="none")})
    both = Group(made.prompt, (unwritten, made.completions[1]))
    judged = outcome([both], [(steps(5, 5, 5), steps(0, 0, 1))], None)
    found = estimate(chosen, from_groups([both]), judged, 0.0).advantage_N
    assert found is not None
    assert found.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "reinforce_pp", "remax", "gspo", "gmpo", "dr_grpo"]
)
def test_an_advantage_of_whole_answers_refuses_steps(name: str) -> None:
    with pytest.raises(KeelError, match=r'grpo_process.*aggregate = "min"'):
        advantages(row(name), steps(1, 0, 0), steps(0, 0, 1))


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        ("keel.objective.gae:returns_to_go", True),
        ("keel.objective.process:process_group_relative", True),
        ("keel.objective.group:optimal", False),
    ],
)
def test_a_users_advantage_reads_steps_where_it_names_them(function: str, reads: bool) -> None:
    own = row("grpo").model_copy(update={"advantage": CustomAdvantage(function=function)})
    assert reads_steps(own) is reads


def test_rewards_keep_all_their_digits_until_the_advantage() -> None:
    """Around 1e5 a float32 is .008 apart: (x − mean) of .1 would be off in the first digits."""
    rewards = [1e5 + 0.1 * at for at in range(4)]
    chosen = row("grpo")
    found = advantages(chosen, *map(Verdict, rewards), tokens=1)
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    assert np.ravel(found) == pytest.approx(expected, abs=1e-7)


def test_whitening_sees_all_digits_of_the_rewards() -> None:
    chosen = row("reinforce_pp")
    made = group(4, 1)
    rewards = [1e5 + 0.1 * at for at in range(4)]
    judged = outcome([made], [tuple(map(Verdict, rewards))], None)
    batch = from_groups([made])
    found = prepare(chosen, batch, estimate(chosen, batch, judged, 0.0), 8).advantage_N
    expected = (np.array(rewards) - np.mean(rewards)) / np.std(rewards, ddof=1)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
