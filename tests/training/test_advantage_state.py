"""The state of an advantage lasts from step to step, and is in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.runs.reader import load
from keel.training.run import train
from tests.training.small import small


def ones(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def test_state_of_an_advantage_is_in_checkpoints(tmp_path: Path) -> None:
    """The moving averages of roles: of equal rewards, 1 less the decay for each so far."""
    keys = ("tasks=[{name='tests.soak.cases:echo'}]", "steps=3", "checkpoints.every=1")
    reward = f"rewards.functions=[{{function='{__name__}:ones'}}]"
    advantage = "algorithm.advantage={role='side', decay=0.9}"
    run = load(
        train(small("algorithm.preset=rae", advantage, reward, *keys), tmp_path / "run").path
    )
    sides = dict.fromkeys("ab", 0)
    for step, checkpoint in enumerate(run.checkpoints(), 1):
        for row in run.rollouts(step):
            sides["ab"[int(row["prompt_id"].rpartition("/")[2]) % 2]] += 1
        state = json.loads((checkpoint.path / "state.json").read_text())["advantage"]
        assert state == {side: pytest.approx(1 - 0.9**n) for side, n in sides.items() if n}
    assert step == 3
