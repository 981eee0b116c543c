"""A learned reward that is trained against while another watches, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.config.schema import explain_recipe
from keel.runs.reader import load
from keel.training.run import train
from tests.training.judged import data, ones, recipe
from tests.training.small import metrics, run

TASK = {"name": "sort_digits"}
OUTCOME = {"function": "outcome", "options": {"stage": "reward_model"}}
WATCHING = {"function": "task", "name": "hidden_rule", "weight": 0.0}
KL = ("kl", "kl/reference", "kl/sequence")


def learned(tmp_path: Path, *functions: dict[str, Any], **keys: Any) -> Path:
    """A reward model of a few steps, then a few steps against it."""
    rows = data(tmp_path, ones(48, 1), ones(24, 2))
    brief = {"steps": 3, "batch_size": 8, "optimizer": {"learning_rate": 4e-3}}
    against = {
        "stage": "rl",
        "steps": 20,
        "tasks": [TASK],
        "algorithm": {"preset": "ppo", "divergence": {"beta": 0.0}},
        "rewards": {"functions": list(functions)},
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_tokens": 6},
        "evaluation": {"prompts": 4},
        **keys,
    }
    made = recipe({"stage": "reward_model", "data": rows, **brief}, against)
    return train(made, tmp_path / "run").path


def test_over_optimisation_plot(tmp_path: Path) -> None:
    folder = learned(tmp_path, OUTCOME, WATCHING, reference={"measured": True})
    picture = folder / "pictures/rl-over-optimisation.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for row in load(folder).metrics("rl"):
        assert {"kl/sequence", "rewards/outcome/mean", "rewards/hidden_rule/mean"} <= set(row)
    assert [row["kl/sequence"] != 0 for row in load(folder).metrics("rl")] == [False] + [True] * 19


@pytest.mark.slow
@pytest.mark.parametrize(
    ("functions", "measured"),
    [((OUTCOME,), True), ((OUTCOME, WATCHING), False)],
    ids=["nothing watches", "no divergence"],
)
def test_no_plot_without_a_second_reward_or_divergence(
    functions: tuple[dict[str, Any], ...], measured: bool, tmp_path: Path
) -> None:
    folder = learned(tmp_path, *functions, reference={"measured": measured})
    assert not (folder / "pictures/rl-over-optimisation.png").exists()


def test_measured_reference_does_not_change_training(tmp_path: Path) -> None:
    """At β = 0 the policy learns the same with and without the reference in memory."""
    plain = metrics(run(tmp_path / "plain", "algorithm.divergence.beta=0"))
    others = metrics(
        run(tmp_path / "measured", "algorithm.divergence.beta=0", "reference.measured=true")
    )
    assert not any(name in row for row in plain for name in KL)
    assert all(name in row for row in others for name in KL)
    for row, other in zip(plain, others, strict=True):
        assert {k: other[k] for k in row} == row


@pytest.mark.parametrize("measured", [False, True])
def test_explain_lists_a_measured_reference(measured: bool) -> None:
    stage = {
        "stage": "rl",
        "tasks": [TASK],
        "algorithm": {"preset": "grpo", "divergence": {"beta": 0.0}},
        "reference": {"measured": measured},
    }
    (found,) = explain_recipe(recipe(stage))
    models = {use.role: use for use in found.models}
    assert ("reference" in models) == measured
    if measured:
        assert models["reference"].loaded
        assert "to measure by" in models["reference"].what
