"""Demonstrations in the optimizer steps of reinforcement learning: drawn, refused, learned from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.config.control import load_control
from keel.models.policy import load_policy
from keel.training.supervised import mixed_in
from keel.types import KeelError
from tests.training.small import SHOWN, info, metrics, run, small

HARD = (
    "steps=60",
    "tasks=[{name='sort_digits', options={min_digits=3, max_digits=3}}]",
    "rewards.functions=[]",
    "optimizer.learning_rate=3e-3",
    "rollout={prompts_per_step=8, group_size=4, max_tokens=5}",
    "evaluation={every=0, prompts=100, samples=0}",
    "rollouts_every=0",
    "checkpoints.every=100",
)
"""A task that the random policy never gets right."""
TERM = "algorithm.auxiliary=[{kind='demonstrations', coefficient=0.5, weighting='none'}]"


@pytest.mark.slow
def test_demonstrations_lift_a_policy_that_is_never_right(tmp_path: Path) -> None:
    """Plain GRPO has nothing to learn from; over three seeds the other ended at 0.7 or more."""
    plain = run(tmp_path / "plain", *HARD)
    assert {row["reward"] for row in metrics(plain)} == {0.0}
    assert info(plain)["evaluation"]["rl"]["after"]["mean"] == 0.0
    shown = run(tmp_path / "shown", *HARD, SHOWN.replace("size=6", "size=48"), TERM)
    rows = metrics(shown)
    assert info(shown)["evaluation"]["rl"]["before"]["mean"] == 0.0
    assert info(shown)["evaluation"]["rl"]["after"]["mean"] > 0.4
    assert rows[-1]["reward"] > 0.2
    assert rows[-1]["loss/demonstrations"] < 0.5 * rows[0]["loss/demonstrations"]


def test_tokens_of_a_step_include_demonstrations(tmp_path: Path) -> None:
    """Six of four tokens and an answer of four, in each optimizer step."""
    none = TERM.replace("0.5", "0.0")
    keys = ("steps=1", "minibatches=2", SHOWN, "evaluation.prompts=0")
    (shown,), (plain,) = (
        metrics(run(tmp_path / name, *keys, term)) for name, term in (("a", TERM), ("b", none))
    )
    assert shown["step/tokens"] - plain["step/tokens"] == 2 * 6 * (4 + 4)


def test_warm_up_of_values_imitates_nothing(tmp_path: Path) -> None:
    keys = ("algorithm=ppo", "steps=2", "value.warmup_steps=1", SHOWN, TERM)
    first, second = metrics(run(tmp_path, *keys))
    names = {"loss/demonstrations", "demonstrations/share"}
    assert not names & first.keys()
    assert names <= second.keys()


def test_draws_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    recipe = small("algorithm=chord", SHOWN)
    writer = SimpleNamespace(note=lambda text: None)
    folder = SimpleNamespace(quarantine=tmp_path)
    context: Any = SimpleNamespace(
        recipe=recipe,
        policy=load_policy(recipe.model, 0),
        resume_from=None,
        writer=writer,
        folder=folder,
    )
    source = recipe.stages[0].imitated
    first, again = (mixed_in(context, source, "rl", 7) for _ in range(2))
    other = mixed_in(context, source, "rl", 8)
    assert first is not None and again is not None and other is not None  # noqa: PT018
    again(1, 0)
    assert torch.equal(first(3, 1).tokens_T, again(3, 1).tokens_T)
    drawn = [first(3, 1), first(3, 0), first(2, 1), other(3, 1)]
    assert len({tuple(one.tokens_T.tolist()) for one in drawn}) == 4
    assert drawn[0].sequences == 6
    # Of a number of three digits: its digits sorted, and the end of the sequence.
    assert drawn[0].lengths == (4,) * 6


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ((TERM,), "demonstrations.data holds the examples of algorithm.auxiliary.kind = "),
        ((SHOWN,), "set both or none of the two"),
        (
            (
                TERM,
                "demonstrations={data=[{name='datasets', path='a', options={streaming=true}}]}",
            ),
            "a streamed set has no known end: leave out options.streaming",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(keys: tuple[str, ...], reason: str) -> None:
    with pytest.raises(KeelError) as caught:
        small(*keys)
    assert reason in str(caught.value)


def test_environments_have_no_texts_to_imitate() -> None:
    with pytest.raises(KeelError, match="imitates texts, and environments have none"):
        load_control("reinforce", "CartPole-v1", ["algorithm.auxiliary.kind=replies"])
