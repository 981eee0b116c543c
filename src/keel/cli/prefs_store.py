"""`keel prefs` on a preference store: import into it, export from it, statistics of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keel.preferences.store.exports import Selection, preference_rows, steps_rows, write_rows
from keel.preferences.store.formats import ANNOTATORS, DEFAULTS, Attribution
from keel.preferences.store.imports import import_file as import_into
from keel.preferences.store.imports import write_left_out
from keel.preferences.store.statistics import GROUPS, describe
from keel.preferences.store.store import PreferenceStore
from keel.runs.quarantine import counted
from keel.types import KeelError


def import_file(arguments: argparse.Namespace) -> None:
    """Add a file to the store, and list what was left out."""
    kind, path = arguments.kind, Path(arguments.path)
    if arguments.annotator is not None and kind in ANNOTATORS:
        raise KeelError(f"--annotator: {kind} names its own: leave it out")
    source, annotator = DEFAULTS.get(kind, ("human", ""))
    by = Attribution(
        arguments.source or source,
        annotator if arguments.annotator is None else arguments.annotator,
        arguments.round or 0,
        arguments.keep_empty,
    )
    if not path.exists():
        raise KeelError(f"{path}: there is no such file: fix the path")
    with PreferenceStore(Path(arguments.store), create=True) as store:
        report = import_into(store, kind, path, by)
        listed = write_left_out(store.path, path, report)
    result = {
        "store": arguments.store,
        "rows": report.rows,
        "left_out": len(report.left_out),
        "quarantine": None if listed is None else str(listed),
        "added": report.added,
        "repeated": report.repeated,
    }
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    new = ", ".join(f"{count} {table}" for table, count in report.added.items())
    print(f"{arguments.store}: {report.rows} rows read; new: {new}")
    if report.repeated:
        print(f"there already, or twice in the file: {report.repeated} labels")
    if listed is not None:
        print(f"left out: {counted(report.left_out)}, listed in {listed}")


def export_file(arguments: argparse.Namespace) -> None:
    """Write the labels that the options select."""
    out = new_file(arguments.out)
    selection = Selection(arguments.source, arguments.round, arguments.annotator)
    rows = steps_rows if arguments.steps else preference_rows
    with PreferenceStore(Path(arguments.store)) as store, write_errors(out):
        count = write_rows(out, rows(store, selection))
    if arguments.json:
        print(json.dumps({"out": str(out), "rows": count}, ensure_ascii=False))
    else:
        print(f"{out}: {count} rows")


def described(path: str) -> dict[str, Any]:
    """The statistics of a store."""
    with PreferenceStore(Path(path)) as store:
        return {"file": path, **describe(store)}


def table(result: Mapping[str, Any]) -> list[str]:
    """The statistics for people, a line each."""
    lines = [result["file"]]
    for name in ("prompts", "completions", "pairs", "labels", "steps", "costs"):
        lines.append(f"  {name:<18}{result[name]:>8}")
    for group in GROUPS:
        for row in result["labels_by"][group]:
            who = " ".join(str(row[name]) for name in ("source", group) if name in row)
            name = f"{group} {row[group] or '(no name)'}" if group != "annotator" else who
            lines.append(f"  {name:<26}{row['labels']:>8} labels{_taken(row)}")
    for source, sizes in result["agreement"].items():
        for size in sizes:
            agreed, kappa = size["pairwise"], size["fleiss_kappa"]
            lines.append(
                f"  {source}, {size['judges']} labels a pair: {size['pairs']} pairs, "
                f"{_interval(agreed)} agree, Fleiss' κ {_interval(kappa)}"
            )
    for row in result["ledger"]:
        what = "forecast" if row["forecast"] else "actual"
        lines.append(
            f"  round {row['round']}, {row['kind']}, {what}: {row['amount']:g} {row['unit']}"
        )
    return lines


def _taken(row: Mapping[str, Any]) -> str:
    parts = [f"{row['ties']} ties", f"{row['skips']} skips"]
    if row["seconds_per_label"] is not None:
        parts.append(f"{row['seconds_per_label']:.1f} s a label")
    if row["cost"] is not None:
        parts.append(f"${row['cost']:.4g}")
    return "".join(f", {part}" for part in parts)


def _interval(value: Mapping[str, Any]) -> str:
    found = [value[key] for key in ("value", "low", "high")]
    if found[0] != found[0]:
        return "undefined"
    # Pairs of one prompt, or full agreement, give no interval: its ends are NaN.
    known = all(end == end for end in found[1:])
    return f"{found[0]:.3f}" + (f" [{found[1]:.3f}, {found[2]:.3f}]" if known else "")


def new_file(name: str) -> Path:
    """A file to write. Raises KeelError where it is there, or its folder is not."""
    out = Path(name)
    if out.exists():
        raise KeelError(f"{out}: is there already: give another --out, or move it away")
    if not out.parent.is_dir():
        raise KeelError(f"{out}: there is no folder {str(out.parent)!r}: make it, or fix --out")
    return out


@contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Names the command's fix where a file cannot be written, not a run's."""
    try:
        yield
    except KeelError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise KeelError(
            f"cannot write {out}: {cause.strerror or cause}: give another --out"
        ) from error
