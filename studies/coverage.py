"""How often the interval of an interquartile mean over seeds holds the true one.

    python -m studies.coverage [--seeds 10] [--simulations 4000]

Prints a Markdown table: for distributions of scores, the share of simulated comparisons whose 95 %
interval holds the interquartile mean of the distribution, for the percentile bootstrap as it is
(rliable's) and with the levels of Student's t that `keel compare` uses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from keel.analysis.comparison import iqm_rows, levels

Array = npt.NDArray[np.float64]
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


def coverage(name: str, seeds: int = 10, simulations: int = 4_000) -> dict[str, float]:
    """The share of simulations whose interval holds the truth, by kind of interval."""
    rng = np.random.default_rng(0)
    draw = DISTRIBUTIONS[name]
    truth = float(iqm_rows(draw(rng, (1_000_000,))))
    held = {"percentile": 0, "studentised levels": 0}
    kinds = {"percentile": (0.025, 0.975), "studentised levels": levels(seeds, 0.95)}
    for _ in range(simulations):
        scores = draw(rng, (seeds,))
        drawn = iqm_rows(scores[rng.integers(0, seeds, (1_000, seeds))].T)
        for kind, at in kinds.items():
            low, high = np.quantile(drawn, at)
            held[kind] += bool(low <= truth <= high)
    return {kind: count / simulations for kind, count in held.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--simulations", type=int, default=4_000)
    arguments = parser.parse_args()
    print("| scores | percentile | with Student's t |\n|---|---|---|")
    for name in DISTRIBUTIONS:
        found = coverage(name, arguments.seeds, arguments.simulations)
        print(
            f"| {name} | " + " | ".join(f"{100 * share:.1f} %" for share in found.values()) + " |"
        )


if __name__ == "__main__":
    main()
