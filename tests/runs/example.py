"""A small run folder for the tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.runs.layout import RunFolder
from keel.runs.rows import RolloutRow


@dataclass(frozen=True)
class Progress:
    """How far a stage has come."""

    stage: int
    step: int
    best_step: int | None = None


ONE = 'name = "sort"\n\n[[stages]]\nstage = "rl"\nname = "rl"\n'
TWO = ONE.replace('"rl"\nname = "rl"', '"sft"\nname = "warmup"') + (
    '\n[[stages]]\nstage = "rl"\nname = "rl"\n'
)


def one_stage(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", ONE)


def two_stages(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", TWO)


def row(**changes: Any) -> RolloutRow:
    """A completion of three tokens, the second of them written by a tool."""
    values: dict[str, Any] = {
        "group": 0,
        "prompt_id": "sort/7",
        "task": "sort",
        "prompt": "3 1 2 =",
        "completion": "1 2 3",
        "tokens": np.array([5, 6, 7]),
        "log_probs": np.array([-0.5, 0.0, -0.25], np.float32),
        "pieces": ("1 ", "2 ", "3"),
        "values": {
            "old_log_probs": np.array([-0.5, 0.0, -0.125], np.float32),
            "advantages": np.array([1.5, 0.0, 1.5], np.float32),
        },
        "written": np.array([True, False, True]),
        "finish": "eos",
        "reward": 0.75,
        "components": {"format": 1.0, "correct": 0.5},
    }
    return RolloutRow(**{**values, **changes})


def fill(aside: Path) -> None:
    """Write what a checkpoint of nothing holds."""
    (aside / "state.json").write_text("{}")
