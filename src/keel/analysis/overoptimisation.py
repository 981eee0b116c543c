"""The law by which a gold reward rises and falls as a policy is driven against a proxy of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import Array


@dataclass(frozen=True, slots=True, eq=False)
class Optimisation:
    """One run against a proxy: its points in order of training.

    `divergence` is KL(π‖π_ref) in nats, the mean over sequences of the summed divergence.
    """

    label: str
    divergence_P: Array
    proxy_P: Array
    gold_P: Array

    @property
    def moved(self) -> bool:
        """Whether the policy went away from the reference, so that a picture has something to show.

        At least 20 points, and the last quarter of the run twice as far away as the first.
        """
        at = distance(self.divergence_P)
        quarter = len(at) // 4
        return len(at) >= 20 and bool(np.mean(at[-quarter:]) >= 2 * np.mean(at[:quarter]))


def optimisation_of(
    rows: Sequence[Mapping[str, Any]], proxies: Mapping[str, float], gold: str, label: str
) -> Optimisation | None:
    """A stage of reinforcement learning (its metrics.jsonl rows) as points of the picture.

    `proxies` are the rewards that were learned from, with their weights; `gold` is the one that
    watched. None if no row has all of them and the divergence to the reference.
    """
    names = ("kl/sequence", f"rewards/{gold}/mean", *(f"rewards/{name}/mean" for name in proxies))
    kept = [row for row in rows if all(row.get(name) is not None for name in names)]
    if not kept:
        return None
    values_NP = np.array([[row[name] for row in kept] for name in names], dtype=np.float64)
    weight_N = np.array(list(proxies.values()), dtype=np.float64)
    return Optimisation(label, values_NP[0], weight_N @ values_NP[2:], values_NP[1])


def distance(divergence_P: npt.ArrayLike) -> Array:
    """d = √KL(π‖π_ref), KL the mean over sequences of the summed divergence.

    An estimate of KL can come out below 0 near the reference: it counts as 0.
    Source: Gao et al. 2022 [2210.10760] §3.
    """
    return np.sqrt(np.maximum(np.asarray(divergence_P, dtype=np.float64).reshape(-1), 0.0))


def fit_law(distance_P: npt.ArrayLike, gold_P: npt.ArrayLike) -> Array | None:
    """The start, α and β of the gold reward under reinforcement learning against a proxy.

        min over start, α, β of Σ (gold_i − start − d_i (α − β log d_i))²,   d = √KL

    The unknowns enter linearly, so there is one answer and no starting point. The paper measures
    gold from the start of training (start = 0); fitted too, it lets no noise of the first point
    into all others. Points that are not finite are left out. None if the rest does not determine
    three unknowns and an error: fewer than four different distances.
    Source: Gao et al. 2022 [2210.10760] §3.1, the form for RL.
    """
    d, gold = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (distance_P, gold_P))
    finite = np.isfinite(d) & np.isfinite(gold)
    design, gold = _design(d[finite]), gold[finite]
    if np.unique(design[:, 1]).size < 4:
        return None
    # Columns of one size, so that the rank does not depend on the unit of d.
    scale = np.abs(design).max(axis=0)
    if not scale.all():
        return None
    found, _, rank, _ = np.linalg.lstsq(design / scale, gold, rcond=1e-10)
    return None if rank < design.shape[1] else found / scale


def law(distance_P: npt.ArrayLike, start_alpha_beta: Array) -> Array:
    """gold(d) = start + d (α − β log d) at distances d ≥ 0, the limit `start` at 0."""
    return np.asarray(_design(distance_P) @ start_alpha_beta)


def _design(distance_P: npt.ArrayLike) -> Array:
    """Columns 1, d and −d log d, which is 0 at d = 0."""
    d = np.asarray(distance_P, dtype=np.float64).reshape(-1)
    return np.stack([np.ones_like(d), d, -d * np.log(np.where(d > 0, d, 1.0))], axis=1)
