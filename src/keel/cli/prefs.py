"""`keel prefs import`, `export` and `stats`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keel.cli.output import print_result
from keel.platform.sqlite import is_database
from keel.preferences.store.exports import Selection, preference_rows, steps_rows, write_rows
from keel.preferences.store.formats import Attribution
from keel.preferences.store.imports import DEFAULTS, import_file, write_left_out
from keel.preferences.store.statistics import describe, statistics_lines
from keel.preferences.store.store import PreferenceStore
from keel.runs.quarantine import counted
from keel.types import KeelError


def run(arguments: argparse.Namespace) -> None:
    """The action that the command line names."""
    {"import": _import, "export": _export, "stats": _stats}[arguments.action](arguments)


def _import(arguments: argparse.Namespace) -> None:
    """Add a file to the store, and list what was left out."""
    kind, path = arguments.kind, Path(arguments.path)
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
        report = import_file(store, kind, path, by)
    listed = write_left_out(Path(arguments.store), path, report)
    result = {
        "store": arguments.store,
        "rows": report.rows,
        "left_out": len(report.left_out),
        "quarantine": None if listed is None else str(listed),
        "added": report.added,
        "repeated": report.repeated,
    }
    new = ", ".join(f"{count} {table}" for table, count in report.added.items())
    lines = [f"{arguments.store}: {report.rows} rows read; new: {new}"]
    if report.repeated:
        lines.append(f"there already, or twice in the file: {report.repeated} labels")
    if listed is not None:
        lines.append(f"left out: {counted(report.left_out)}, listed in {listed}")
    print_result(arguments, result, lines)


def _export(arguments: argparse.Namespace) -> None:
    """Write the labels that the options select."""
    out = new_file(arguments.out)
    selection = Selection(
        arguments.source or None, arguments.round or None, arguments.annotator or None
    )
    rows = steps_rows if arguments.steps else preference_rows
    with PreferenceStore(Path(arguments.store)) as store, write_errors(out):
        count = write_rows(out, rows(store, selection))
    print_result(arguments, {"out": str(out), "rows": count}, [f"{out}: {count} rows"])


def _stats(arguments: argparse.Namespace) -> None:
    """What each store, or file of rows, holds."""
    results = [_described(Path(path)) for path in arguments.files]
    lines: list[str] = []
    for result in results:
        lines += [""] * bool(lines) + [result["file"]]
        if "rows" in result:
            lines.append(f"  {'rows':<18}{result['rows']:>8}   {result['repeated']} repeated")
        lines += statistics_lines(result)
    print_result(arguments, results, lines)


def _described(path: Path) -> dict[str, Any]:
    """The statistics of a store; of a file of rows, those of a store that it alone is in."""
    if is_database(path):
        with PreferenceStore(path) as store:
            return {"file": str(path), **describe(store)}
    if path.is_dir() or path.suffix == ".json":
        raise KeelError(f"{path}: not rows, one a line: run keel prefs import into a store first")
    with PreferenceStore(None) as store:
        report = import_file(store, "trl", path, Attribution(keep_empty=True), "stop")
        counts = {"rows": report.rows, "repeated": report.repeated}
        return {"file": str(path), **counts, **describe(store)}


def new_file(name: str) -> Path:
    """A file to write. Raises KeelError if it is there, or its folder is not."""
    out = Path(name)
    if out.exists():
        raise KeelError(f"{out}: is there already: give another --out, or move it away")
    if not out.parent.is_dir():
        raise KeelError(f"{out}: there is no folder {str(out.parent)!r}: make it, or fix --out")
    return out


@contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Names the command's fix if a file cannot be written, not a run's."""
    try:
        yield
    except KeelError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise KeelError(
            f"cannot write {out}: {cause.strerror or cause}: give another --out"
        ) from error
