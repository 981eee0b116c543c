"""Runs killed by SIGKILL and resumed end as those that were never killed, byte for byte.

A dozen kills; `make soak` makes hundreds (studies/soak.py).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from keel.config.load import to_toml
from keel.runs.reader import load
from tests.cluster.commands import finished, until_step
from tests.durability.processes import start
from tests.soak.cases import CASES
from tests.soak.killing import Instant, differences, killed, whole

pytestmark = pytest.mark.slow

KILLS = {
    # After rows; at the first with no checkpoint yet.
    "dynamic": [Instant("row", 1), Instant("row", 3), Instant("row", 1)],
    # Amid the writing of a checkpoint's tensors, and then of its rows.
    "lora-ppo-reset": [Instant("byte", 9_000), Instant("operation", 60)],
    # Amid a computation, and twice later.
    "three-stages": [Instant("module", 360), Instant("row", 5), Instant("operation", 100)],
    # Amid the labels of the first round and of the second, and in a stage of each.
    "rounds": [
        *(Instant("operation", 45), Instant("row", 5), Instant("module", 1500)),
        *(Instant("row", 4), Instant("operation", 30)),
    ],
    "dpo": [Instant("row", 2), Instant("operation", 40)],
    "best": [Instant("row", 4)],
    # With rollouts of the next step in the last checkpoint; in the midst of writing them.
    "ahead": [Instant("row", 2), Instant("operation", 55), Instant("module", 250)],
    "ahead-overlap-refills": [Instant("row", 3), Instant("module", 100)],
    "skip": [Instant("row", 3)],
}
"""Where each case dies, in turn."""


@pytest.mark.parametrize("case", KILLS)
def test_killed_and_resumed_run_ends_the_same(case: str, tmp_path: Path) -> None:
    recipe = CASES[case].make(tmp_path)
    whole(recipe, tmp_path / "whole")
    assert CASES[case].shows(load(tmp_path / "whole"))
    outcome = killed(recipe, tmp_path / "killed", tmp_path / "whole", KILLS[case])
    assert outcome.differences == []
    assert outcome.kills == KILLS[case]


def test_run_killed_after_its_last_checkpoint_ends_the_same(tmp_path: Path) -> None:
    """The steps are all taken then, but old checkpoints, the model and pictures may be to do."""
    recipe = CASES["reward-model"].make(tmp_path)
    ended = whole(recipe, tmp_path / "whole")
    renamed = len(ended.done) - ended.done[::-1].index("os.rename .tmp-step-000004")
    # Before the folder's names are synced, and before the old checkpoint goes.
    plan = [Instant("operation", renamed + 1), Instant("row", 1)]
    outcome = killed(recipe, tmp_path / "killed", tmp_path / "whole", plan)
    assert outcome.differences == []
    assert outcome.kills == plan[:1], "a step was taken twice"


def test_differences_of_content_and_names_are_found(tmp_path: Path) -> None:
    """Of content, of one byte in a file of many, of names, of empty folders, of leftovers."""
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        (folder / "rollouts").mkdir(parents=True)
        (folder / "metrics.jsonl").write_bytes(b"{}\n" * 1000)
        (folder / "timings.jsonl").write_text(folder.name)
    assert differences(a, b) == []
    (b / "metrics.jsonl").write_bytes(b"{}\n" * 999 + b"{]\n")
    (b / "rollouts" / ".tmp-x").touch()
    (a / "models").mkdir()
    assert differences(a, b) == [
        "only in a: models",
        "only in b: rollouts/.tmp-x",
        "differs: metrics.jsonl",
    ]


@pytest.mark.parametrize("case", ["ppo-head", "ahead-overlap-refills"])
def test_killed_and_resumed_on_the_command_line_ends_the_same(case: str, tmp_path: Path) -> None:
    """`keel train`, killed at any instant of a later step, and `keel train --resume`."""
    recipe = CASES[case].make(tmp_path)
    file, folder = tmp_path / "recipe.toml", tmp_path / "killed"
    file.write_text(to_toml(recipe))
    whole(recipe, tmp_path / "whole")
    process = start(tmp_path, "train", file, "--run", folder)
    until_step(process, folder, 2)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finished(start(tmp_path, "train", "--resume", "--run", folder))
    assert differences(tmp_path / "whole", folder) == []
