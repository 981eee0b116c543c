"""Stored rows as a task: JSONL, Parquet, a `datasets` name, or rows from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.fields import unknown
from keel.config.sources import TaskSource
from keel.data.columns import gold_entries, read_gold, read_tools, reading
from keel.data.splits import Placed, position, read_splits, source_tables
from keel.data.tables import (
    Row,
    SourceRow,
    Table,
    all_bad,
    encodable,
    refuse_bad,
)
from keel.data.tasks.base import BaseTask, Presentation, prompt_id
from keel.graders.formats import same_text
from keel.graders.stated import answer_part
from keel.runs.quarantine import LeftOut, Why
from keel.types import Completion, Content, KeelError, Prompt, Split, Tools, one_line


@dataclass(frozen=True, slots=True)
class StoredExample:
    """One row, ready: where it stands, its prompt and its tools."""

    row: SourceRow
    body: Content
    tools: Tools = ()


class DataTask(BaseTask):
    """Rows on two splits.

    `sources` names the file of each. `left_out` are the rows that are in neither split: bad ones,
    and train rows whose prompt is also in the validation split (`overlap` counts these). If an
    answer column is set, the reward is exact match with its text, or with any entry of its list,
    ignoring blanks at the ends.
    """

    correctness = True

    def __init__(
        self, name: str, source: TaskSource, train: Table, validation: Table | None = None
    ) -> None:
        self.name = name
        self.presentation = Presentation(source.prompt, source.system)
        self.answer = source.answer
        found = read_splits(source, (train, validation), self._placed, name, "tasks")
        self.splits: Mapping[Split, Sequence[StoredExample]]
        self.splits = {"train": found.train, "validation": found.validation}
        self.sources: Mapping[Split, str]
        self.sources = {"train": train.source, "validation": (validation or train).source}
        self.left_out, self.overlap = found.left_out, found.overlap

    def _placed(self, row: SourceRow, held: bool) -> Placed[StoredExample]:
        if self.answer is not None:
            _check_answer(row.values, self.answer, row.place)
        body = self.presentation.body(row.values, row.place)
        self.presentation.frame(body, row.place)
        with reading("tools", row.place):
            tools = read_tools(row.values.get("tools"))
        at = position(body)
        return Placed(StoredExample(row, body, tools), row, at, at)

    def validate_on_all(self) -> None:
        """Put every row into both splits, in the order of the file: nothing is trained."""
        rows = [entry for split in self.splits.values() for entry in split]
        every = sorted(rows, key=lambda entry: entry.row.number)
        self.splits = {"train": every, "validation": every}

    def size(self, split: Split) -> int:
        """How many rows the split has."""
        return len(self.splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        """The row at an index; its id holds the row's number in its file."""
        entry = self.splits[split][index]
        columns = dict(entry.row.values)
        if self.answer is not None:
            columns["answer"] = read_gold(_gold(entry.row.values, self.answer))
        content = self.presentation.frame(entry.body, self.name)
        id = prompt_id(self.name, split, entry.row.number)
        return Prompt(id, content, columns, self.name, tools=entry.tools)

    def refused(
        self, wrong: Callable[[Prompt], tuple[str, Why] | None], forgiven: bool
    ) -> list[LeftOut]:
        """The rows whose prompts will not do; `wrong` says of a prompt what is wrong with it.

        Raises KeelError for bad ones unless they are forgiven, and if no train prompt is left.
        """
        found: list[LeftOut] = []
        for split, entries in self.splits.items():
            before = len(found)
            for index, entry in enumerate(entries):
                if (problem := wrong(self.prompt(split, index))) is not None:
                    found.append(entry.row.left_out(*problem))
            bad = [row for row in found[before:] if row.why == "bad"]
            if not forgiven:
                refuse_bad(bad, "tasks")
            if split == "train" and bad and len(found) == len(entries):
                raise all_bad(self.sources[split], bad)
        return found

    def gold(self, prompt: Prompt) -> str | None:
        """The text of the answer column, of a list its first entry."""
        golds = gold_entries(prompt.columns["answer"]) if self.answer is not None else []
        return str(golds[0]) if golds else None

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """1 for a gold answer and nothing but it, else 0."""
        if self.answer is None:
            return None
        stated = answer_part(completion.text, prompt.opening)
        golds = gold_entries(prompt.columns["answer"])
        return float(stated is not None and any(same_text(stated, str(gold)) for gold in golds))


def data_task(source: TaskSource) -> DataTask:
    """The task of a file or `datasets` name. Raises KeelError, naming file and line."""
    tables = source_tables(source, f"task {source.name!r}: task.path is not set")
    return DataTask(f"{source.name}:{Path(str(source.path)).stem}", source, *tables)


def _gold(row: Row, answer: str) -> Any:
    """The value of the answer column, or of a key of its table or tables: `answers.text`."""
    column, _, key = answer.partition(".")
    inner = row.get(column)
    if answer in row or not key:
        return row.get(answer)
    if isinstance(inner, list | tuple):
        found = [_gold(one, key) for one in inner if isinstance(one, Mapping)]
        return [gold for one in found for gold in (one if isinstance(one, list) else [one])]
    return _gold(inner, key) if isinstance(inner, Mapping) else None


def _check_answer(row: Row, answer: str, place: str) -> None:
    column = f"{place}: the answer column {answer!r}"
    value = _gold(row, answer)
    table = value[0] if isinstance(value, list) and value else value
    if isinstance(table, Mapping):
        key = next((str(k) for k, v in table.items() if isinstance(v, str | list)), "KEY")
        keys = ", ".join(map(str, table))[:80]
        raise KeelError(f"{column} is a table of {keys}: name a key: answer = '{answer}.{key}'")
    try:
        golds = gold_entries(read_gold(value))
        texts = [str(gold) for gold in golds]
    except Exception as error:  # also of a value's own class, or of too many digits
        message = one_line(error)[:300]
        raise KeelError(f"{column} is not a text or a list of texts: {message}") from None
    if not golds:
        raise KeelError(_no_answer(place, answer, row))
    pairs = zip(golds, texts, strict=True)
    if not all((text or isinstance(gold, str)) and encodable(text) for gold, text in pairs):
        raise KeelError(f"{column} is not a text: leave the row out")


def _no_answer(place: str, name: str, columns: Row) -> str:
    column, _, key = name.partition(".")
    while key and isinstance(columns.get(column), Mapping):
        columns = columns[column]
        column, _, key = key.partition(".")
    if name in columns or column in columns:
        return f"{place}: the answer column {name!r} is empty: leave the row out"
    return f"{place}: {unknown('answer column', column, columns)}"
