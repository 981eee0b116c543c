"""Every preset runs: a few steps from end to end, with what it alone needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from keel.algorithms.presets import PRESETS
from keel.analysis.metrics import unknown
from keel.config.load import load_recipe
from keel.models.policy import load_policy
from keel.runs.reader import load
from tests.training.small import metrics, needs, run

pytestmark = pytest.mark.slow

DENSE = "rewards.functions=[{function='place_match'}]"
STEPS = "rewards.functions=[{function='tests.training.rewards:digits_in_order'}]"


def overrides(name: str) -> list[str]:
    reward = STEPS if PRESETS[name].algorithm.needs_steps else DENSE
    return [f"algorithm.preset={name}", reward, "steps=2", "evaluation.prompts=4"]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_trains_and_logs_known_metrics(name: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", *overrides(name), *needs(name, tmp_path / "teacher"))
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in rows), "nothing was learned from"
    assert unknown(set(rows[0]) - {"stage", "step"}) == []
    row = PRESETS[name].algorithm
    for record in rows:  # the recorded terms of the loss, of all tokens and all updates
        terms = [
            value
            for one in load(folder.path).rollouts(record["step"])
            for column, values in one.items()
            if column.startswith("loss/")
            for value in values
        ]
        # Of order 1 each, in float32: absolute, since they cancel on policy.
        others = record.get("loss/demonstrations", 0.0)  # of no token that was recorded
        assert sum(terms) + others == pytest.approx(record["loss"], abs=1e-5)
        if row.needs_greedy:  # of greedy completions there is no row
            written = sum(sum(one["written"]) for one in load(folder.path).rollouts(record["step"]))
            assert record["rollout/tokens"] > written
    held = row.divergence is not None or row.needs_reference
    assert ("kl/reference" in rows[1] or "kl" in rows[1]) == held
    assert ("value/loss" in rows[1]) == row.needs_value
    assert ("reward/greedy" in rows[1]) == row.needs_greedy
    assert ("teacher/kl" in rows[1]) == row.scores_teacher
    assert ("teacher/divergence" in rows[1]) == (row.loss_distillation is not None)
    recipe = load_recipe(load(folder.path).recipe())
    start = load_policy(recipe.model, recipe.seed).trainable()
    last = load(folder.path).checkpoints()[-1].path
    assert (last / "reference.safetensors").exists() == row.needs_reference
    end = load_file(last / "trainable.safetensors")
    assert all((start[name] != end[name]).any() for name in start), "a weight stayed"


def test_recorded_terms_of_several_updates_add_up_to_the_loss(tmp_path: Path) -> None:
    several = ("epochs=2", "minibatches=2", "algorithm.entropy=0.01", "value.kind=head")
    folder = run(tmp_path / "run", *overrides("ppo"), *several)
    for record in metrics(folder):
        rows = load(folder.path).rollouts(record["step"])
        names = ("loss/policy", "loss/value", "loss/entropy")
        assert {name for name in rows[0] if name.startswith("loss/")} == set(names)
        sums = {name: sum(sum(row[name]) for row in rows) for name in names}
        assert sum(sums.values()) == pytest.approx(record["loss"], abs=1e-5)
        assert sums["loss/policy"] == pytest.approx(record["loss/policy"], abs=1e-5)
        # Means over the tokens' updates; each token is in as many of them.
        entropies = [value for row in rows for value in row["entropies"]]
        assert sum(entropies) / len(entropies) == pytest.approx(record["entropy"], rel=1e-2)


def test_evaluated_completions_are_recorded_with_their_result(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", *overrides("grpo"), "evaluation.samples=2")
    loaded = load(folder.path)
    assert [place.step for place in loaded.evaluation_places()] == [0, 2]
    rows = loaded.evaluation(2)
    assert [row["mode"] for row in rows] == ["greedy"] * 4 + ["sampled"] * 8
    greedy = [row for row in rows if row["mode"] == "greedy"]
    assert sum(row["passed"] for row in greedy) / 4 == metrics(folder)[-1]["eval/pass@1"]
    assert all(row["expected"] for row in rows)
    shown = "".join(rows[0]["pieces"]).replace("<eos>", "").replace("<pad>", "")
    assert shown == rows[0]["completion"]
