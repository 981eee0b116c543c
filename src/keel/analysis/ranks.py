"""What depends on order alone: ranks, correlations, the area under the ROC curve."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

from keel.analysis.proportions import clustered_interval, codes
from keel.analysis.statistics import Interval


def pearson(x_S: npt.ArrayLike, y_S: npt.ArrayLike) -> float | None:
    """Σ (x − x̄)(y − ȳ) / √(Σ (x − x̄)² Σ (y − ȳ)²); None if one of the two is constant."""
    x, y = (np.asarray(values, dtype=np.float64).reshape(-1) for values in (x_S, y_S))
    # The mean of equal values need not be that value to the last place: ask for the range.
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x / np.ptp(x), y / np.ptp(y))[0, 1])


def spearman(x_S: npt.ArrayLike, y_S: npt.ArrayLike) -> float | None:
    """Pearson's correlation of the ranks; None if one of the two is constant.

    Source: Spearman 1904, Am. J. Psychol. 15:72. Ties have the mean of their ranks.
    """
    from scipy.stats import rankdata

    return pearson(rankdata(x_S), rankdata(y_S))


def auc_interval(
    score_S: npt.ArrayLike, positive_S: npt.ArrayLike, clusters: Iterable[Hashable] | None = None
) -> Interval:
    """The chance that a positive scores above a negative, ties ½: the area under the ROC curve.

        A = (Σ_{i positive} rank_i − m(m+1)/2) / (m n)
        u_i = (P(s_i > s⁻) − A) / m · √(G⁺/(G⁺−1))   for a positive i
        u_j = (P(s⁺ > s_j) − A) / n · √(G⁻/(G⁻−1))   for a negative j

    with ranks over all m positives and n negatives, G⁺ and G⁻ the clusters that hold a positive
    and a negative, and 95 % of `clustered_interval` from the influences u, with t of
    min(G⁺, G⁻) − 1 degrees: the rarer side bounds what is known. Without `clusters` each item
    stands for itself. [0, 1] if one side has no more than one cluster, of NaN if it has no
    item. Near 1, with ten or twenty of the rarer side, it covers about 90 %. Source: Mann and
    Whitney 1947, Ann. Math. Stat. 18:50; influences as DeLong et al. 1988, Biometrics 44:837,
    summed over a cluster as Obuchowski 1997, Biometrics 53:567.
    """
    from scipy.stats import rankdata

    scores = np.asarray(score_S, dtype=np.float64).reshape(-1)
    positive = np.asarray(positive_S, dtype=bool).reshape(-1)
    m = int(positive.sum())
    n = scores.size - m
    if m == 0 or n == 0:
        return Interval(math.nan, 0.0, 1.0, scores.size)
    groups = np.arange(scores.size) if clusters is None else codes(clusters)
    # Rank among all, less rank among one's own, is how many of the other side lie below.
    below = rankdata(scores)
    below[positive] -= rankdata(scores[positive])
    below[~positive] -= rankdata(scores[~positive])
    area = float(below[positive].sum()) / (m * n)
    g, h = np.unique(groups[positive]).size, np.unique(groups[~positive]).size
    few = min(g, h)
    if few < 2:
        return Interval(area, 0.0, 1.0, scores.size)
    above = (below / n - area) / m * math.sqrt(g / (g - 1))
    under = (1 - below / m - area) / n * math.sqrt(h / (h - 1))
    influence = np.where(positive, above, under)
    return clustered_interval(area, influence, groups, few, degrees=few - 1)
