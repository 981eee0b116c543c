"""What a store holds: pairs, labels by source, annotator and round, and how far these agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any

from keel.analysis.proportions import share_interval
from keel.preferences.agreement import Bootstrap, count_votes, fleiss_kappa, pairwise_agreement
from keel.preferences.store.exports import mean_label
from keel.preferences.store.records import Source
from keel.preferences.store.store import PreferenceStore

GROUPS = ("source", "annotator", "round")


def describe(store: PreferenceStore) -> dict[str, Any]:
    """Counts, the labelled pairs, labels by group, and agreement by source, ready for JSON."""
    return {
        **store.counts(),
        "labelled": describe_pairs(store),
        "labels_by": {group: _labels_by(store, group) for group in GROUPS},
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
    longer: list[bool] = []
    prompts: list[str] = []
    for judged in store.judged_pairs():
        mean = mean_label(judged.labels)
        if mean is None:
            continue
        value, texts = mean[0], (judged.first.text, judged.second.text)
        sides = {verdict(one.value) for one in judged.labels if one.value is not None}
        chosen, rejected = texts if value >= 0.5 else texts[::-1]
        found["pairs"] += 1
        found["ties"] += value == 0.5
        found["soft"] += value not in (0.0, 0.5, 1.0)
        found["empty"] += not all(text.strip() for text in texts)
        found["contradictions"] += {1, -1} <= sides
        lengths["chosen"].append(len(chosen))
        lengths["rejected"].append(len(rejected))
        if value != 0.5 and len(chosen) != len(rejected):
            longer.append(len(chosen) > len(rejected))
            prompts.append(judged.prompt.id)
    if found["pairs"]:
        found["characters"] = {
            side: {"median": statistics.median(some), "mean": statistics.fmean(some)}
            for side, some in lengths.items()
        }
    return {**found, "longer_preferred": share_interval(longer, prompts).as_dict()}


def verdict(value: float) -> int:
    """1 if the first is better, -1 if the second is, 0 for a tie."""
    return (value > 0.5) - (value < 0.5)


def vote_agreement(
    votes: Sequence[Sequence[Hashable]], prompts: Sequence[Hashable]
) -> dict[str, Any]:
    """Fleiss' κ and the share of pairs of judges that agree, of two or more votes a pair.

    Intervals are drawn over prompts, as the pairs of one prompt hang together. Raises ValueError
    for pairs with different numbers of votes.
    """
    counts, drawn = count_votes(votes), Bootstrap(groups=prompts)
    return {
        "judges": int(counts[0].sum()),
        "unanimous": sum(len(set(row)) == 1 for row in votes),
        "pairwise": pairwise_agreement(counts, drawn).as_dict(),
        "fleiss_kappa": fleiss_kappa(counts, drawn).as_dict(),
    }


def label_agreement(
    store: PreferenceStore, source: Source | None = None, round: int | None = None
) -> dict[Source, list[dict[str, Any]]]:
    """Of each source (or one), the agreement on pairs (of a round) with several labels.

    A label is a vote for the first answer, the second, or a tie; skips are none. Pairs with 2 and
    with 3 labels are apart, since κ is of a fixed number of raters.
    """
    given = {"l.source": source, "p.round": round}
    where = {name: value for name, value in given.items() if value is not None}
    rows = store.database.rows(
        "SELECT l.source, l.pair, p.prompt, l.value FROM labels l JOIN pairs p ON p.id = l.pair"
        " JOIN (SELECT pair, source FROM labels WHERE value IS NOT NULL GROUP BY pair, source"
        " HAVING COUNT(*) > 1) s ON s.pair = l.pair AND s.source = l.source"
        f" WHERE l.value IS NOT NULL{''.join(f' AND {name} = ?' for name in where)}"
        " ORDER BY l.source, p.seq, l.seq",
        list(where.values()),
    )
    found: dict[Source, dict[int, list[tuple[list[int], str]]]] = {}
    for (source, _), group in groupby(rows, key=lambda row: row[:2]):
        labels = list(group)
        votes = [verdict(value) for *_, value in labels]
        found.setdefault(source, {}).setdefault(len(votes), []).append((votes, labels[0][2]))
    return {
        source: [
            {"pairs": len(pairs), **vote_agreement(*zip(*pairs, strict=True))}
            for _, pairs in sorted(sizes.items())
        ]
        for source, sizes in found.items()
    }


def _labels_by(store: PreferenceStore, group: str) -> list[dict[str, Any]]:
    """Of each group: labels, ties, skips, mean seconds a label, dollars (None: not recorded)."""
    key = "source, annotator" if group == "annotator" else group
    rows = store.database.rows(
        f"SELECT {key}, COUNT(*), TOTAL(value = 0.5), TOTAL(value IS NULL), AVG(seconds),"
        f" SUM(cost) FROM labels GROUP BY {key} ORDER BY {key}"
    )
    names = [*key.split(", "), "labels", "ties", "skips", "seconds_per_label", "cost"]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return [{**row, "ties": int(row["ties"]), "skips": int(row["skips"])} for row in found]


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
    for group in GROUPS:
        for row in result["labels_by"][group]:
            who = " ".join(str(row[name]) for name in ("source", group) if name in row)
            name = f"{group} {row[group] or '(no name)'}" if group != "annotator" else who
            lines.append(f"  {name:<26}{row['labels']:>8} labels{_taken(row)}")
    for source, sizes in result["agreement"].items():
        for size in sizes:
            lines.append(
                f"  {source}, {size['judges']} labels a pair: {size['pairs']} pairs, "
                f"{shown(size['pairwise'])} agree, Fleiss' κ {shown(size['fleiss_kappa'])}"
            )
    return lines


def shown(value: Mapping[str, Any], digits: int = 3) -> str:
    """A figure with its interval; without, if pairs of one prompt or full agreement give none."""
    mean, *ends = (value[name] for name in ("mean", "low", "high"))
    if mean is None or math.isnan(mean):
        return "undefined"
    known = all(end is not None and math.isfinite(end) for end in ends)
    interval = f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if known else ""
    return f"{mean:.{digits}f}{interval}"


def _taken(row: Mapping[str, Any]) -> str:
    parts = [f"{row['ties']} ties", f"{row['skips']} skips"]
    if row["seconds_per_label"] is not None:
        parts.append(f"{row['seconds_per_label']:.1f} s a label")
    if row["cost"] is not None:
        parts.append(f"${row['cost']:.4g}")
    return "".join(f", {part}" for part in parts)
