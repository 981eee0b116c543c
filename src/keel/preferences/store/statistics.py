"""What a store holds: labels by source, annotator and round, what they took, how far they agree."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from keel.preferences.store.records import Source
from keel.preferences.store.store import PreferenceStore
from keel.preferences.summary import agreement

GROUPS = ("source", "annotator", "round")


def describe(store: PreferenceStore) -> dict[str, Any]:
    """Counts, labels by group, agreement by source, and the ledger, ready for JSON."""
    return {
        **store.counts(),
        "labels_by": {group: _labels_by(store, group) for group in GROUPS},
        "agreement": label_agreement(store),
        "ledger": _ledger(store),
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
        votes = [(value > 0.5) - (value < 0.5) for *_, value in labels]
        found.setdefault(source, {}).setdefault(len(votes), []).append((votes, labels[0][2]))
    return {
        source: [
            {"pairs": len(pairs), **(agreement(*zip(*pairs, strict=True)) or {})}
            for _, pairs in sorted(sizes.items())
        ]
        for source, sizes in found.items()
    }


def _ledger(store: PreferenceStore) -> list[dict[str, Any]]:
    """Sums of the costs by round, kind and unit, forecasts apart."""
    key = "round, kind, unit, forecast"
    rows = store.database.rows(
        f"SELECT {key}, SUM(amount) FROM costs GROUP BY {key} ORDER BY {key}"
    )
    names = ["round", "kind", "unit", "forecast", "amount"]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return [{**row, "forecast": bool(row["forecast"])} for row in found]
