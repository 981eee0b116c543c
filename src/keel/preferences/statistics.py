"""What a store holds: pairs, labels by source, annotator and round, and how far these agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import Array, Interval, codes, share_interval
from keel.preferences.records import JudgedPair, Source, mean_label
from keel.preferences.store import PreferenceStore, where

GROUPS: Mapping[str, Sequence[str]] = {
    "source": ("source",),
    "annotator": ("source", "annotator"),
    "round": ("round",),
}
"""By what labels are counted, and the columns of it."""
COUNTED = {
    "labels": "COUNT(*)",
    "ties": "COUNT(*) FILTER (WHERE l.value = 0.5)",
    "skips": "COUNT(*) - COUNT(l.value)",
    "seconds_per_label": "AVG(l.seconds)",
    "cost": "SUM(l.cost)",
    "sided": "COUNT(*) FILTER (WHERE l.value <> 0.5 AND l.shown_first IS NOT NULL)",
    "first_shown": "COUNT(*) FILTER"
    " (WHERE l.value <> 0.5 AND (l.value > 0.5) = (l.shown_first = 'first'))",
}
"""What is counted of the labels of a group.

`sided` labels prefer an answer and say which was shown first; `first_shown` of them prefer that.
"""


def describe(store: PreferenceStore) -> dict[str, Any]:
    """Counts, the labelled pairs, labels by group, and agreement by source, ready for JSON."""
    return {
        **store.counts(),
        "labelled": describe_pairs(store),
        "labels_by": {group: labels_by(store, group) for group in GROUPS},
        "agreement": label_agreement(store),
    }


def describe_pairs(store: PreferenceStore) -> dict[str, Any]:
    """The pairs with a label, by its mean.

    A tie is ½, a soft label between ½ and a certain answer; `contradictions` have labels for either
    answer. `longer_preferred` is how often the longer answer is preferred, if one is longer and one
    preferred, clustered by prompt. Lengths are in characters.
    """
    found: dict[str, Any] = dict.fromkeys(("pairs", "ties", "soft", "empty", "contradictions"), 0)
    lengths: dict[str, list[int]] = {"chosen": [], "rejected": []}
    valued: list[tuple[JudgedPair, float]] = []
    for judged in store.judged_pairs():
        mean = mean_label(judged.labels)
        if mean is None:
            continue
        value, texts = mean[0], (judged.first.text, judged.second.text)
        sides = {verdict(one.value) for one in judged.labels if one.value is not None}
        found["pairs"] += 1
        found["ties"] += value == 0.5
        found["soft"] += value not in (0.0, 0.5, 1.0)
        found["empty"] += not all(text.strip() for text in texts)
        found["contradictions"] += {1, -1} <= sides
        for side, text in zip(lengths, texts if value >= 0.5 else texts[::-1], strict=True):
            lengths[side].append(len(text))
        valued.append((judged, value))
    if found["pairs"]:
        found["characters"] = {
            side: {"median": statistics.median(some), "mean": statistics.fmean(some)}
            for side, some in lengths.items()
        }
    return {**found, "longer_preferred": longer_preferred(valued).as_dict()}


def longer_preferred(valued: Iterable[tuple[JudgedPair, float]]) -> Interval:
    """How often the longer answer is preferred, of pairs of two lengths with a winner."""
    longer, prompts = [], []
    for judged, value in valued:
        difference = len(judged.first.text) - len(judged.second.text)
        if difference and value != 0.5:
            longer.append((difference > 0) == (value > 0.5))
            prompts.append(judged.prompt.id)
    return share_interval(longer, prompts)


def verdict(value: float) -> int:
    """1 if the first is better, -1 if the second is, 0 for a tie."""
    return (value > 0.5) - (value < 0.5)


def vote_agreement(
    votes: Sequence[Sequence[Hashable]], prompts: Sequence[Hashable]
) -> dict[str, Any]:
    """Fleiss' κ and the share of pairs of judges that agree, of two or more votes a pair.

    Intervals are clustered by prompt. Raises ValueError for pairs with different numbers of votes.
    """
    counts = count_votes(votes)
    return {
        "judges": int(counts[0].sum()),
        "unanimous": sum(len(set(row)) == 1 for row in votes),
        "pairwise": pairwise_agreement(counts, prompts).as_dict(),
        "fleiss_kappa": fleiss_kappa(counts, prompts).as_dict(),
    }


def label_agreement(
    store: PreferenceStore, source: Source | None = None, round: int | None = None
) -> dict[Source, list[dict[str, Any]]]:
    """Of each source (or one), the agreement on pairs (of a round) with several labels.

    A label is a vote for the first answer, the second, or a tie; skips are none. Pairs with 2 and
    with 3 labels are apart, since κ is of a fixed number of raters.
    """
    clause, values = where(**{"l.source": source, "p.round": round})
    rows = store.database.rows(
        "SELECT l.source, l.pair, p.prompt, l.value FROM labels l JOIN pairs p ON p.id = l.pair"
        f" WHERE l.value IS NOT NULL{clause} ORDER BY l.source, p.seq, l.seq",
        values,
    )
    found: dict[Source, dict[int, list[tuple[list[int], str]]]] = {}
    for (source_, _), group in groupby(rows, key=lambda row: row[:2]):
        labels = list(group)
        if len(labels) > 1:
            votes = [verdict(value) for *_, value in labels]
            found.setdefault(source_, {}).setdefault(len(votes), []).append((votes, labels[0][2]))
    return {
        source_: [
            {"pairs": len(pairs), **vote_agreement(*zip(*pairs, strict=True))}
            for _, pairs in sorted(sizes.items())
        ]
        for source_, sizes in found.items()
    }


def labels_by(
    store: PreferenceStore, group: str, source: Source | None = None, round: int | None = None
) -> list[dict[str, Any]]:
    """What `COUNTED` says of each group's labels (of a source, of pairs of a round)."""
    names = GROUPS[group]
    key = ", ".join(f"l.{name}" for name in names)
    clause, values = where(**{"l.source": source, "p.round": round})
    rows = store.database.rows(
        f"SELECT {key}, {', '.join(COUNTED.values())} FROM labels l JOIN pairs p ON p.id = l.pair"
        f" WHERE 1{clause} GROUP BY {key} ORDER BY {key}",
        values,
    )
    return [dict(zip((*names, *COUNTED), row, strict=True)) for row in rows]


