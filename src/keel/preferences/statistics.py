"""What a store holds, by source, annotator and round, and what it cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from keel.config.load import round_of
from keel.preferences.agreement import label_agreement, longer_preferred, shown, verdict
from keel.preferences.records import CostKind, JudgedPair, Source, mean_label
from keel.preferences.store import PreferenceStore, where
from keel.runs.reader import Run

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


def _taken(row: Mapping[str, Any]) -> str:
    parts = [f"{row['ties']} ties", f"{row['skips']} skips"]
    if row["seconds_per_label"] is not None:
        parts.append(f"{row['seconds_per_label']:.1f} s a label")
    if row["cost"] is not None:
        parts.append(f"${row['cost']:.4g}")
    return "".join(f", {part}" for part in parts)


# ---------------------------------------------------------------- costs

KINDS: dict[Source, CostKind] = {
    **{"human": "human", "judge": "api", "rule": "gpu", "reward_model": "gpu"},
}
"""What the money on a label goes to, by its source."""
TIMED: tuple[CostKind, ...] = ("human", "gpu")
"""Kinds that are paid by the hour; the seconds of an API's calls overlap and cost nothing."""
HOUR = 3600.0
CELLS = {
    "forecast_dollars": "forecast $",
    "actual_dollars": "actual $",
    "forecast_hours": "forecast h",
    "actual_hours": "actual h",
}
"""The cells of the table, and their titles."""


@dataclass(frozen=True, slots=True)
class CostItem:
    """An amount and where it is recorded: `of` is "labels by judge", "completions", …

    `items` is their number. Dollars and hours are None if none of them has any.
    """

    round: int
    kind: CostKind
    of: str
    forecast: bool
    items: int
    dollars: float | None = None
    hours: float | None = None


def cost_items(store: PreferenceStore) -> Iterator[CostItem]:
    """Everything that costs, grouped by round and origin.

    An item's own `cost` (dollars) and `seconds` count once, as what labels, steps and completions
    took; an entry of the ledger counts in addition, as what is on none of them.
    """
    for table in ("labels", "steps", "completions"):
        by = "kind" if table == "completions" else "source"
        for round, source, items, dollars, seconds in store.database.rows(
            f"SELECT round, {by}, COUNT(*), SUM(cost), SUM(seconds)"
            f" FROM {table} GROUP BY 1, 2 ORDER BY 1, 2"
        ):
            kind = KINDS.get(source, source)  # a completion has its kind
            hours = None if seconds is None or kind not in TIMED else seconds / HOUR
            of = table if table == "completions" else f"{table} by {source}"
            yield CostItem(round, kind, of, False, items, dollars, hours)
    for round, kind, forecast, purpose, items, dollars, hours in store.database.rows(
        "SELECT round, kind, forecast, purpose, COUNT(*), SUM(IIF(unit = 'dollars', amount, NULL)),"
        " SUM(IIF(unit = 'hours', amount, NULL)) FROM costs GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
    ):
        of = f"entries for {purpose or 'no stated purpose'}"
        yield CostItem(round, kind, of, bool(forecast), items, dollars, hours)


def step_costs(run: Run, price: float | None) -> Iterator[CostItem]:
    """The hours of each stage's steps; its round is the number that `repeat` has added to its name.

    At a price (dollars an hour) they are dollars too.
    """
    for stage in run.stages:
        hours = run.seconds(stage) / HOUR
        dollars = None if price is None else price * hours
        steps = len(run.timings(stage))
        yield CostItem(round_of(stage), "gpu", f"steps of {stage}", False, steps, dollars, hours)


def cost_table(items: Sequence[CostItem]) -> list[dict[str, Any]]:
    """Of each round and kind, and of all rounds (round None): dollars and hours, forecast and
    actual; None if nothing is recorded.

    The last row is of all kinds: dollars alone, since hours of people and of GPUs do not add up.
    """
    sums: dict[tuple[int | None, CostKind | None], dict[str, float | None]] = {}
    for item in items:
        when = "forecast" if item.forecast else "actual"
        for place in ((item.round, item.kind), (None, item.kind), (None, None)):
            cells = sums.setdefault(place, dict.fromkeys(CELLS))
            for unit, amount in (("dollars", item.dollars), ("hours", item.hours)):
                if amount is not None and (unit == "dollars" or place[1] is not None):
                    cells[f"{when}_{unit}"] = (cells[f"{when}_{unit}"] or 0.0) + amount
    rounds: list[int | None] = [*sorted({item.round for item in items}), None]
    return [
        {"round": round, "kind": kind, **sums[round, kind]}
        for round in rounds
        for kind in (*get_args(CostKind), None)
        if (round, kind) in sums
    ]


def describe_costs(store: PreferenceStore, training: Sequence[CostItem] = ()) -> dict[str, Any]:
    """The table and the items it sums, ready for JSON.

    `training` is what the steps of a run took, which its store does not hold.
    """
    items = [*cost_items(store), *training]
    return {"table": cost_table(items), "counted": [asdict(item) for item in items]}


def cost_lines(result: dict[str, Any]) -> list[str]:
    """`describe_costs` for people, a line each."""
    lines = [f"{'round':>5}  {'kind':<6}" + "".join(f"{title:>13}" for title in CELLS.values())]
    for row in result["table"]:
        cells = [_cell(row[name], 2 if name.endswith("dollars") else 3) for name in CELLS]
        round = "all" if row["round"] is None else row["round"]
        lines.append(f"{round:>5}  {row['kind'] or 'all':<6}" + "".join(f"{c:>13}" for c in cells))
    lines.append("counted:")
    for item in result["counted"]:
        dollars, hours = item["dollars"], item["hours"]
        amounts = [] if dollars is None else [f"${dollars:,.2f}"]
        amounts += [] if hours is None else [f"{hours:,.3f} h"]
        when = "forecast" if item["forecast"] else "actual"
        known = ", ".join(amounts) or "no cost recorded"
        lines.append(
            f"  round {item['round']}, {item['kind']}, {when}: {known}, "
            f"{item['items']:,} {item['of']}"
        )
    return lines


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
