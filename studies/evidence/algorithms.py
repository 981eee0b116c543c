"""Presets over ten seeds, at a learning rate chosen on other seeds: all that need no teacher.

A step samples 128 completions: 16 prompts with 8 each for algorithms that compare the answers to a
prompt, 128 prompts with 1 each for the others. `tune` chooses each preset's rate by the mean score
of the seeds 100 and 101 and writes rates.toml; `compare` trains the ten seeds and keeps scores,
curves and comparison.json in results/.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from keel.algorithms.presets import PRESETS
from keel.algorithms.variants import VARIANTS
from studies.common import keel, read_csv

HERE = Path(__file__).resolve().parent
RATES = HERE / "rates.toml"
TASKS = ("sort_digits", "reverse")
RESULTS = HERE / "results"
KEPT = ("scores.csv", "curves.csv")
NOT_MEASURED = frozenset(one.name for one in VARIANTS)
COMPARED = tuple(
    name
    for name, preset in PRESETS.items()
    if not preset.algorithm.needs_teacher and name not in NOT_MEASURED
)
"""`studies.evidence.distillation` measures the others."""
UNGROUPED = ("ppo", "ppo_kl_penalty", "reinforce", "reinforce_pp", "remax", "opd")
BASELINE = "grpo"
STABLE = ("ppo", "grpo", "gspo")
STABLE_STEPS = "rl.steps=50"
STABLE_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
TUNING_SEEDS = ("--first-seed", 100, "--seeds", 2)
KEY = "rl.optimizer.learning_rate"


def grid(name: str) -> tuple[float, ...]:
    """The rates tried: lower ones for a preset that takes several optimizer steps a batch."""
    preset = PRESETS[name]
    several = preset.epochs * preset.minibatches > 1
    return (1e-5, 3e-5, 1e-4, 3e-4) if several else (3e-5, 1e-4, 3e-4, 1e-3)


def recipe(
    task: str, name: str, rate: float | None = None, keys: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The recipe of a preset on a task; `keys` are further ones of its stage."""
    preset = PRESETS[name]
    stage: dict[str, Any] = {"algorithm": {"preset": preset.name}, **keys}
    if rate is not None:
        stage["optimizer"] = {"learning_rate": rate}
    if name in UNGROUPED:
        stage["rollout"] = {"prompts_per_step": 128, "group_size": 1}
    if preset.algorithm.value is not None:
        value = {"kind": "critic", "warmup_steps": 5, "optimizer": {"learning_rate": 1e-3}}
        stage["value"] = value
    if name == "grpo_process":
        function = {"function": "studies.evidence.parts:characters", "name": "characters"}
        watched = {"function": "task", "weight": 0.0}
        stage["rewards"] = {"functions": [function, watched]}
        stage["evaluation"] = {"component": "task"}
    return {"extends": str(HERE / f"{task}.toml"), "rl": stage}


def write_recipes(
    folder: Path,
    task: str,
    rates: Mapping[str, float] = MappingProxyType({}),
    names: Sequence[str] = COMPARED,
    keys: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[Path]:
    """One recipe file for each preset; `keys` are further ones of its stage, by preset."""
    return write_files(
        folder, {name: recipe(task, name, rates.get(name), keys.get(name, {})) for name in names}
    )


def write_files(folder: Path, recipes: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """A file for each recipe, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, one in recipes.items():
        paths.append(folder / f"{name}.toml")
        paths[-1].write_text(tomli_w.dumps(one))
    return paths


def tune(out: Path, tasks: Sequence[str] = TASKS) -> None:
    """Try each preset's rates and write rates.toml."""
    for task in tasks:
        choose_rates(out / "tune" / task, task)


def choose_rates(
    folder: Path,
    task: str,
    names: Sequence[str] = COMPARED,
    keys: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Try the rates of presets on a task and write the best into rates.toml."""
    chosen = tomllib.loads(RATES.read_text()) if RATES.is_file() else {}
    grids: dict[tuple[float, ...], list[Path]] = defaultdict(list)
    for path in write_recipes(folder / "recipes", task, names=names, keys=keys):
        grids[grid(path.stem)].append(path)
    scores: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rates, paths in grids.items():
        where = folder / f"from-{rates[0]:g}"
        values = ",".join(f"{rate:g}" for rate in rates)
        keel("compare", *paths, "--vary", f"{KEY}={values}", *TUNING_SEEDS, "--out", where)
        for row in read_csv(where / "scores.csv"):
            # Of a single recipe, arms are named by the rate alone.
            name, _, rate = f"-{row['arm']}".rpartition(f"-{KEY}=")
            scores[name[1:] or names[0]][float(rate)].append(row["score"])
    chosen[task] = chosen.get(task, {}) | {
        name: max(rates, key=lambda rate: statistics.fmean(rates[rate]))
        for name, rates in scores.items()
    }
    RATES.write_text(tomli_w.dumps(chosen))


def compare(out: Path, seeds: int = 10, tasks: Sequence[str] = TASKS) -> None:
    """Train every preset at its rate."""
    chosen = tomllib.loads(RATES.read_text())
    for task in tasks:
        paths = write_recipes(out / "recipes" / task, task, chosen[task])
        keel("compare", *paths, "--seeds", seeds, "--baseline", BASELINE, "--out", out / task)
        keep(out / task, RESULTS / task, "compare")


def stability(out: Path, seeds: int = 10, task: str = "sort_digits") -> None:
    """Train PPO, GRPO and GSPO at four rates each."""
    paths = write_recipes(out / "recipes" / "stability", task, names=STABLE)
    values = ",".join(f"{rate:g}" for rate in STABLE_RATES)
    vary = (STABLE_STEPS, "--vary", f"{KEY}={values}")
    keel("compare", *paths, *vary, "--seeds", seeds, "--out", out / "stability")
    keep(out / "stability", RESULTS / "stability", "stability")


def keep(made: Path, kept: Path, study: str) -> None:
    """Copy what a comparison found, with the command of this study in place of that of the files
    that it wrote."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copyfile(made / name, kept / name)
    found = json.loads((made / "comparison.json").read_text())
    found["command"] = f"python -m studies.evidence {study}"
    (kept / "comparison.json").write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n")
