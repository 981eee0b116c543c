"""How far labels agree, and how far a judge that saw each pair in both orders can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import Array, Interval, codes, mean_interval, share_interval
from keel.preferences.records import JudgedPair, LabelRecord, Source, mean_label
from keel.preferences.store import PreferenceStore, where
from keel.types import shorten


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
    """Fleiss' κ and the share of pairs of judges that agree, of two or more votes a pair, of every
    pair as many. Intervals are clustered by prompt."""
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


def shown(value: Mapping[str, Any], digits: int = 3, scale: float = 1.0) -> str:
    """A figure (times a scale) with its interval; without, if there is none."""
    mean, *ends = (value[name] for name in ("mean", "low", "high"))
    if mean is None or math.isnan(mean):
        return "undefined"
    known = all(end is not None and math.isfinite(end) for end in ends)
    low, high = (f"{scale * end:.{digits}f}" if known else "" for end in ends)
    return f"{scale * mean:.{digits}f}" + (f" [{low}, {high}]" if known else "")


Counts = npt.NDArray[np.int64]
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
    """
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


def fleiss_kappa(counts: Counts, clusters: Iterable[Hashable] | None = None) -> Interval:
    """Fleiss' κ of n ratings an item; the raters need not be the same from item to item.

        κ = (P̄ − P̄_e) / (1 − P̄_e),   P̄_e = Σ_j p_j²,   p_j = Σ_i n_ij / (N n)
        P̄ = Σ_i Σ_j n_ij (n_ij − 1) / (N n (n − 1))

    `counts` is items × categories, n_ij (`count_votes` makes it). If every rating is one and the
    same category, κ is NaN. Source: Fleiss 1971, Psychol. Bull. 76:378. The interval: `_estimate`.
    """
    raters = int(counts[0].sum())
    patterns, found = np.unique(counts, axis=0, return_inverse=True)
    pairs = (patterns * (patterns - 1)).sum(axis=1)

    def kappa(weights: Array) -> Array:
        ratings = weights.sum(axis=1) * raters
        chance = ((weights @ patterns) ** 2).sum(axis=1)
        # Times (N n)² (n − 1): whole numbers, as above.
        agreed = (weights @ pairs) * ratings
        return _ratio(agreed - chance * (raters - 1), (ratings**2 - chance) * (raters - 1))

    return _estimate(found.reshape(-1), len(patterns), kappa, clusters)


def pairwise_agreement(counts: Counts, clusters: Iterable[Hashable] | None = None) -> Interval:
    """The share of pairs of raters of one item that agree: P̄ of `fleiss_kappa`."""
    raters = int(counts[0].sum())
    shares = (counts * (counts - 1)).sum(axis=1) / (raters * (raters - 1))
    return share_interval(shares, clusters)


def count_votes(votes: Sequence[Sequence[Hashable]]) -> Counts:
    """Items × categories from each item's votes, the categories in order of appearance."""
    found = codes(vote for item in votes for vote in item)
    counts = np.zeros((len(votes), int(found.max(initial=-1)) + 1), dtype=np.int64)
    items = np.repeat(np.arange(len(votes)), [len(item) for item in votes])
    np.add.at(counts, (items, found), 1)
    return counts


def _ratio(above: Array, below: Array) -> Array:
    ratio = np.full(above.shape, math.nan)
    np.divide(above, below, out=ratio, where=below != 0)
    return ratio


