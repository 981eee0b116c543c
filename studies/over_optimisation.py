"""A learned reward over-optimised, and held back by KL in the reward: the picture and its figures.

    python -m studies.over_optimisation --picture docs/images/over-optimisation.png

Each β is a whole `keel train over-optimisation` in its own process. The picture has the first
seed's runs; the table has all of them, the gold reward as its mean over ten steps.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from keel.analysis.plots import Optimisation, optimisation_of, over_optimisation_picture
from keel.runs.reader import load
from studies.common import heading, keel, line

WINDOW = 10
"""Steps that a figure of the table is the mean of."""


def run(beta: float, seed: int, target: Path, extra: list[str]) -> Optimisation:
    """One run with this much of the divergence taken off the reward."""
    words = [f"algorithm.divergence.beta={beta}", f"seed={seed}", *extra]
    keel("train", "over-optimisation", *words, "--run", target, "--quiet")
    rows = load(target).metrics("rl")
    found = optimisation_of(rows, {"outcome": 1.0}, "hidden_rule", f"β = {beta:g}")
    assert found is not None
    return found


def row(curve: Optimisation, seed: int) -> str:
    """Gold at its best and at the end, the proxy at the end, and the KL there."""
    means = np.convolve(curve.gold_P, np.full(WINDOW, 1 / WINDOW), "valid")
    gold = (f"{100 * value:.1f}" for value in (curve.gold_P[0], means.max(), means[-1]))
    proxy, kl = (one[-WINDOW:].mean() for one in (curve.proxy_P, curve.divergence_P))
    return line((curve.label, seed, *gold, f"{proxy:.2f}", f"{kl:.1f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    gold = ("gold, first step", "best", "last")
    print(heading("β in the reward", "seed", *gold, "proxy, last", "KL, last"))
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            curves = []
            for beta in arguments.betas:
                target = Path(scratch) / f"{beta}-{seed}"
                curves.append(run(beta, seed, target, arguments.overrides))
                print(row(curves[-1], seed), flush=True)
            if arguments.picture is not None and seed == arguments.seeds[0]:
                title = "A learned reward over-optimised"
                subtitle = f"PPO on sort_digits, seed {seed}; β is that of the KL in the reward"
                over_optimisation_picture(curves, arguments.picture, title, subtitle)


if __name__ == "__main__":
    main()
