"""Variants of 2025 and 2026 over ten seeds, each against a baseline where its idea has something
to do.

All arms of an experiment have one learning rate, not tuned for each, and, but for LUSPO, the
weights of a mean over tokens. Runs have 60 steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.comparison import difference_interval
from keel.analysis.statistics import Array, iqm
from keel.runs.reader import load
from studies.common import courses, keel, markdown, shown, write_csv
from studies.evidence.algorithms import HERE, RESULTS, TASKS, write_files
from studies.evidence.distillation import train_teacher

MEASURED = RESULTS / "variants"
FIGURES = ("accuracy", "reward", "entropy_first", "entropy_last")
LAST = 10
"""Steps that the entropy of the end is a mean over."""
ONE, FOUR = {"optimizer": {"learning_rate": 1e-4}}, {
    "minibatches": 4, "optimizer": {"learning_rate": 3e-5},
}  # fmt: skip
TOKENS = {"weights": {"kind": "token_mean"}}
GRPO = {"preset": "grpo", "divergence": "none", **TOKENS}
TRUNCATE = {"kind": "truncate"}
TWO_REWARDS = {
    "rewards": {"functions": [{"function": "task"}, {"function": "studies.evidence.parts:noise"}]},
    "evaluation": {"component": "task"},
}
EVALUATED = {"evaluation": {"every": 60}}
WALK = {**TOKENS, "divergence": "none"}


@dataclass(frozen=True)
class Experiment:
    """Arms of keys of a stage, the first of them the baseline, on tasks; `keys` are of all."""

    title: str
    arms: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, Any] = field(default_factory=dict)
    tasks: Sequence[str] = ("sort_digits",)


def _presets(*names: str) -> dict[str, dict[str, Any]]:
    own = {name: {} if name == "luspo" else TOKENS for name in names}
    named = {name: {"algorithm": {"preset": name, **keys}} for name, keys in own.items()}
    return {"grpo": {"algorithm": GRPO}, **named}


EXPERIMENTS: Mapping[str, Experiment] = {
    "updates": Experiment(
        "four updates of a batch",
        _presets("dppo_tv", "dppo_kl", "luspo", "vespo", "kl_cov"),
        FOUR,
        TASKS,
    ),
    "advantages": Experiment("one update of a batch", _presets("maxrl"), ONE, TASKS),
    "scales": Experiment(
        "a second reward, of noise, at ten times the scale", _presets("gdpo"), ONE | TWO_REWARDS,
        TASKS,
    ),
    "rounded": Experiment(
        "sampled in bfloat16, four updates",
        {
            "truncate": {"algorithm": {**GRPO, "corrections": [TRUNCATE]}},
            "and geometric mask": {
                "algorithm": {**GRPO, "corrections": [TRUNCATE, {"kind": "geometric_mask"}]}
            },
        },
        {**FOUR, "rollout": {"dtype": "bfloat16"}},
    ),
    "states": Experiment(
        "walks through shared rooms",
        {name: {"algorithm": {"preset": name, **WALK}} for name in ("grpo", "gigpo")},
        tasks=("corridor",),
    ),
    "teacher": Experiment(
        "a teacher besides the reward",
        {
            "grpo": {"algorithm": GRPO, "teacher": "none"},
            "opd": {"algorithm": "opd"},
            "grpo and teacher": {"algorithm": {**GRPO, "distillation": {"coefficient": 1.0}}},
        },
        ONE,
        TASKS,
    ),
    "entropy": Experiment(
        "right answers are one in ten at the start, four updates",
        {
            "grpo": {"algorithm": GRPO},
            "bonus 0.01": {"algorithm": {**GRPO, "entropy": 0.01}},
            "adaptive bonus": {"algorithm": {**GRPO, "entropy": {"target": 0.3}}},
            "clip-higher": {"algorithm": {**GRPO, "surrogate": {"kind": "clip", "high": 0.4}}},
            **{name: {"algorithm": {"preset": name, **TOKENS}} for name in ("clip_cov", "kl_cov")},
            "top 20 % entropy": {"algorithm": {**GRPO, "masks": [{"kind": "top_entropy"}]}},
        },
        {"minibatches": 4, "optimizer": {"learning_rate": 1e-4}},
        ("sort_digits_few",),
    ),
}  # fmt: skip


def measure(out: Path, seeds: int = 10, names: Iterable[str] = tuple(EXPERIMENTS)) -> None:
    """Train every arm of these experiments, and keep the figures of each run."""
    MEASURED.mkdir(parents=True, exist_ok=True)
    for name in names:
        one, rows = EXPERIMENTS[name], []
        for task in one.tasks:
            folder = out / "variants" / name / task
            paths = write_files(folder / "recipes", recipes(out, name, task))
            chosen = ("--seeds", seeds, "--baseline", next(iter(one.arms)))
            keel("compare", *paths, *chosen, "--out", folder / "arms")
            rows += [
                (task, arm, seed, *figures(folder / "arms" / "runs" / arm / f"seed-{seed}"))
                for arm in one.arms
                for seed in range(seeds)
            ]
        write_csv(MEASURED / f"{name}.csv", ("task", "arm", "seed", *FIGURES), rows)


def recipes(out: Path, name: str, task: str) -> dict[str, dict[str, Any]]:
    """Those of the arms of an experiment on a task."""
    one, more = EXPERIMENTS[name], dict[str, Any](steps=60)
    if name == "teacher":
        more["teacher"] = {"name": str(train_teacher(out, task))}
    base = {"extends": str(HERE / f"{task}.toml")}
    return {
        arm: {**base, "rl": _joined(EVALUATED, more, one.keys, keys)}
        for arm, keys in one.arms.items()
    }


def _joined(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables in one; those of one name are joined too."""
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = {**found[key], **value} if both else value
    return found


