"""The law by which a gold reward rises and falls as a policy is driven against a proxy of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keel.insight.statistics import Array

LEAST_POINTS = 4
"""Different distances a fit needs: one more than it has unknowns."""


@dataclass(frozen=True, slots=True)
class OverOptimisation:
    """gold(d) = start + d (alpha − beta log d), fitted; `error` is the RMS residual."""

    start: float
    alpha: float
    beta: float
    error: float
    n: int

    def at(self, distance_P: npt.ArrayLike) -> Array:
        """The gold reward at distances d ≥ 0, the limit `start` at 0."""
        return np.asarray(_design(distance_P) @ np.array([self.start, self.alpha, self.beta]))

    @property
    def peak(self) -> float | None:
        """The distance beyond which more optimisation does harm; None where there is none.

        d* = exp(α/β − 1), where the derivative α − β − β log d is 0; gold(d*) = start + β d*
        """
        if self.beta <= 0 or self.alpha / self.beta > 500:
            return None
        return math.exp(self.alpha / self.beta - 1)

    def as_dict(self) -> dict[str, float | int | None]:
        names = ("start", "alpha", "beta", "error", "n", "peak")
        return {name: getattr(self, name) for name in names}


def distance(divergence_P: npt.ArrayLike) -> Array:
    """d = √KL(π‖π_ref), KL the mean over sequences of the summed divergence.

    An estimate of KL can come out below 0 near the reference: it counts as 0.
    Source: Gao et al. 2022 [2210.10760] §3.
    """
    return np.sqrt(np.maximum(np.asarray(divergence_P, dtype=np.float64).reshape(-1), 0.0))


def fit_overoptimisation(
    distance_P: npt.ArrayLike, gold_P: npt.ArrayLike
) -> OverOptimisation | None:
    """Least squares of the gold reward under reinforcement learning against a proxy.

        min over start, α, β of Σ (gold_i − start − d_i (α − β log d_i))²,   d = √KL

    The unknowns enter linearly, so there is one answer and no starting point. The paper measures
    gold from the start of training (start = 0); fitted too, it lets no noise of the first point
    into all others. Points that are not finite are left out. None where the rest does not determine
    three unknowns: fewer than four different distances.
    Source: Gao et al. 2022 [2210.10760] §3.1, the form for RL.

    Raises:
        ValueError: a negative distance, or not as many rewards as distances.
    """
    d, gold = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (distance_P, gold_P))
    if d.size != gold.size:
        raise ValueError(f"{gold.size} rewards for {d.size} distances")
    if (d < 0).any():
        raise ValueError("a distance is a root of KL: at least 0")
    finite = np.isfinite(d) & np.isfinite(gold)
    d, gold = d[finite], gold[finite]
    if np.unique(d).size < LEAST_POINTS:
        return None
    design = _design(d)
    # Columns of one size, so that the rank does not depend on the unit of d.
    scale = np.abs(design).max(axis=0)
    if not scale.all():
        return None
    found, _, rank, _ = np.linalg.lstsq(design / scale, gold, rcond=1e-10)
    if rank < design.shape[1]:
        return None
    start, alpha, beta = (float(x) for x in found / scale)
    error = float(np.sqrt(np.mean((design / scale @ found - gold) ** 2)))
    return OverOptimisation(start, alpha, beta, error, d.size)


def _design(distance_P: npt.ArrayLike) -> Array:
    """Columns 1, d and −d log d, which is 0 at d = 0."""
    d = np.asarray(distance_P, dtype=np.float64).reshape(-1)
    return np.stack([np.ones_like(d), d, -d * np.log(np.where(d > 0, d, 1.0))], axis=1)
