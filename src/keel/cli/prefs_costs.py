"""`keel prefs costs`: the ledger of a store, entries by hand, and what a plan would cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keel.config.repeat import round_of
from keel.preferences.cost_plan import (
    CostPlan,
    PartCost,
    number,
    plan_costs,
    read_plan,
    shipped_plan,
)
from keel.preferences.store.ledger import CostItem, describe_costs
from keel.preferences.store.records import CostRecord
from keel.preferences.store.store import PreferenceStore
from keel.runs.reader import Run, load
from keel.types import KeelError

ENTRY = ("kind", "amount", "unit", "purpose", "round", "forecast")


def run(arguments: argparse.Namespace) -> None:
    """Print the costs of a store or of a plan."""
    if (arguments.store is None) == (arguments.scenario is None):
        raise KeelError("give either a STORE, or --scenario for a plan: one of the two")
    given = [name for name in ENTRY if getattr(arguments, name) not in (None, False)]
    if given and arguments.add is None:
        raise KeelError(f"--{given[0]} is of an entry that is added: give --add ID too")
    if arguments.scenario is not None:
        if arguments.add is not None:
            raise KeelError("--add is of a store's ledger, which a plan has not: give STORE")
        _plan(arguments)
        return
    path, training = Path(arguments.store), []
    if path.is_dir():
        run = load(path)
        path, training = run.folder.preferences, list(_training(run, arguments.gpu_price))
        if not path.exists():
            raise KeelError(f"{run.folder.path}: no people label in this run, so it has no ledger")
    elif arguments.gpu_price is not None:
        raise KeelError("--gpu-price is of a run's steps: give a run folder instead of a store")
    with PreferenceStore(path) as store:
        added = None if arguments.add is None else store.add_costs([_entry(arguments)])
        result = {"store": str(path), "added": added, **describe_costs(store, training)}
    print(json.dumps(result, ensure_ascii=False) if arguments.json else "\n".join(_lines(result)))


def _training(run: Run, price: float | None) -> Iterator[CostItem]:
    """The hours of each stage's steps; its round is the number that `repeat` has added to its name.

    At a price (dollars an hour) they are dollars too.
    """
    for stage in run.stages:
        steps = run.timings(stage)
        hours = run.seconds(stage) / 3600
        round = round_of(stage)
        dollars = None if price is None else price * hours
        what = f"steps of {stage}"
        priced = len(steps) if price is not None else 0
        yield CostItem(round, "gpu", what, False, len(steps), priced, len(steps), dollars, hours)


def _entry(arguments: argparse.Namespace) -> CostRecord:
    for name in ("kind", "amount"):
        if getattr(arguments, name) is None:
            raise KeelError(f"--add {arguments.add}: give --{name} too")
    return CostRecord(
        arguments.add,
        arguments.kind,
        arguments.amount,
        arguments.unit or "dollars",
        arguments.purpose or "",
        arguments.round or 0,
        arguments.forecast,
    )


def _lines(result: Mapping[str, Any]) -> list[str]:
    lines = [result["store"]]
    if result["added"] is not None:
        lines.append("added 1 entry" if result["added"] else "this entry is there already")
    if not result["counted"]:
        return [*lines, "nothing is recorded: labels and completions may have a cost, or --add one"]
    titles = ("forecast $", "actual $", "forecast h", "actual h")
    lines.append(f"{'round':>5}  {'kind':<6}" + "".join(f"{title:>13}" for title in titles))
    for row in result["table"]:
        cells = [
            _cell(row[f"{when}_{unit}"], 2 if unit == "dollars" else 3)
            for unit in ("dollars", "hours")
            for when in ("forecast", "actual")
        ]
        round = "all" if row["round"] is None else row["round"]
        lines.append(f"{round:>5}  {row['kind'] or 'all':<6}" + "".join(f"{c:>13}" for c in cells))
    lines.append("counted:")
    lines += [f"  {_counted(item)}" for item in result["counted"]]
    for one in result["labels"]:
        if one["seconds_per_label"] is not None:
            lines.append(
                f"a label by {one['source']}: {one['seconds_per_label']:.1f} s "
                f"(mean of {one['timed']:,} of {one['labels']:,})"
            )
    return [*lines, *(f"note: {note}" for note in result["notes"])]


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _counted(item: Mapping[str, Any]) -> str:
    """Where an amount is from."""
    amounts = [
        *([] if item["dollars"] is None else [f"${item['dollars']:,.2f}"]),
        *([] if item["hours"] is None else [f"{item['hours']:,.3f} h"]),
        *(
            []
            if item["other"] is None
            else [f"{number(item['other'])} {item['unit']}, in no column"]
        ),
    ]
    when = "forecast" if item["forecast"] else "actual"
    known = ", ".join(amounts) or "no cost recorded"
    what = f"round {item['round']}, {item['kind']}, {when}: {known}"
    if item["of"].startswith("entries"):
        return f"{what}, {item['of']}"
    return (
        f"{what}, {item['items']:,} {item['of']} "
        f"({item['priced']:,} with a cost, {item['timed']:,} with seconds)"
    )


# ---------------------------------------------------------------- a plan


def _plan(arguments: argparse.Namespace) -> None:
    path = Path(arguments.scenario) if arguments.scenario else shipped_plan()
    plan = read_plan(path)
    costs = list(plan_costs(plan))
    if arguments.json:
        print(json.dumps(_plan_result(path, plan, costs), ensure_ascii=False))
        return
    print(f"prices assumed for {plan.date} (change them in a copy of {path})")
    for name, price in plan.prices.items():
        print(f"  {name:<14} {number(price.value)} {price.unit}: {price.note}")
    for cost in costs:
        print(f"\n{cost.part.name}")
        for name, lines in cost.items:
            print("\n".join([f"  {name}", *(f"    {line}" for line in lines)]))
        if len(cost.items) > 1:
            print(f"  {cost.total}")
        verdict = "within" if cost.within else "outside"
        low, high = number(cost.part.low), number(cost.part.high)
        print(f"  ${cost.total.value:,.2f} is {verdict} the planned ${low} to ${high}")


def _plan_result(path: Path, plan: CostPlan, costs: list[PartCost]) -> dict[str, Any]:
    return {
        "plan": str(path),
        "date": plan.date,
        "prices": {name: price.model_dump() for name, price in plan.prices.items()},
        "parts": [
            {
                "name": cost.part.name,
                "low": cost.part.low,
                "high": cost.part.high,
                "within": cost.within,
                "dollars": cost.total.value,
                "items": [
                    {"name": name, "lines": [line.as_dict() for line in lines]}
                    for name, lines in cost.items
                ],
            }
            for cost in costs
        ],
    }
