"""Rollouts: refills of dynamic sampling, what rewards record, what stands in no batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.config.load import load_recipe
from keel.runs.reader import load
from keel.training.run import train
from keel.types import KeelError
from tests.training import rewards
from tests.training.small import metrics, run, small

HERE = "tests.training.rewards"


def function(name: str) -> str:
    return f"rewards.functions=[{{function='{HERE}:{name}'}}]"


def test_refills_keep_variance_and_extras_of_their_completions(tmp_path: Path) -> None:
    """The reward records each completion's length, but not in every round of sampling."""
    words = (function("records_now_and_then"), "rollout.dynamic_sampling=true", "steps=3")
    folder = run(tmp_path / "run", *words)
    printed = []
    for step in (1, 2, 3):
        by_group: dict[int, set[float]] = {}
        for row in load(folder.path).rollouts(step):
            by_group.setdefault(row["group"], set()).add(row["reward"])
            printed += [row] if row.get("extra/tokens") is not None else []
        assert all(len(rewards) > 1 for rewards in by_group.values())
    assert printed
    assert all(row["extra/tokens"] == len(row["tokens"]) for row in printed)
    assert any(row["rollout/refills"] > 0 for row in metrics(folder))


def test_step_without_rewards_is_skipped_with_a_note(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", function("never"), "steps=2")
    assert [row["step/tokens"] for row in metrics(folder)] == [0.0, 0.0]
    notes = [e["text"] for e in load(folder.path).events() if e["event"] == "note"]
    assert len(notes) == 2
    assert "nothing" not in notes[0]
    assert "no group had anything to learn from" in notes[0]


def test_reference_is_reset_after_a_step_without_groups(tmp_path: Path) -> None:
    reward = "rewards.functions=[{function='tests.training.rewards:only_at_first'}]"
    keys = (
        "algorithm.divergence.beta=0.1",
        "reference.reset_every=2",
        "optimizer.learning_rate=0.01",
    )
    folder = run(tmp_path / "run", "steps=3", "evaluation.prompts=0", reward, *keys)
    first, second, third = metrics(folder)
    assert "kl" not in second  # nothing was trained on
    assert (first["kl"], third["kl"]) == (0.0, 0.0)


def test_evaluation_and_rollouts_call_async_rewards_in_one_event_loop(tmp_path: Path) -> None:
    rewards.LOOPS.clear()
    reward = "rewards.functions=[{function='tests.training.rewards:in_a_loop'}]"
    run(tmp_path / "run", "steps=2", "evaluation.prompts=4", reward)
    assert len(rewards.LOOPS) == 4  # two steps, two evaluations
    assert len(set(map(id, rewards.LOOPS))) == 1


def test_rewards_of_a_run_get_texts_before_the_stop_string(tmp_path: Path) -> None:
    rewards.TEXTS.clear()
    words = (function("remembers"), 'rollout.stop=["1", "2", "3"]', "rollout.max_tokens=8")
    folder = run(tmp_path / "run", "steps=2", "evaluation.prompts=4", *words)
    assert len(rewards.TEXTS) == 2 * 4 * 4 + 2 * 4
    assert not [text for text in rewards.TEXTS if set(text) & set("123")]
    rows = load(folder.path).rollouts(1)
    ended = [row for row in rows if row["finish"] == "stop"]
    assert ended
    assert all(row["completion"][-1] in "123" for row in ended)


def test_mask_truncated_gives_zero_advantages(tmp_path: Path) -> None:
    words = ("rewards.functions=[{function='place_match'}]", "rollout.mask_truncated=true")
    folder = run(tmp_path / "run", *words, "steps=1")
    rows = load(folder.path).rollouts(1)
    cut = [row for row in rows if row["finish"] == "length"]
    assert 0 < len(cut) < len(rows)
    assert all(set(row["advantages"]) == {0.0} for row in cut)
    assert any(set(row["advantages"]) != {0.0} for row in rows if row["finish"] != "length")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("evaluation.component=tusk", "did you mean 'task'"),
        ("algorithm.advantage={kind='custom', function='math:sqroot'}", "sqrt"),
        ("rollout.dynamic_sampling=true", None),
    ],
)
def test_invalid_settings_are_refused_before_the_first_step(
    override: str, reason: str | None, tmp_path: Path
) -> None:
    if reason is None:
        with pytest.raises(KeelError, match="group of one"):
            small("algorithm=ppo", "rollout.group_size=1", override)
        return
    recipe = small("rewards.functions=[{function='task'}]", override)
    with pytest.raises(KeelError, match=reason):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


SFT = {
    "model": {"build": {"alphabet": "0123456789>", "hidden_size": 32, "layers": 1, "heads": 2}},
    "stages": [{"stage": "sft", "steps": 2, "batch_size": 4, "tasks": [{"name": "sort_digits"}]}],
}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"demonstration={HERE}:shouts", "'!'.*model.build.alphabet"),
        (f"demonstration={HERE}:rambles", "more than the model's context"),
        (f"demonstration={HERE}:falls", "raised RuntimeError"),
    ],
)
def test_invalid_demonstration_is_named(override: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=reason):
        train(load_recipe(SFT, [override, "model.build.context=32"]), tmp_path / "run")
