"""Who labels which pair: a judge or people, by the information that a dollar buys.

Suffixes: `_L` labellers, `_C` pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import Array
from keel.preferences.acquisition import (
    Index,
    PairBeliefs,
    gaussian_uncertainty,
    variance_reduction,
)


@dataclass(frozen=True, slots=True)
class Labeller:
    """A judge or a person: dollars a label, and how likely a label is not turned round."""

    name: str
    price: float
    accuracy: float


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The pairs to label, who labels each (an index of the labellers), and the gain of each label.

    The first pairs are those whose label is worth most a dollar.
    """

    index: Index
    labeller: Index
    gain: Array
    spent: float


def label_gains(
    beliefs: PairBeliefs, labellers: Sequence[Labeller], *, variance: bool = False
) -> Array:
    """What a label of each labeller tells about each pair, (L, C).

    The expected fall in the entropy of the rewards (`gaussian_uncertainty`'s mutual information,
    with the labeller's accuracy), or in the `variance` of the pair's difference.
    Source: expected information gain, Lindley 1956, Ann. Math. Stat. 27:986; labels that may be
    wrong, at a price: Donmez and Carbonell 2008, CIKM, p. 619.
    """
    mean, spread = beliefs.difference_C, beliefs.variance_C
    gains = [
        variance_reduction(mean, spread, one.accuracy)
        if variance
        else gaussian_uncertainty(mean, spread, one.accuracy).epistemic_C
        for one in labellers
    ]
    return np.array(gains).reshape(len(labellers), len(mean))


def best_labellers(gain_LC: Array, price_L: npt.ArrayLike) -> tuple[Index, Array]:
    """For each pair the labeller with the largest gain a dollar, and that gain a dollar."""
    ratio_LC = gain_LC / _prices(price_L)[:, None]
    labeller_C = ratio_LC.argmax(axis=0)
    return labeller_C, ratio_LC.max(axis=0)


def route_labels(gain_LC: Array, price_L: npt.ArrayLike, budget: float) -> Routing:
    """Pairs and labellers within a budget, at most one labeller a pair, for a large sum of gains.

        max Σ_lc x_lc gain_lc   with   Σ_lc x_lc price_l ≤ budget,   Σ_l x_lc ≤ 1,   x ∈ {0, 1}

    Greedy: of a pair's labellers those on the concave hull of gain over price count; each pair
    moves up its hull, the steps with the largest gain a dollar first, and a pair whose next step
    does not fit stays where it is. The sum falls short of the best one by less than the gain of the
    first step that did not fit. It counts each pair on its own: labels of similar pairs tell less
    together, so spend a budget in rounds.
    Source: Sinha and Zoltners 1979, Operations Research 27:503 (the multiple-choice knapsack).
    """
    price = _prices(price_L)
    steps = sorted(
        (-slope, pair, number, labeller)
        for pair in range(gain_LC.shape[1])
        for number, (slope, labeller) in enumerate(_hull(gain_LC[:, pair], price))
    )
    chosen: dict[int, int] = {}
    stopped: set[int] = set()
    spent = 0.0
    for _, pair, _, dearer in steps:
        cost = price[dearer] - (price[chosen[pair]] if pair in chosen else 0.0)
        # Sums of prices such as 0.1 may exceed a budget that they add up to by rounding.
        if pair in stopped or spent + cost > budget * (1 + 1e-12):
            stopped.add(pair)
            continue
        chosen[pair] = dearer
        spent += cost
    index = np.array(list(chosen), dtype=np.int64)
    labeller = np.array(list(chosen.values()), dtype=np.int64)
    return Routing(index, labeller, gain_LC[labeller, index], math.fsum(price[labeller]))


def _hull(gain_L: Array, price_L: Array) -> list[tuple[float, int]]:
    """(slope, labeller) of each step of the concave hull from no label at all, slopes falling."""
    hull: list[tuple[float, int]] = []
    at_gain = at_price = 0.0
    slope = math.inf
    while True:
        dearer = np.flatnonzero((price_L > at_price) & (gain_L > at_gain))
        if not dearer.size:
            return hull
        slopes = (gain_L[dearer] - at_gain) / (price_L[dearer] - at_price)
        best = int(dearer[np.argmax(slopes)])
        # Rounding must not put a step before the one that it starts from.
        slope = min(slope, float(slopes.max()))
        hull.append((slope, best))
        at_gain, at_price = float(gain_L[best]), float(price_L[best])


def _prices(price_L: npt.ArrayLike) -> Array:
    price = np.asarray(price_L, dtype=np.float64).reshape(-1)
    if not (np.isfinite(price) & (price > 0)).all():
        raise ValueError("prices are above 0")
    return price