def statistics_lines(result: Mapping[str, Any]) -> list[str]:
    """`describe` for people, a line each."""
    lines = []
    for name in ("prompts", "completions", "pairs", "labels", "steps", "costs"):
        lines.append(f"  {name:<18}{result[name]:>8}")
    labelled = result["labelled"]
    if labelled["pairs"]:
        for name in ("ties", "soft", "empty", "contradictions"):
            lines.append(f"  {name:<18}{labelled[name]:>8}   of {labelled['pairs']} labelled pairs")
        for side, length in labelled["characters"].items():
            lines.append(
                f"  {side + ' length':<18}{length['median']:>8.0f}   median characters, "
                f"mean {length['mean']:.0f}"
            )
        lines.append(f"  {'longer preferred':<18}{shown(labelled['longer_preferred']):>8}")
    for group, names in GROUPS.items():
        for row in result["labels_by"][group]:
            who = [str(row[name]) for name in names]
            name = " ".join(who) if len(who) > 1 else f"{group} {who[0]}"
            lines.append(f"  {name:<26}{row['labels']:>8} labels{_taken(row)}")
    for source, sizes in result["agreement"].items():
        for size in sizes:
            lines.append(
                f"  {source}, {size['judges']} labels a pair: {size['pairs']} pairs, "
                f"{shown(size['pairwise'])} agree, Fleiss' κ {shown(size['fleiss_kappa'])}"
            )
    return lines


def shown(value: Mapping[str, Any], digits: int = 3, scale: float = 1.0) -> str:
    """A figure (times a scale) with its interval; without, if there is none."""
    mean, *ends = (value[name] for name in ("mean", "low", "high"))
    if mean is None or math.isnan(mean):
        return "undefined"
    known = all(end is not None and math.isfinite(end) for end in ends)
    low, high = (f"{scale * end:.{digits}f}" if known else "" for end in ends)
    return f"{scale * mean:.{digits}f}" + (f" [{low}, {high}]" if known else "")


def _taken(row: Mapping[str, Any]) -> str:
    parts = [f"{row['ties']} ties", f"{row['skips']} skips"]
    if row["seconds_per_label"] is not None:
        parts.append(f"{row['seconds_per_label']:.1f} s a label")
    if row["cost"] is not None:
        parts.append(f"${row['cost']:.4g}")
    return "".join(f", {part}" for part in parts)


Statistic = Callable[[Array], Array]
"""From weights (resamples × patterns) to a value each; NaN if it is undefined."""
CONFIDENCE, RESAMPLES, SEED = 0.95, 2000, 0
BLOCK = 64
"""Resamples that are held at a time; each has a count of every cluster."""
NARROWEST = 1e-12
"""Resamples that differ by less than this differ by rounding."""


