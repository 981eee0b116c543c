"""`keel prefs costs`: what a store or a run cost, and entries of the ledger by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

from keel.cli.output import print_result
from keel.preferences.costs import cost_lines, describe_costs, step_costs
from keel.preferences.store.records import CostRecord
from keel.preferences.store.store import PreferenceStore
from keel.runs.reader import load
from keel.types import KeelError

ENTRY = ("kind", "amount", "unit", "purpose", "round", "forecast")


def run(arguments: argparse.Namespace) -> None:
    """Print the costs of a store or of a run."""
    given = [name for name in ENTRY if getattr(arguments, name) not in (None, False)]
    if given and arguments.add is None:
        raise KeelError(f"--{given[0]} is of an entry that is added: give --add ID too")
    path, training = Path(arguments.store), []
    if path.is_dir():
        run = load(path)
        path, training = run.folder.preferences, list(step_costs(run, arguments.gpu_price))
        if not path.exists():
            raise KeelError(f"{run.folder.path}: no people label in this run, so it has no ledger")
    elif arguments.gpu_price is not None:
        raise KeelError("--gpu-price is of a run's steps: give a run folder instead of a store")
    with PreferenceStore(path) as store:
        added = None
        if arguments.add is not None:
            added = store.add([_entry(arguments)])["costs"]
        result = {"store": str(path), "added": added, **describe_costs(store, training)}
    lines = [str(path)]
    if added is not None:
        lines.append("added 1 entry" if added else "this entry is there already")
    if not result["counted"]:
        lines.append("nothing is recorded: labels and completions may have a cost, or --add one")
    else:
        lines += cost_lines(result)
    print_result(arguments, result, lines)


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
