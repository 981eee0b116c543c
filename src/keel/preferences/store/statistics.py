"""What a store holds: pairs, labels by source, annotator and round, and how far these agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from keel.analysis.statistics import Interval, share_interval
from keel.preferences.agreement import count_votes, fleiss_kappa, pairwise_agreement
from keel.preferences.store.exports import mean_label
from keel.preferences.store.records import JudgedPair, Source
from keel.preferences.store.store import PreferenceStore, where

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