def cohen_kappa(
    a: Sequence[Hashable], b: Sequence[Hashable], clusters: Iterable[Hashable] | None = None
) -> Interval:
    """Cohen's κ of two judges who sort items into unordered categories.

        κ = (p_o − p_e) / (1 − p_e),   p_o = Σ_k p_kk,   p_e = Σ_k p_k· p_·k

    with p_kl the share of items that the first puts into k and the second into l. If both put every
    item into one and the same category, chance alone agrees fully (p_e = 1) and κ is NaN.
    Source: Cohen 1960, Educ. Psychol. Meas. 20:37. The interval: `_estimate`.

    Raises:
        ValueError: lists of different length.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} verdicts of one judge and {len(b)} of the other")
    both = codes([*a, *b])
    size = int(both.max(initial=-1)) + 1

    def kappa(weights: Array) -> Array:
        joint = weights.reshape(len(weights), size, size)
        total = joint.sum(axis=(1, 2))
        agreed = np.trace(joint, axis1=1, axis2=2)
        chance = (joint.sum(axis=2) * joint.sum(axis=1)).sum(axis=1)
        # Times N²: whole numbers, so that full agreement by chance is found exactly.
        return _ratio(agreed * total - chance, total * total - chance)

    return _estimate(both[: len(a)] * size + both[len(a) :], size**2, kappa, clusters)


def fleiss_kappa(counts: npt.ArrayLike, clusters: Iterable[Hashable] | None = None) -> Interval:
    """Fleiss' κ of n ratings an item; the raters need not be the same from item to item.

        κ = (P̄ − P̄_e) / (1 − P̄_e),   P̄_e = Σ_j p_j²,   p_j = Σ_i n_ij / (N n)
        P̄ = Σ_i Σ_j n_ij (n_ij − 1) / (N n (n − 1))

    `counts` is items × categories, n_ij (`count_votes` makes it). If every rating is one and the
    same category, κ is NaN. Source: Fleiss 1971, Psychol. Bull. 76:378. The interval: `_estimate`.

    Raises:
        ValueError: counts that are not whole, rows of different sums, or fewer than two raters.
    """
    table, raters = _table(counts)
    patterns, found = np.unique(table, axis=0, return_inverse=True)
    pairs = (patterns * (patterns - 1)).sum(axis=1)

    def kappa(weights: Array) -> Array:
        ratings = weights.sum(axis=1) * raters
        chance = ((weights @ patterns) ** 2).sum(axis=1)
        # Times (N n)² (n − 1): whole numbers, as above.
        agreed = (weights @ pairs) * ratings
        return _ratio(agreed - chance * (raters - 1), (ratings**2 - chance) * (raters - 1))

    return _estimate(found.reshape(-1), len(patterns), kappa, clusters)


def pairwise_agreement(
    counts: npt.ArrayLike, clusters: Iterable[Hashable] | None = None
) -> Interval:
    """The share of pairs of raters of one item that agree: P̄ of `fleiss_kappa`."""
    table, raters = _table(counts)
    shares = (table * (table - 1)).sum(axis=1) / (raters * (raters - 1))
    return share_interval(shares, clusters)


def count_votes(votes: Sequence[Sequence[Hashable]]) -> npt.NDArray[np.int64]:
    """Items × categories from each item's votes, the categories in order of appearance."""
    found = codes(vote for item in votes for vote in item)
    counts = np.zeros((len(votes), int(found.max(initial=-1)) + 1), dtype=np.int64)
    items = np.repeat(np.arange(len(votes)), [len(item) for item in votes])
    np.add.at(counts, (items, found), 1)
    return counts


def _table(counts: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], int]:
    given = np.asarray(counts)
    table = given.astype(np.int64)
    if given.ndim != 2 or (table != given).any() or (table < 0).any():
        raise ValueError("counts are items × categories, whole numbers from 0 on")
    sums = np.unique(table.sum(axis=1))
    if len(sums) > 1:
        raise ValueError(f"{sums[0]} ratings of one item and {sums[-1]} of another")
    if len(sums) == 1 and sums[0] < 2:
        raise ValueError("one rating an item: agreement needs two or more")
    return table, int(sums[0]) if len(sums) else 2


def _ratio(above: Array, below: Array) -> Array:
    ratio = np.full(above.shape, math.nan)
    np.divide(above, below, out=ratio, where=below != 0)
    return ratio


def _estimate(
    patterns: npt.NDArray[np.int64],
    count: int,
    statistic: Statistic,
    clusters: Iterable[Hashable] | None,
) -> Interval:
    """A statistic of the items' patterns (of `count` different ones), and of resamples of them.

    The interval is the percentile bootstrap's, over whole clusters (the pairs of one prompt), or
    over items; resamples in which the statistic is undefined are left out. Items matter by how
    often each pattern occurs only, so a resample is a draw of these counts. If the resamples do not
    vary (one cluster, or clusters that all say the same) there is no interval: its ends are NaN.
    Source: Efron 1979, Ann. Stat. 7:1.
    """
    size = len(patterns)
    if size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    cluster = np.arange(size) if clusters is None else codes(clusters)
    weights = np.zeros((int(cluster.max()) + 1, count))
    np.add.at(weights, (cluster, patterns), 1.0)
    value = float(statistic(weights.sum(axis=0, keepdims=True))[0])
    generator = np.random.default_rng(SEED)
    even = np.full(len(weights), 1 / len(weights))
    found = np.concatenate(
        [
            statistic(
                generator.multinomial(
                    len(weights), even, size=min(BLOCK, RESAMPLES - start)
                ).astype(np.float64)
                @ weights
            )
            for start in range(0, RESAMPLES, BLOCK)
        ]
    )
    found = found[~np.isnan(found)]
    if math.isnan(value) or not len(found) or np.ptp(found) < NARROWEST:
        return Interval(value, math.nan, math.nan, size)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return Interval(value, float(low), float(high), size)
