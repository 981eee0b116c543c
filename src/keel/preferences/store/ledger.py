"""What a store's labels, steps, completions and ledger entries cost, each counted once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keel.preferences.store.records import CostKind
from keel.preferences.store.store import PreferenceStore

KINDS: dict[str, CostKind] = {
    **{"human": "human", "judge": "api", "rule": "gpu", "reward_model": "gpu"},
    "completion": "api",
}
"""What the money on an item goes to: by a label's source, and of completions."""
TIMED: tuple[CostKind, ...] = ("human", "gpu")
"""Kinds that are paid by the hour; the seconds of an API's calls overlap and cost nothing."""
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class CostItem:
    """Where an amount is recorded: `of` is "labels by judge", "completions", "entry", ...

    `items` is their number, `priced` and `timed` of how many cost or seconds are known. None: of
    none. `unit` names an entry's that is neither dollars nor hours, with the amount in `other`.
    """

    round: int
    kind: CostKind
    of: str
    forecast: bool
    items: int
    priced: int
    timed: int
    dollars: float | None = None
    hours: float | None = None
    other: float | None = None
    unit: str | None = None


def cost_items(store: PreferenceStore) -> Iterator[CostItem]:
    """Everything that costs, grouped by round and origin.

    An item's own `cost` (dollars) and `seconds` count once, as what labels, steps and completions
    took; an entry of the ledger counts in addition, as what is on none of them.
    """
    for table in ("labels", "steps", "completions"):
        by = "'completion'" if table == "completions" else "source"
        for round, source, items, priced, dollars, timed, seconds in store.database.rows(
            f"SELECT round, {by}, COUNT(*), COUNT(cost), SUM(cost), COUNT(seconds), SUM(seconds)"
            f" FROM {table} GROUP BY 1, 2 ORDER BY 1, 2"
        ):
            kind = KINDS[source]
            hours = None if seconds is None or kind not in TIMED else seconds / HOUR
            of = table if table == "completions" else f"{table} by {source}"
            yield CostItem(round, kind, of, False, items, priced, timed, dollars, hours)
    for round, kind, forecast, unit, purpose, items, amount in store.database.rows(
        "SELECT round, kind, forecast, unit, purpose, COUNT(*), SUM(amount) FROM costs"
        " GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5"
    ):
        named = unit if unit in ("dollars", "hours") else "other"
        yield CostItem(
            **{"round": round, "kind": kind, "forecast": bool(forecast), "items": items},
            of=f"entries for {purpose or 'no stated purpose'}",
            priced=items if unit == "dollars" else 0,
            timed=items if unit == "hours" else 0,
            unit=unit if named == "other" else None,
            **{named: amount},
        )


def cost_table(items: list[CostItem]) -> list[dict[str, Any]]:
    """Of each round and kind, and of all rounds (round None): dollars and hours, forecast and
    actual; None where nothing is recorded.

    The last row is of all kinds: dollars alone, since hours of people and of GPUs do not add up.
    """
    rounds: list[int | None] = [*sorted({item.round for item in items}), None]
    rows = []
    for round in rounds:
        for kind in ("api", "human", "gpu", None):
            some = [
                item for item in items if round in (None, item.round) and kind in (None, item.kind)
            ]
            if not some or (kind is None and round is not None):
                continue
            row: dict[str, Any] = {"round": round, "kind": kind}
            for forecast in (True, False):
                for unit in ("dollars", "hours"):
                    amounts = [getattr(item, unit) for item in some if item.forecast == forecast]
                    known = [amount for amount in amounts if amount is not None]
                    name = f"{'forecast' if forecast else 'actual'}_{unit}"
                    adds_up = kind is not None or unit == "dollars"
                    row[name] = math.fsum(known) if known and adds_up else None
            rows.append(row)
    return rows


def twice_counted(items: list[CostItem]) -> list[str]:
    """Rounds in which actual entries of the ledger may repeat what labels or completions hold."""
    notes = []
    for unit in ("dollars", "hours"):
        spent = [item for item in items if not item.forecast and getattr(item, unit)]
        own = {(item.round, item.kind) for item in spent if not item.of.startswith("entries")}
        notes += [
            f"round {item.round}: {getattr(item, unit):,.2f} {unit} of {item.of} are added to what "
            f"labels or completions ({item.kind}) hold themselves: check that they are not the same"
            for item in spent
            if item.of.startswith("entries") and (item.round, item.kind) in own
        ]
    return notes


def label_times(store: PreferenceStore) -> list[dict[str, Any]]:
    """Of each source of labels: how many, and mean seconds and dollars of those that have them."""
    rows = store.database.rows(
        "SELECT source, COUNT(*), COUNT(seconds), AVG(seconds), COUNT(cost), AVG(cost) FROM labels"
        " GROUP BY source ORDER BY source"
    )
    names = ("source", "labels", "timed", "seconds_per_label", "priced", "dollars_per_label")
    return [dict(zip(names, row, strict=True)) for row in rows]


def describe_costs(store: PreferenceStore, training: Sequence[CostItem] = ()) -> dict[str, Any]:
    """The table, what it is the sum of, and labels' times, ready for JSON.

    `training` is what the steps of a run took, which its store does not hold.
    """
    items = [*cost_items(store), *training]
    return {
        "table": cost_table(items),
        "counted": [asdict(item) for item in items],
        "labels": label_times(store),
        "notes": twice_counted(items),
    }
