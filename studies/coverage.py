"""How often the intervals of `keel compare` hold the truth.

    python -m studies.coverage [--seeds 10] [--simulations 4000]

Prints Markdown tables for distributions of scores. First the share of simulated arms whose 95 %
interval holds the interquartile mean of the distribution, for the percentile bootstrap as it is
(rliable's) and with the levels of Student's t. Then the share of pairs of equal arms whose interval
of the difference holds 0, for quantiles of the bootstrap and for its standard error with Student's
t, and whose probability of improvement holds ½: for one pair (95 %) and for one of 16 (99.7 %),
with scores that the seed does not tie together and with scores that it does (correlation 0.7 before
the ranks are mapped to the distribution).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import numpy as np
from scipy.stats import norm

from keel.analysis.comparison import around, improvement_interval, levels
from keel.analysis.statistics import Array, iqm
from studies.common import heading, line

Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _bimodal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Three in ten runs fail."""
    return np.where(
        rng.random(shape) < 0.3, rng.normal(0.1, 0.05, shape), rng.normal(0.9, 0.05, shape)
    )


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(0.5, 0.1, shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "skewed (lognormal)": lambda rng, shape: rng.lognormal(0, 0.8, shape),
    "near the ceiling (beta 5, 1)": lambda rng, shape: rng.beta(5, 1, shape),
    "bimodal": _bimodal,
}


PAIR_KINDS = ("quantiles", "standard error", "probability")


def coverage(name: str, seeds: int = 10, simulations: int = 4_000) -> dict[str, float]:
    """The share of simulations whose interval holds the truth, by kind of interval."""
    rng = np.random.default_rng(0)
    draw = DISTRIBUTIONS[name]
    truth = float(iqm(draw(rng, (1_000_000,))))
    held = {"percentile": 0, "studentised levels": 0}
    kinds = {"percentile": (0.025, 0.975), "studentised levels": levels(seeds, 0.95)}
    for _ in range(simulations):
        scores = draw(rng, (seeds,))
        drawn = iqm(scores[rng.integers(0, seeds, (1_000, seeds))], axis=1)
        for kind, at in kinds.items():
            low, high = np.quantile(drawn, at)
            held[kind] += bool(low <= truth <= high)
    return {kind: count / simulations for kind, count in held.items()}


def pair_coverage(
    name: str, correlation: float, confidence: float, seeds: int = 10, simulations: int = 4_000
) -> dict[str, float]:
    """The share of pairs of equal arms whose interval holds the truth, by kind of interval."""
    rng = np.random.default_rng(0)
    quantiles = np.sort(DISTRIBUTIONS[name](rng, (100_000,)))
    held = dict.fromkeys(PAIR_KINDS, 0)
    for _ in range(simulations):
        shared, own = rng.normal(size=seeds), rng.normal(size=(2, seeds))
        normal = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own
        x, y = quantiles[(norm.cdf(normal) * len(quantiles)).astype(int)]
        places = rng.integers(0, seeds, (1_000, seeds))
        drawn = iqm(x[places], axis=1) - iqm(y[places], axis=1)
        low, high = np.quantile(drawn, levels(seeds, confidence))
        held["quantiles"] += bool(low <= 0 <= high)
        gap = around(float(iqm(x) - iqm(y)), drawn, seeds, confidence)
        held["standard error"] += gap.low <= 0 <= gap.high
        chance = improvement_interval(x, y, confidence)
        held["probability"] += chance.low <= 0.5 <= chance.high
    return {kind: count / simulations for kind, count in held.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--simulations", type=int, default=4_000)
    sizes = vars(parser.parse_args())

    def cells(found: dict[str, float]) -> list[str]:
        return [f"{100 * share:.1f} %" for share in found.values()]

    print(heading("scores", "percentile", "with Student's t"))
    for name in DISTRIBUTIONS:
        print(line((name, *cells(coverage(name, **sizes)))))
    print("", heading("equal arms", "confidence", *PAIR_KINDS), sep="\n")
    for name, correlation, confidence in product(DISTRIBUTIONS, (0.0, 0.7), (0.95, 1 - 0.05 / 16)):
        found = pair_coverage(name, correlation, confidence, **sizes)
        label = f"{name}, correlation {correlation:g}"
        print(line((label, f"{100 * confidence:.3g} %", *cells(found))))


if __name__ == "__main__":
    main()
