"""Trains on a task whose rewards say nothing and reads how long answers become.

Arms differ in one thing from GRPO without a divergence: constant weights, no standard deviation,
both (Dr. GRPO). See `verdict.py`.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.comparison import band, difference_interval, iqm_interval
from keel.analysis.plots import COLOURS, drawing
from keel.analysis.statistics import Array, Interval
from keel.runs.reader import load
from studies.evidence.algorithms import HERE, RESULTS, keel, write_files
from studies.evidence.gae import markdown

PLAIN = {"preset": "grpo", "divergence": "none"}
ARMS: dict[str, dict[str, Any]] = {
    "grpo": PLAIN,
    "grpo-no-std": {**PLAIN, "advantage": {"scale": "none"}},
    "grpo-constant-weights": {**PLAIN, "weights": {"kind": "constant"}},
    "dr_grpo": {"preset": "dr_grpo"},
}
KEPT = RESULTS / "verdict.csv"
LAST = 4
"""Recorded steps at the end that the table is of: 20 steps of training."""
Lengths = Mapping[str, Array]
"""By arm (seeds, steps, 2): mean tokens of the second text of right and of wrong completions."""


def train(out: Path, seeds: int = 10) -> None:
    """Train all arms and write results/verdict.csv."""
    extended = {"extends": str(HERE / "verdict.toml")}
    recipes = {name: {**extended, "rl": {"algorithm": arm}} for name, arm in ARMS.items()}
    paths = write_files(out / "recipes" / "verdict", recipes)
    keel("compare", *paths, "--seeds", str(seeds), "--out", out / "verdict")
    with KEPT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arm", "seed", "step", "right", "wrong"))
        for name in ARMS:
            for seed in range(seeds):
                for row in second_texts(out / "verdict" / "runs" / name / f"seed-{seed}"):
                    writer.writerow((name, seed, *row))


def second_texts(folder: Path) -> list[tuple[int, float, float]]:
    """At each recorded step: mean tokens of the second text, right and wrong apart."""
    run = load(folder)
    found = []
    for place in run.rollout_places():
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for row in run.rollouts(place.step):
            written = np.array(row["written"])
            if not written.all():  # else the budget ended the first text
                reply = int(np.flatnonzero(~written)[0])
                lengths[row["reward"] > 0].append(int(written[reply:].sum()))
        means = (float(np.mean(lengths[right] or [np.nan])) for right in (True, False))
        found.append((place.step, *means))
    return found


def read(path: Path = KEPT) -> tuple[Array, Lengths]:
    """The steps, and the lengths of each arm."""
    values: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    steps = []
    with path.open() as file:
        for row in csv.DictReader(file):
            values[row["arm"]][int(row["seed"])].append((float(row["right"]), float(row["wrong"])))
            steps.append(int(row["step"]))
    return np.unique(np.array(steps, dtype=np.float64)), {
        arm: np.array(list(seeds.values())) for arm, seeds in values.items()
    }


def table(lengths: Lengths) -> str:
    """Tokens of the second text at the end of training, as Markdown."""
    rows = []
    for arm, values in lengths.items():
        right_S, wrong_S = np.nanmean(values[:, -LAST:], axis=1).T
        gap = difference_interval(wrong_S, right_S)
        cells = (shown(iqm_interval(right_S)), shown(iqm_interval(wrong_S)), shown(gap))
        rows.append((arm, *cells))
    return markdown(("objective", "after `+`", "after `-`", "difference"), rows)


def shown(one: Interval, scale: float = 1, sign: str = "", digits: int = 1) -> str:
    """A figure with its interval."""
    low, high = (f"{scale * end:.{digits}f}" for end in (one.low, one.high))
    return f"{scale * one.mean:{sign}.{digits}f} [{low}, {high}]"


def plot(path: Path, steps: Array, lengths: Lengths, arms: Sequence[str] = tuple(ARMS)) -> None:
    """Tokens of the second text over training, a panel for each arm."""
    with drawing(path, 2.8) as figure:
        panels = figure.subplots(1, len(arms), sharey=True)
        for axes, arm in zip(panels, arms, strict=True):
            for side, label in enumerate(("after +", "after -")):
                middle, low, high = band(lengths[arm][:, :, side])
                colour = COLOURS[side]
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
                axes.plot(steps, middle, color=colour, label=label)
            axes.set_title(arm, fontsize=9)
            axes.set_xlabel("step")
        panels[0].set_ylabel("tokens of the second text")
        panels[0].legend(loc="upper left")
