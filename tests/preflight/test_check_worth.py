"""What right answers are worth, and the key that a line names, from facts."""

from __future__ import annotations

import pytest

from keel.preflight.findings import samples as s
from keel.preflight.key_names import named


def test_a_gold_answer_that_is_worth_no_less_than_a_wrong_one() -> None:
    """Where 0 is the most there is, gold answers that get 0 are accepted if wrong ones get less."""
    for wrong, raised in (([-1.0] * 8, False), ([0.0] * 8, True), ([None] * 8, True)):
        found = s.gold_refused("r", ["7"] * 8, [0.0] * 8, 1e-9, [0.0] * 9, "k", wrong, "mend it")
        assert (found is not None) == raised
        assert found is None or found.mend == "mend it"
    assert "lists of messages" in s.mend_refused(True, True, "tasks.0")
    assert "lists" not in s.mend_refused(True, False, "tasks.0")
    assert s.mend_refused(False, True, "tasks.0") == s.REFUSED_MEND


def test_a_threshold_that_nothing_passes() -> None:
    assert s.threshold_unreached("r", [], [0.0], 1.0, "k") is None
    assert s.threshold_unreached("r", [1.0], [0.0], 1.0, "k") is None
    assert s.threshold_unreached("r", [0.5], [1.0], 1.0, "k") is None
    found = s.threshold_unreached("r", [0.2, 0.5], [0.0], 1.0, "k")
    assert found is not None
    assert found.mend.startswith("set it to 0.5")


def test_no_reward_at_all() -> None:
    assert s.reward_none(31, "k") is None
    found = s.reward_none(32, "k")
    assert found is not None
    assert found.severity == "error"


@pytest.mark.parametrize(
    ("line", "key", "named_"),
    [
        ("sampling.stop_ids holds 99", "rl.rollout", "rl.rollout.stop_ids"),
        ("rows.jsonl:3: no number: name another in task.answer", "tasks", "tasks.answer"),
        ("needs 'x' (task.answer names the column)", "rewards.functions", "rewards.functions"),
        ("/a/data.path:3 is bad", "data", "data"),
        ("set model.chat_template, or write text", "rl.tasks", "model.chat_template"),
        ("lower rl.rollout.max_tokens", "rl.sampled.tasks", "rl.sampled.rollout.max_tokens"),
        ("raise prompts.max_tokens, or set evaluation.rows", "tasks", "prompts.max_tokens"),
        ("lower rl.prompts.max_tokens", "rl.demonstration", "rl.prompts.max_tokens"),
    ],
)
def test_the_key_that_a_line_names(line: str, key: str, named_: str) -> None:
    assert named(line, key) == named_
