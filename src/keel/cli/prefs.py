"""`keel prefs`: what is done with a preference store, but for synthesis."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from keel.cli.main import print_result
from keel.platform.files import write_bytes
from keel.platform.sqlite import is_database
from keel.preferences.agreement import audit_judges, audit_lines, shown
from keel.preferences.annotation import (
    AnnotationProject,
    AnnotationSettings,
    add_gold,
    read_rubric,
)
from keel.preferences.files import (
    DEFAULTS,
    Attribution,
    Selection,
    import_file,
    preference_rows,
    steps_rows,
    write_left_out,
    write_rows,
)
from keel.preferences.pages import serve_annotation
from keel.preferences.records import CostRecord
from keel.preferences.statistics import describe, statistics_lines
from keel.preferences.store import PreferenceStore
from keel.runs.rows import counted
from keel.runs.values import record_line
from keel.types import KeelError

SHOWN = 20
"""Chosen pairs that are printed."""
ENTRY = ("kind", "amount", "unit", "purpose", "round", "forecast")
"""Options of an entry that is added to the ledger."""


def run_prefs_import(arguments: argparse.Namespace) -> None:
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


def run_prefs_export(arguments: argparse.Namespace) -> None:
    """Write the labels that the options select."""
    out = _new_file(arguments.out)
    selection = Selection(
        arguments.source or None, arguments.round or None, arguments.annotator or None
    )
    rows = steps_rows if arguments.steps else preference_rows
    with PreferenceStore(Path(arguments.store)) as store, _write_errors(out):
        count = write_rows(out, rows(store, selection))
    print_result(arguments, {"out": str(out), "rows": count}, [f"{out}: {count} rows"])


def run_prefs_stats(arguments: argparse.Namespace) -> None:
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


def run_prefs_select(arguments: argparse.Namespace) -> None:
    """Choose, set priorities, and print what was chosen and how far it can be relied on."""
    from keel.preferences.pool import Features, SelectionPlan, select_batch

    if arguments.stage is not None and arguments.model is None:
        raise KeelError("--stage has no effect without a model: give --model RUN")
    if arguments.model is not None and arguments.by == "random":
        raise KeelError("--model has no effect with --by random: drop one of the two")
    if arguments.model is None and arguments.by not in (None, "random"):
        raise KeelError(
            f"--by {arguments.by} goes by the features of a reward model: give --model RUN|FOLDER"
        )
    out = None if arguments.out is None else _new_file(arguments.out)
    plan = SelectionPlan(
        arguments.by or ("random" if arguments.model is None else "d_optimal"),
        arguments.count,
        arguments.round,
        arguments.source or None,
        arguments.pool,
        arguments.seed,
    )
    features: Features | None = None
    if arguments.model is not None:
        from keel.preferences.labeller import text_features

        features = partial(text_features, arguments.model, stage=arguments.stage)
    with PreferenceStore(Path(arguments.store)) as store:
        batch = select_batch(store, plan, features)
    if out is not None:
        with _write_errors(out):
            write_bytes(out, b"".join(record_line(row, {}) for row in batch.rows))
    result = {"store": arguments.store, **batch.as_dict(), "out": arguments.out}
    print_result(arguments, result, _select_lines(result))


def _select_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['store']}: {result['labelled']:,} labelled pairs to learn from, "
        f"{result['unlabelled']:,} without a person's label to choose from"
    ]
    if result["left_out_long"]:
        lines.append(f"left out: {result['left_out_long']} pairs longer than the model's context")
    if (found := result["held_out"]) is not None:
        pairs = found["pairs"]
        accuracy, gain = shown(pairs["accuracy"], 0, 100), shown(found["gain"], 4)
        lines.append(
            f"on {found['n']:,} held-out labelled pairs: accuracy {accuracy} %, calibration error "
            f"{100 * pairs['ece']:.1f} %, log loss {pairs['log_loss']:.3f} (ln 2 = 0.693: no "
            f"knowledge), gain of the variance {gain}"
        )
    lines.append(f"by {result['by']}")
    lines += [f"hint: {hint}" for hint in result["hints"]]
    chosen = result["chosen"]
    lines.append(f"{'pair':<34}{'score':>9}{'p(first)':>10}{'s.d.':>8}")
    for row in chosen[:SHOWN]:
        figures = "".join(
            f"{row[name]:>{width}.{digits}f}" if name in row else f"{'–':>{width}}"
            for name, width, digits in (
                ("score", 9, 4),
                ("probability", 10, 3),
                ("deviation", 8, 2),
            )
        )
        lines.append(f"{row['pair']:<34}{figures}")
    if len(chosen) > SHOWN:
        lines.append(f"… and {len(chosen) - SHOWN:,} more (--out FILE, --json)")
    lines.append(f"{len(chosen):,} pairs are first in people's queue, in this order")
    if result["out"] is not None:
        lines.append(f"{result['out']}: {len(chosen):,} rows")
    return lines


def run_prefs_costs(arguments: argparse.Namespace) -> None:
    """Print the costs of a store or of a run."""
    from keel.preferences.statistics import cost_lines, describe_costs, step_costs
    from keel.runs.reader import load

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


def run_prefs_annotate(arguments: argparse.Namespace) -> None:
    """Serve the pages on which people label pairs, until interrupted."""
    rubric = None if arguments.rubric is None else read_rubric(Path(arguments.rubric))
    settings = AnnotationSettings(
        overlap=arguments.overlap,
        round=arguments.round,
        seed=arguments.seed,
        gold_rate=arguments.gold_rate,
        wage=arguments.wage,
        rubric=rubric,
    )
    with PreferenceStore(Path(arguments.store)) as store:
        if arguments.gold is not None:
            add_gold(store, Path(arguments.gold), arguments.round or 0)
        if next(store.pairs(arguments.round), None) is None:
            where = "" if arguments.round is None else f" in round {arguments.round}"
            raise KeelError(
                f"preference store {arguments.store}: there is no pair{where}: import some "
                "(keel prefs import), or name another --round"
            )
        serve_annotation(
            AnnotationProject(store, settings),
            host=arguments.host,
            port=arguments.port,
            browser=not arguments.no_browser,
        )


def _new_file(name: str) -> Path:
    """A file to write. Raises KeelError if it is there, or its folder is not."""
    out = Path(name)
    if out.exists():
        raise KeelError(f"{out}: is there already: give another --out, or move it away")
    if not out.parent.is_dir():
        raise KeelError(f"{out}: there is no folder {str(out.parent)!r}: make it, or fix --out")
    return out


@contextmanager
def _write_errors(out: Path) -> Iterator[None]:
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


def run_prefs_audit(arguments: argparse.Namespace) -> None:
    """How judges compared pairs."""
    with PreferenceStore(Path(arguments.store)) as store:
        found = audit_judges(store)
    result = {"store": arguments.store, "judges": found}
    print_result(arguments, result, [arguments.store, *audit_lines(found)])
