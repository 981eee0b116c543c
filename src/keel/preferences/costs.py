"""What a store's labels, steps, completions and ledger entries cost, each counted once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from keel.config.repeat import round_of
from keel.preferences.records import CostKind, Source
from keel.preferences.store import PreferenceStore
from keel.runs.reader import Run

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
