"""`keel rollouts` and `keel models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.models.families import FAMILIES
from tests.training.small import run

Capture = pytest.CaptureFixture[str]
NO_SEQUENCE = ("cohere", "cohere2", "ernie4_5", "granite", "olmoe")
NO_TOKEN = (*NO_SEQUENCE, "gemma3_text", "hunyuan_v1_dense", "olmo", "olmo2", "olmo3", "opt")
"""Families without the class in transformers 5."""


# ---------------------------------------------------------------- rollouts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("rollouts") / "run", "steps=2").path


def test_rollouts_prints_the_first_sequences_of_a_step(trained: Path, capsys: Capture) -> None:
    assert main(["rollouts", str(trained), "--step", "2", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 16
    assert {one["step"] for one in records} == {2}
    assert main(["rollouts", str(trained), "--step", "2", "-n", "3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    mean = sum(one["reward"] for one in records) / 16
    assert head == f"16 completions of 4 prompts, mean reward {mean:.3g}"
    shown = [line for line in lines if "advantage" in line]
    assert len(shown) == 3
    for line, one in zip(shown, records, strict=False):
        value = f"{one['advantages'][0]:+.3g}"
        assert line.startswith(f"{one['prompt_id']}: reward {one['reward']:.3g}")
        assert f", advantage {value}, {len(one['tokens'])} tokens, ended by " in line
    assert f"  completion  {json.dumps(records[0]['completion'])}" in lines
    assert lines[-1].startswith("13 more")


def test_rollouts_of_a_step_that_is_not_there(trained: Path, capsys: Capture) -> None:
    assert main(["rollouts", str(trained), "--step", "37"]) == 2
    assert "no rollouts of step 37" in (message := capsys.readouterr().err)
    assert "steps 1 to 2" in message


# ---------------------------------------------------------------- models


def test_models_lists_every_family_and_its_reward_models(capsys: Capture) -> None:
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == FAMILIES.keys()
    assert {name for name, has in found.items() if not has["outcome"]} == set(NO_SEQUENCE)
    assert {name for name, has in found.items() if not has["process"]} == set(NO_TOKEN)
    assert main(["models"]) == 0
    rows = capsys.readouterr().out.splitlines()[1 : len(FAMILIES) + 1]
    assert [row.split()[0] for row in rows] == sorted(FAMILIES)
    assert [row.split()[-1] == "no" for row in rows] == [
        name in NO_TOKEN for name in sorted(FAMILIES)
    ]
