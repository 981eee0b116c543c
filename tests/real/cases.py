"""Three steps of every kind of stage on the trained model, whole and with LoRA."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from keel.config.load import load_recipe
from keel.config.schema import Recipe
from tests.real.model import model_name
from tests.training.judged import Rows, write

SUMS: dict[str, Any] = {"name": "keel.data.sums:sums", "answer": "answer"}
SAMPLED: dict[str, Any] = {
    "stage": "rl",
    "tasks": [SUMS],
    "rewards": {
        "functions": [
            {"function": "numeric_match"},
            {"function": "length", "weight": 0.1, "options": {"target": 2, "width": 10}},
        ]
    },
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_tokens": 10},
    "evaluation": {"every": 0, "prompts": 2},
}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft", "tasks": [SUMS], "batch_size": 4},
    "grpo": {**SAMPLED, "algorithm": "grpo"},
    "gspo": {**SAMPLED, "algorithm": "gspo"},
    "ppo": {**SAMPLED, "algorithm": "ppo"},
    "dpo": {"stage": "dpo", "batch_size": 2},
    "reward_model": {"stage": "reward_model", "batch_size": 2},
    "process_reward_model": {"stage": "process_reward_model", "batch_size": 2},
}
"""By the kind of stage, or the algorithm."""

CASES = [f"{name}{adapter}" for name, adapter in itertools.product(STAGES, ("", "-lora"))]


def recipe(case: str, folder: Path) -> Recipe:
    """The recipe of a case; its data are written to `folder`."""
    name, _, adapter = case.partition("-")
    stage = {
        "steps": 3,
        "optimizer": {"learning_rate": 1e-4 if adapter else 1e-5},
        "checkpoints": {"every": 2, "keep": 1},
        **STAGES[name],
    }
    lora = {"rank": 8}
    model: dict[str, Any] = {"name": model_name(), "device": "cpu"}
    if "tasks" not in stage:
        rows = _traces() if name == "process_reward_model" else _pairs()
        stage["data"] = {"name": "jsonl", "path": write(folder / "rows.jsonl", rows)}
    if adapter and name in ("reward_model", "process_reward_model"):
        stage["base"] = {"lora": lora}
    elif adapter:
        model["lora"] = lora
    return load_recipe({"name": case, "threads": 1, "model": model, "stages": [stage]})


def _pairs() -> Rows:
    """A right and a wrong sum."""
    return [
        {"prompt": f"What is {a} + {a + 3}?", "chosen": f"{2 * a + 3}", "rejected": f"{2 * a}"}
        for a in range(2, 26)
    ]


def _traces() -> Rows:
    """Two steps, of which every other answer gets the second wrong."""
    return [
        {
            "prompt": f"Double {a}, then add 1.",
            "steps": [f"2 * {a} = {2 * a}.", f"The answer is {2 * a + 1 + a % 2}."],
            "first_error": 1 if a % 2 else None,
        }
        for a in range(2, 26)
    ]