def figures(folder: Path) -> tuple[float, ...]:
    """Of a run, those of `FIGURES`."""
    run = load(folder)
    accuracy = run.info()["evaluation"]["rl"]["after"]["mean"]
    rows = [*run.metrics("rl")]
    rewards = [row.get("rewards/task/mean", row["reward"]) for row in rows]
    entropies = [row["entropy"] for row in rows if row.get("entropy") is not None]
    return accuracy, *map(float, map(np.mean, (rewards, entropies[:1], entropies[-LAST:])))


# ---------------------------------------------------------------- read from the results


@cache
def measured(name: str, task: str) -> Mapping[str, Array]:
    """By arm (figures, seeds)."""
    found = courses(MEASURED / f"{name}.csv", *FIGURES, task=task)
    return {arm: np.concatenate(seeds, axis=1) for arm, seeds in found.items()}


def table() -> str:
    """Greedy accuracy at the end and the mean reward of all steps, each with its difference from
    the baseline, and the entropy."""
    rows = []
    for name in (name for name in EXPERIMENTS if (MEASURED / f"{name}.csv").is_file()):
        one = EXPERIMENTS[name]
        for task in one.tasks:
            arms = measured(name, task)
            base, *_ = arms.values()
            for at, (arm, values) in enumerate(arms.items()):
                title = "" if at else f"{one.title}: `{task}`"
                cells = [title, arm]
                for figure, scale in ((0, 100), (1, 1)):
                    cells.append(f"{scale * iqm(values[figure]):.{2 - scale // 100}f}")
                    cells.append(_above(values[figure], base[figure], scale) if at else "")
                cells.append(" to ".join(f"{value:.2f}" for value in values[2:].mean(1)))
                rows.append(cells)
    head = ("experiment", "arm", "right, %", "above the first", "reward of all steps",
            "above the first", "entropy, first step to last ten")  # fmt: skip
    return markdown(head, rows)


def _above(x: Array, y: Array, scale: int) -> str:
    """A difference with its interval, bold where that leaves out 0."""
    found = difference_interval(x, y)
    text = shown(found, scale, "+", 2 - scale // 100)
    return f"**{text}**" if found.low > 0 or found.high < 0 else text
