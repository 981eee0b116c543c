"""A recipe that uses an earlier name of a key gets today's suggested."""

from __future__ import annotations

import pytest

from keel.config.load import load_recipe
from keel.types import KeelError

TASKS = {"tasks": [{"name": "addition"}]}


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({**TASKS, "rollout": {"ahead": 1}}, "rollout.async_level"),
        ({**TASKS, "rollout": {"max_rows": 1}}, "rollout.max_num_seqs"),
        ({**TASKS, "rollout": {"soft_overlong": 4}}, "rollout.overlong_buffer"),
        ({**TASKS, "optimizer": {"final_share": 0.5}}, "optimizer.min_lr_ratio"),
        ({"tasks": [{"name": "addition", "heldout_share": 0.5}]}, "validation_fraction"),
        ({"tasks": [{"name": "jsonl", "heldout_path": "x"}]}, "validation_path"),
        ({**TASKS, "rewards": {"functions": [{"function": "length", "gate": 1.0}]}}, "gate_below"),
        (
            {**TASKS, "rewards": {"functions": [{"function": "length", "closed": 1.0}]}},
            "gated_reward",
        ),
        ({"stage": "reward_model", "learns": "labels"}, "objective"),
    ],
)
def test_an_earlier_key_is_refused_with_its_new_name(keys: dict[str, object], name: str) -> None:
    recipe = {"model": {"name": "m"}, "stages": [{"stage": "rl", "name": "a", **keys}]}
    with pytest.raises(KeelError, match=name):
        load_recipe(recipe, [])
