"""Peak memory of a few steps with a learned reward, by the models that an algorithm holds.

The reward model is as large as the policy. `keel compare` takes the peak of each run's process.
"""

from __future__ import annotations

import json
from pathlib import Path

from keel.config.load import load_recipe
from keel.models.policy import load_policy
from studies.common import keel, markdown
from studies.evidence.algorithms import HERE, RESULTS, write_files

ARMS = ("ppo", "grpo", "gspo", "rloo", "reinforce")
KEPT = RESULTS / "memory.json"
LENGTH = "studies.evidence.parts:characters_written"
REWARD_STAGE = {
    "stage": "reward_model",
    "steps": 1,
    "batch_size": 4,
    "sampled": {
        "train": 8,
        "validation": 8,
        "group_size": 4,
        "pairs": 1,
        "max_tokens": 8,
        "tasks": [{"name": "sort_digits"}],
        "rewards": {"functions": [{"function": LENGTH}]},
    },
    "checkpoints": {"every": 1, "keep": 1},
}


def measure(out: Path) -> None:
    """Run a few steps of each and write results/memory.json."""
    folder = out / "recipes" / "memory"
    base = load_recipe(HERE / "memory.toml").model
    weights = sum(p.numel() for p in load_policy(base, seed=0).model.parameters())
    reward = out / "reward-model"
    model = {"build": base.build.model_dump(exclude_none=True)} if base.build else {}
    (recipe,) = write_files(folder, {"reward": {"model": model, "stages": [REWARD_STAGE]}})
    if not reward.is_dir():
        keel("train", recipe, "--quiet", "--run", reward)
    learned = {"function": "outcome", "options": {"model": str(reward / "models/reward_model")}}
    extended = {"extends": str(HERE / "memory.toml")}
    stage = {"rewards": {"functions": [learned]}}
    arms = {name: {**extended, "rl": {**stage, "algorithm": {"preset": name}}} for name in ARMS}
    paths = write_files(folder, arms)
    keel("compare", *paths, "--seeds", 2, "--jobs", 1, "--out", out / "memory")
    ran = json.loads((out / "memory" / "comparison.json").read_text())["arms"]
    found = {one["arm"]: {key: one[key] for key in ("peak_bytes", "models")} for one in ran}
    KEPT.write_text(json.dumps({"weights": weights, "arms": found}, indent=1) + "\n")


def table() -> str:
    """Peaks, and what each is above the least, in copies of the model's weights."""
    found = json.loads(KEPT.read_text())
    arms, copy = found["arms"], 4 * found["weights"]
    least = min(one["peak_bytes"] for one in arms.values())
    rows = []
    for name, one in arms.items():
        above = (one["peak_bytes"] - least) / copy
        held = f"{len(one['models'])}: {', '.join(one['models'])}"
        rows.append((name, held, f"{one['peak_bytes'] / 2**20:,.0f}", f"{above:.1f}"))
    head = ("preset", "models", "peak, MiB", "copies of the weights above the least")
    return markdown(head, rows)
