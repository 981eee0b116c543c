"""A reward model that learns on in a later stage, and groups of rows as clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.training.run import train
from keel.types import KeelError
from tests.training.judged import data, headline, ones, recipe
from tests.training.small import info

BRIEF: dict[str, Any] = {"steps": 4, "batch_size": 8, "optimizer": {"learning_rate": 4e-3}}


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_later_stage_starts_from_the_earlier_reward_model(
    lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    rows = data(tmp_path, ones(48, 1), ones(24, 2))
    first = {"stage": "reward_model", "name": "first", "data": rows, **BRIEF}
    base = {"stage": "first", **({} if lora is None else {"lora": lora})}
    second = {**first, "name": "second", "base": base}
    found = info(train(recipe(first, second), tmp_path / "run"))["measured"]
    ended, began = found["first"]["after"], found["second"]["before"]
    # Saved in float32: the same scores to the last few digits.
    assert headline(began, "log_loss") == pytest.approx(headline(ended, "log_loss"), abs=1e-6)
    assert headline(found["first"]["before"], "log_loss") != headline(began, "log_loss")
    assert headline(found["second"]["after"], "log_loss") != headline(began, "log_loss")
    assert (tmp_path / "run/models/second/adapter").is_dir() == (lora is not None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("reward_model", "later"), ("reward_model", "absent"), ("process_reward_model", "sft")],
)
def test_base_that_is_no_earlier_stage_of_the_kind_is_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    rows = data(tmp_path, ones(48, 1), ones(24, 2))
    sft = {"stage": "sft", "steps": 1, "tasks": [{"name": "sort_digits"}]}
    first = {"stage": kind, "name": "made", "data": rows, "base": {"stage": name}, **BRIEF}
    later = {"stage": kind, "name": "later", "data": rows, **BRIEF}
    with pytest.raises(KeelError, match=rf'made.base.stage = "{name}" is not a {kind} stage'):
        recipe(sft, first, later)


def test_base_with_two_sources_is_refused(tmp_path: Path) -> None:
    rows = data(tmp_path, ones(48, 1), ones(24, 2))
    base = {"stage": "first", "name": "folder"}
    with pytest.raises(KeelError, match=r"set one of base\.name"):
        recipe({"stage": "reward_model", "data": rows, "base": base, **BRIEF})


def test_rows_of_one_group_are_one_cluster(tmp_path: Path) -> None:
    """24 rows of 24 prompts in six groups."""
    held = [{**row, "problem": at % 6} for at, row in enumerate(ones(24, 2))]
    before = [{**row, "problem": 100 + at} for at, row in enumerate(ones(48, 1))]
    rows = {**data(tmp_path, before, held), "group": "problem"}
    stage = {"stage": "reward_model", "data": rows, **BRIEF}
    found = info(train(recipe(stage), tmp_path / "run"))["measured"]["reward_model"]["after"]
    assert (found["n"], found["clusters"]) == (24, 6)