def _estimate(
    patterns: Counts,
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


# ---------------------------------------------------------------- judges

FIGURES = {
    "order_consistency": "same in both orders",
    "position_bias": "position bias",
    "longer_preferred": "longer preferred",
}


@dataclass(frozen=True, slots=True)
class TwoOrders:
    """A pair and a judge's labels of it, with its first completion shown first and second."""

    pair: JudgedPair
    first: LabelRecord
    second: LabelRecord

    @property
    def decided(self) -> bool:
        """Whether both orders have a verdict."""
        return self.first.value is not None and self.second.value is not None

    @property
    def value(self) -> float:
        """P(the first completion is better): the mean of the two."""
        found = mean_label((self.first, self.second))
        return 0.5 if found is None else found[0]

    @property
    def place(self) -> int:
        """1 if both orders prefer the answer shown first, −1 if the one shown second, else 0."""
        sides = (self.first.value or 0.0) - 0.5, 0.5 - (self.second.value or 0.0)
        return (min(sides) > 0) - (max(sides) < 0)


def audit_judges(store: PreferenceStore) -> list[dict[str, Any]]:
    """Of each judge and rubric with labels in both orders: how it judged, ready for JSON.

    Intervals are of 95 %, clustered by prompt. Of several labels of one order the last counts.

    - `order_consistency`: the share of pairs with the same verdict in both orders;
    - `position_bias`: how much more often both orders prefer the place shown first than the
      second, in [−1, 1];
    - `longer_preferred`: the share of pairs of different lengths with a winner that is the longer;
    - `models`: the mean label of each model's completions against other models' (½: a tie);
    - `own`: that of the judge's own completions, None if there are none, and by people on the
      same pairs if they labelled some;
    - `people`: accuracy and Cohen's κ against people's mean label (first, second or tie).
    """
    found: dict[tuple[str, str], list[TwoOrders]] = {}
    for pair in store.judged_pairs():
        orders: dict[tuple[str, str], dict[str, LabelRecord]] = {}
        for label in pair.labels:
            if label.source == "judge" and label.shown_first is not None:
                key = (label.annotator, label.rubric)
                orders.setdefault(key, {})[label.shown_first] = label
        for key, sides in orders.items():
            if len(sides) == 2:
                found.setdefault(key, []).append(TwoOrders(pair, sides["first"], sides["second"]))
    return [_audit(*key, pairs) for key, pairs in found.items()]


def _audit(judge: str, rubric: str, every: Sequence[TwoOrders]) -> dict[str, Any]:
    pairs = [pair for pair in every if pair.decided]
    prompts = [pair.pair.prompt.id for pair in pairs]
    same = [pair.first.value == pair.second.value for pair in pairs]
    return {
        "judge": judge,
        "rubric": rubric,
        "pairs": len(pairs),
        "no_verdict": len(every) - len(pairs),
        "ties": sum(pair.value == 0.5 for pair in pairs),
        "order_consistency": share_interval(same, prompts).as_dict(),
        "position_bias": _position(pairs).as_dict(),
        "longer_preferred": longer_preferred((pair.pair, pair.value) for pair in pairs).as_dict(),
        **_models(judge, pairs),
        "people": _people(pairs),
    }


def _position(pairs: Sequence[TwoOrders]) -> Interval:
    """The mean of `place`, in [−1, 1].

    Where all pairs are alike their spread says nothing: others are then at most as many as
    `share_interval` leaves room for.
    """
    places = [pair.place for pair in pairs]
    prompts = [pair.pair.prompt.id for pair in pairs]
    found = mean_interval(places, prompts)
    low, high = found.low, found.high
    if len(set(places)) == 1:
        others = 1 - share_interval([1.0] * len(places), prompts).low
        room = others if places[0] == 0 else 2 * others
        low, high = found.mean - room, found.mean + room
    return Interval(found.mean, max(low, -1.0), min(high, 1.0), found.n)


def _models(judge: str, pairs: Sequence[TwoOrders]) -> dict[str, Any]:
    """Of pairs of two models: how each fares, and the judge's own completions."""
    values: dict[str, list[tuple[float, str]]] = {}
    by_people: list[tuple[float, str]] = []
    for pair in pairs:
        first, second, prompt = pair.pair.first, pair.pair.second, pair.pair.prompt.id
        if first.model == second.model:
            continue
        for model, value in ((first.model, pair.value), (second.model, 1 - pair.value)):
            values.setdefault(model, []).append((value, prompt))
        people = _by_people(pair.pair)
        if judge in (first.model, second.model) and people is not None:
            by_people.append((people if first.model == judge else 1 - people, prompt))
    rates = [{"model": name, "win_rate": _mean(some)} for name, some in sorted(values.items())]
    own = _mean(values[judge]) if judge in values else None
    return {
        "models": rates,
        "own": own,
        "own_by_people": _mean(by_people) if by_people else None,
    }


def _people(pairs: Sequence[TwoOrders]) -> dict[str, Any] | None:
    """Agreement with people on the pairs that they labelled; None if there are none."""
    known = [(pair, value) for pair in pairs if (value := _by_people(pair.pair)) is not None]
    if not known:
        return None
    judged = [verdict(pair.value) for pair, _ in known]
    people = [verdict(value) for _, value in known]
    prompts = [pair.pair.prompt.id for pair, _ in known]
    same = [one == other for one, other in zip(judged, people, strict=True)]
    return {
        "pairs": len(known),
        "accuracy": share_interval(same, prompts).as_dict(),
        "cohen_kappa": cohen_kappa(judged, people, prompts).as_dict(),
    }


def _by_people(pair: JudgedPair) -> float | None:
    """The mean of people's labels."""
    found = mean_label(label for label in pair.labels if label.source == "human")
    return None if found is None else found[0]


def _mean(values: Sequence[tuple[float, str]]) -> dict[str, float | int]:
    shares, prompts = zip(*values, strict=True)
    return share_interval(shares, prompts).as_dict()


def audit_lines(judges: Sequence[Mapping[str, Any]]) -> list[str]:
    """An audit for people, a line each."""
    lines = []
    for judge in judges:
        lines.append(
            f"judge {judge['judge']}: {judge['pairs']} pairs in both orders, {judge['ties']} ties, "
            f"{judge['no_verdict']} without a verdict"
        )
        lines.append(f"  rubric: {shorten(' '.join(judge['rubric'].split()), 70)}")
        lines += [_figure(name, judge[key]) for key, name in FIGURES.items()]
        lines += [_figure(f"wins of {row['model']}", row["win_rate"]) for row in judge["models"]]
        if judge["own"] is not None:
            lines.append(_figure("its own completions", judge["own"]))
        if judge["own_by_people"] is not None:
            lines.append(_figure("these, by people", judge["own_by_people"]))
        if judge["people"] is not None:
            lines.append(_figure("accuracy, of people", judge["people"]["accuracy"]))
            lines.append(_figure("Cohen's κ, of people", judge["people"]["cohen_kappa"]))
    return lines or ["no pair has a judge's labels in both orders"]


def _figure(name: str, value: Mapping[str, Any]) -> str:
    return f"  {name:<22} {shown(value)}   n = {value['n']}"
