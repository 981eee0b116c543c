"""Trains on a task whose rewards say nothing and reads how long answers become.

Arms differ in one thing from GRPO without a divergence: constant weights, no standard deviation,
both (Dr. GRPO). See `Verdict` in `parts.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.comparison import band, difference_interval, iqm_interval
from keel.analysis.plots import COLOURS
from keel.analysis.statistics import Array
from keel.runs.reader import load
from studies.common import courses, keel, markdown, shown, write_csv
from studies.evidence.algorithms import HERE, RESULTS, write_files

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


def train(out: Path, seeds: int = 10) -> None:
    """Train all arms and write results/verdict.csv."""
    extended = {"extends": str(HERE / "verdict.toml")}
    recipes = {name: {**extended, "rl": {"algorithm": arm}} for name, arm in ARMS.items()}
    paths = write_files(out / "recipes" / "verdict", recipes)
    keel("compare", *paths, "--seeds", seeds, "--out", out / "verdict")
    rows = [
        (name, seed, *row)
        for name in ARMS
        for seed in range(seeds)
        for row in second_texts(out / "verdict" / "runs" / name / f"seed-{seed}")
    ]
    write_csv(KEPT, ("arm", "seed", "step", "right", "wrong"), rows)


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


def table() -> str:
    """Tokens of the second text at the end of training, as Markdown."""
    rows = []
    for arm, seeds in courses(KEPT, "right", "wrong").items():
        right_S, wrong_S = np.nanmean(np.array(seeds)[:, :, -LAST:], axis=-1).T
        gap = difference_interval(wrong_S, right_S)
        rows.append((arm, *map(shown, (iqm_interval(right_S), iqm_interval(wrong_S), gap))))
    return markdown(("objective", "after `+`", "after `-`", "difference"), rows)


def panels() -> dict[str, dict[str, tuple[str, Array]]]:
    """By arm and what was answered: a colour, and (4, steps) the steps, the interquartile mean of
    the second text's tokens over seeds, and the ends of its interval."""
    found: dict[str, dict[str, tuple[str, Array]]] = {}
    for arm, seeds in courses(KEPT, "step", "right", "wrong").items():
        steps, *sides = np.array(seeds).transpose(1, 0, 2)
        found[arm] = {
            f"after {answer}": (colour, np.array([steps[0], *band(lengths)]))
            for answer, colour, lengths in zip("+-", COLOURS, sides, strict=False)
        }
    return found
