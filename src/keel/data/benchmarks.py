"""Benchmarks as tasks: rows from the hub or a file in its layout, with worked examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from keel.config.benchmarks import Benchmark, Shots, benchmarks
from keel.config.sources import ENDINGS, TaskSource
from keel.data.splits import take_options
from keel.data.tables import Row, SourceRow, Table, read_table
from keel.data.tasks import DataTask, Presentation
from keel.types import KeelError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class BenchmarkTask(DataTask):
    """A benchmark's rows; `protocol` says in words how they are asked."""

    correctness = False
    protocol: str


def benchmark_task(source: TaskSource, *, chat: bool = True, whole: bool = False) -> BenchmarkTask:
    """The benchmark that a source names, asked in turns, or (not `chat`, or `raw`) as a text to go
    on from.

    `whole`: for evaluation alone, so that all its rows are validation prompts; else the train and
    the test split of the hub. A `path` is a file in the hub's layout, or a data set's name.
    Raises KeelError for whatever is wrong with the source, and without `whole` if there is no train
    split.
    """
    entry = benchmarks()[source.name]
    take_options(_options, source.options, f"task {source.name!r}")
    chat = chat and not source.raw
    prompt = entry.prompt if chat else "{shots}" + entry.completion
    chosen = source.model_copy(
        update={
            "prompt": prompt if source.prompt == "{prompt}" else source.prompt,
            "answer": source.answer or entry.answer,
        }
    )
    tables = _tables(entry, source, whole)
    shots = [] if chat or entry.shots is None else _shots(entry, entry.shots, source)
    made = [None if table is None else _prepared(entry, table, shots) for table in tables]
    assert made[0] is not None
    task = BenchmarkTask(source.name, chosen, made[0], made[1])
    if whole and made[1] is None:
        task.validate_on_all()
    form = "the chat template" if chat else "a text to go on from"
    wanted = entry.shots.count if entry.shots else 0
    count = min(len(shots), source.options.get("shots", wanted))
    task.protocol = f"{form}, {count or 'no'} worked example{'s' * (count != 1)}"
    return task


def _options(*, shots: int = 0, shots_path: str = "") -> None:
    """The options of a benchmark: how many worked examples, and the file that they are in."""


def _tables(entry: Benchmark, source: TaskSource, whole: bool) -> tuple[Table, Table | None]:
    """The train and the validation table, or the only one."""
    if source.path is not None:
        held = source.validation_path
        return _table(entry, source.path), None if held is None else _table(entry, held)
    if whole:
        return _table(entry, None, entry.test), None
    if entry.train is None:
        raise KeelError(
            f"task {source.name!r} has a test split only: evaluate on it, or name a file to train "
            "on by task.path"
        )
    return _table(entry, None, entry.train), _table(entry, None, entry.test)


def _table(entry: Benchmark, path: str | None, split: str = "") -> Table:
    """A file, another data set, or a split on the hub."""
    kind = next((kind for end, kind in ENDINGS.items() if path and path.endswith(end)), "datasets")
    if kind != "datasets":
        return read_table(kind, str(path), {}, "train", "quarantine")
    try:
        return read_table(
            kind, path or entry.path, entry.options, split or entry.test, "quarantine"
        )
    except KeelError as error:
        raise KeelError(f"{error}; a file in its layout is read by path=FILE.jsonl") from error


def _shots(entry: Benchmark, shots: Shots, source: TaskSource) -> list[Row]:
    """The rows of the worked examples; none of a file's benchmark whose examples are not given."""
    count, path = source.options.get("shots", shots.count), source.options.get("shots_path")
    if count == 0 or (path is None and source.path is not None):
        return []
    rows = [_with_letter(entry, row) for row in _table(entry, path, shots.split).rows]
    found: list[Row] = []
    for group in dict.fromkeys(row.get(shots.by or "") for row in rows):
        found += [row for row in rows if row.get(shots.by or "") == group][:count]
    return found


def _prepared(entry: Benchmark, table: Table, shots: Sequence[Row]) -> Table:
    """The rows with the columns `shots` and, if the answer is an option's index, `letter`."""
    asked = Presentation(entry.completion)
    said = Presentation(entry.shots.text if entry.shots else "")
    by = entry.shots.by if entry.shots else None
    texts = [(row.get(by or ""), _text(asked, row) + _text(said, row)) for row in shots]

    def prepared(row: SourceRow) -> SourceRow:
        values = _with_letter(entry, row)
        own = "".join(text for group, text in texts if by is None or group == values.get(by))
        return replace(row, values={**values, "shots": own})

    return replace(table, rows=[prepared(row) for row in table.rows])


def _text(presentation: Presentation, row: Row) -> str:
    return str(presentation.body(row, "a worked example"))


def _with_letter(entry: Benchmark, row: SourceRow) -> Mapping[str, Any]:
    index = row.values.get(entry.letters or "")
    if not isinstance(index, int) or not 0 <= index < len(LETTERS):
        return row.values
    return {**row.values, "letter": LETTERS[index]}
