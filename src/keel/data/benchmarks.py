"""Benchmarks as tasks: rows from the hub or a file in its layout, with worked examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keel.config.benchmarks import Benchmark, benchmarks
from keel.config.sources import ENDINGS, TaskSource
from keel.data.splits import take_options
from keel.data.tables import Row, SourceRow, Table, read_table
from keel.data.tasks import DataTask, Presentation, names_of
from keel.runs.rows import LeftOut
from keel.types import KeelError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHOTS, LETTER = "shots", "letter"
"""Columns that are made: the worked examples before a row, and the letter of its answer."""


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
    own = source.prompt != TaskSource.model_fields["prompt"].default
    prompt = source.prompt if own else entry.prompt if chat else "{shots}" + entry.completion
    chosen = source.model_copy(update={"prompt": prompt, "answer": source.answer or entry.answer})
    tables = _tables(entry, source, whole)
    shown = SHOTS in names_of(prompt)
    examples = _examples(entry, source, shown)
    answer = entry.letters if chosen.answer == LETTER else chosen.answer
    by = entry.shots.by if entry.shots and examples else None
    for table in filter(None, tables):
        _check_columns(entry, table, [*names_of(prompt), answer, by])
    texts = _texts(entry, examples) if shown else None
    made = [None if table is None else _prepared(entry, table, texts) for table in tables]
    assert made[0] is not None
    task = BenchmarkTask(source.name, chosen, made[0], made[1])
    if whole and made[1] is None:
        task.validate_on_all()
    form = "the chat template" if chat else "a text to go on from"
    form += ", a prompt of your own" if own else ""
    form += ", with a system message" if source.system else ""
    task.protocol = f"{form}, {_counted(entry, made[-1] or made[0], examples)}"
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
        raise KeelError(
            f"{error}; task.path (of keel eval: --set path=FILE) reads a file in the hub's layout"
        ) from error


def _check_columns(entry: Benchmark, table: Table, wanted: Iterable[str | None]) -> None:
    """Raise KeelError if no row has a column of one of these names."""
    there = dict.fromkeys(name for row in table.rows for name in row.values)
    known = {*there, SHOTS, LETTER}
    names = dict.fromkeys(name for name in wanted if name)
    missing = [name for name in names if name.partition(".")[0] not in known]
    if missing:
        raise KeelError(
            f"{table.source} has no column {', '.join(missing)} (but {', '.join(there)}): task "
            f"{entry.name!r} needs the layout of {entry.path} on the hub: rename the columns, or "
            "set task.prompt and task.answer"
        )


# ---------------------------------------------------------------- worked examples


def _examples(entry: Benchmark, source: TaskSource, shown: bool) -> dict[Any, list[Row]]:
    """The rows of the worked examples by their group; none of a file's benchmark whose examples are
    not given, and of one whose prompt shows none. Raises KeelError for options without effect."""
    where, shots = f"task {source.name!r}", entry.shots
    count, path = source.options.get("shots"), source.options.get("shots_path")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise KeelError(f"{where}: options.shots = {count!r}: give a whole number, 0 for none")
    asked = count or path
    if asked and shots is None:
        raise KeelError(f"{where} has no worked examples: drop options.shots and shots_path")
    if asked and not shown:
        raise KeelError(
            f"{where}: worked examples come before a text to go on from, and this prompt shows "
            "none: set task.raw = true, or put {shots} into task.prompt"
        )
    if shots is None or not shown or count == 0:
        return {}
    if path is None and source.path is not None:
        if count:
            raise KeelError(f"{where}: options.shots = {count}: name their file by shots_path")
        return {}
    table = _table(entry, path, shots.split)
    shown_in = names_of(entry.completion + shots.text)
    columns = [entry.letters if name == LETTER else name for name in shown_in]
    _check_columns(entry, table, [*columns, shots.by])
    rows = [_with_letter(entry, row) for row in table.rows]
    groups = list(dict.fromkeys(row.get(shots.by or "") for row in rows))
    found = {g: [row for row in rows if row.get(shots.by or "") == g] for g in groups}
    least = min(map(len, found.values()))
    if count is not None and count > least:
        raise KeelError(f"{where}: options.shots = {count}, but there are {least} examples")
    return {group: some[: shots.count if count is None else count] for group, some in found.items()}


def _texts(entry: Benchmark, examples: Mapping[Any, Sequence[Row]]) -> dict[Any, str]:
    """The worked examples of each group as a text."""
    asked = Presentation(entry.completion)
    said = Presentation(entry.shots.text if entry.shots else "")
    return {
        group: "".join(_text(asked, row) + _text(said, row) for row in rows)
        for group, rows in examples.items()
    }


def _prepared(entry: Benchmark, table: Table, texts: Mapping[Any, str] | None) -> Table:
    """The rows with the columns `shots`, if there are texts for it, and `letter`, if the answer is
    an option's index."""
    rows: list[SourceRow] = []
    bad: list[LeftOut] = []
    for row in table.rows:
        try:
            values = _with_letter(entry, row)
        except KeelError as error:
            bad.append(row.left_out(str(error)))
            continue
        own = {} if texts is None else {SHOTS: texts.get(_group(entry, row), "")}
        rows.append(replace(row, values={**values, **own}))
    return replace(table, rows=rows, bad=(*table.bad, *bad))


def _group(entry: Benchmark, row: SourceRow) -> Any:
    """What a row shares with its worked examples."""
    return row.values.get(entry.shots.by or "") if entry.shots else None


def _counted(entry: Benchmark, table: Table, examples: Mapping[Any, Sequence[Row]]) -> str:
    """How many worked examples the rows of a table have, in words."""
    counts = {len(examples.get(_group(entry, row), ())) for row in table.rows} or {0}
    least, most = min(counts), max(counts)
    number = str(most or "no") if least == most else f"{least} to {most}"
    return f"{number} worked example{'s' * (most != 1)}"


def _text(presentation: Presentation, row: Row) -> str:
    return str(presentation.body(row, "a worked example"))


def _with_letter(entry: Benchmark, row: SourceRow) -> Mapping[str, Any]:
    """The values of a row, with the letter of its answer if that is the index of a choice."""
    if entry.letters is None or entry.letters not in row.values:
        return row.values
    index = row.values[entry.letters]
    count = len(row.values.get("choices") or LETTERS)
    if not isinstance(index, int) or not 0 <= index < count:
        raise KeelError(
            f"{row.place}: the column {entry.letters!r} holds {index!r}, which is not the index of "
            f"a choice, from 0 to {count - 1}"
        )
    return {**row.values, LETTER: LETTERS[index]}
