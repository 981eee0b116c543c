"""Every preset runs: a few steps from end to end, with what it alone needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from keel.algorithms.presets import PRESETS
from keel.analysis.glossary import unknown
from keel.config.load import load_recipe
from keel.models.policy import load_policy
from keel.runs.reader import load
from tests.training.small import metrics, run

DENSE = "rewards.functions=[{function='place_match'}]"
STEPS = "rewards.functions=[{function='tests.training.rewards:digits_in_order'}]"


def overrides(name: str) -> list[str]:
    reward = STEPS if PRESETS[name].algorithm.needs_steps else DENSE
    return [f"algorithm.preset={name}", reward, "steps=2", "evaluation.prompts=4"]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_trains_and_logs_known_metrics(name: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", *overrides(name))
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in rows), "nothing was learned from"
    assert unknown(set(rows[0]) - {"stage", "step"}) == []
    row = PRESETS[name].algorithm
    assert ("kl/reference" in rows[1] or "kl" in rows[1]) == (row.divergence is not None)
    assert ("value/loss" in rows[1]) == row.needs_value
    assert ("reward/greedy" in rows[1]) == row.needs_greedy
    recipe = load_recipe(load(folder.path).recipe())
    start = load_policy(recipe.model, recipe.seed).trainable()
    end = load_file(load(folder.path).checkpoints()[-1].path / "trainable.safetensors")
    assert all((start[name] != end[name]).any() for name in start), "a weight stayed"


def test_reference_is_saved_only_with_a_divergence(tmp_path: Path) -> None:
    with_kl = run(tmp_path / "a", *overrides("grpo"))
    without = run(tmp_path / "b", *overrides("dr_grpo"))
    assert (load(with_kl.path).checkpoints()[-1].path / "reference.safetensors").exists()
    assert not (load(without.path).checkpoints()[-1].path / "reference.safetensors").exists()


def test_recorded_advantages_of_grpo(tmp_path: Path) -> None:
    """GRPO's advantages of a group, from its recorded rewards, by hand."""
    folder = run(tmp_path / "run", *overrides("grpo"))
    rows = load(folder.path).rollouts(1)
    groups: dict[int, list] = {}  # type: ignore[type-arg]
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    assert len(groups) == 4
    for members in groups.values():
        rewards = torch.tensor([m["reward"] for m in members], dtype=torch.float64)
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for member, value in zip(members, expected.tolist(), strict=True):
            assert member["advantages"] == pytest.approx([value] * len(member["tokens"]), abs=1e-5)
