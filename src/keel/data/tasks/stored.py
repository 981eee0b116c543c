"""Stored rows as a task: JSONL, Parquet, a `datasets` name, or rows from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.fields import unknown
from keel.config.sources import TaskSource
from keel.data.gold import gold_entries, read_gold
from keel.data.messages import read_tools, reading
from keel.data.tables import (
    Gathered,
    Row,
    Table,
    Where,
    all_bad,
    encodable,
    list_rows,
    rows_table,
    split_tables,
)
from keel.data.tasks.base import BaseTask, Presentation, position, prompt_id, splits_of
from keel.data.tasks.generated import call_entry
from keel.data.tasks.user import UserTask
from keel.graders.formats import same_text
from keel.graders.stated import answer_part
from keel.runs.quarantine import LeftOut, Why
from keel.types import Completion, Content, KeelError, Prompt, Split, Tools, one_line

KINDS = {
    "jsonl": "a file with one JSON object a line",
    "parquet": "a Parquet file",
    "datasets": "what the `datasets` library loads by name",
}


@dataclass(frozen=True, slots=True)
class StoredExample:
    """One row, ready: its number in its file (from 0), its line (from 1), its prompt and tools."""

    number: int
    line: int
    body: Content
    row: Row
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """One split of a task: its rows, and where they stand."""

    entries: Sequence[StoredExample]
    where: Where


class DataTask(BaseTask):
    """Rows on two splits.

    `left_out` are the rows of its files that are in neither: bad ones, and train rows whose prompt
    is also in the validation split (`overlap` counts these). If an answer column is set, the reward
    is exact match with its text, or with any entry of its list, ignoring blanks at the ends.
    """

    correctness = True

    def __init__(
        self,
        name: str,
        train: Stored,
        validation: Stored,
        source: TaskSource,
        left_out: Sequence[LeftOut],
    ) -> None:
        self.name = name
        self.splits: Mapping[Split, Stored] = {"train": train, "validation": validation}
        self.presentation = Presentation(source.prompt, source.system)
        self.answer = source.answer
        self.left_out = tuple(left_out)

    @property
    def overlap(self) -> int:
        """How many train rows are left out because their prompt is also in the validation split."""
        return sum(row.why == "overlap" for row in self.left_out)

    def validate_on_all(self) -> None:
        """Put every row into both splits, in the order of the file: nothing is trained."""
        rows = [entry for split in self.splits.values() for entry in split.entries]
        every = Stored(sorted(rows, key=lambda row: row.number), self.splits["train"].where)
        self.splits = {"train": every, "validation": every}

    def size(self, split: Split) -> int:
        """How many rows the split has."""
        return len(self.splits[split].entries)

    def prompt(self, split: Split, index: int) -> Prompt:
        """The row at an index; its id holds the row's number in its file."""
        entry = self.splits[split].entries[index]
        columns = dict(entry.row)
        if self.answer is not None:
            columns["answer"] = read_gold(_gold(entry.row, self.answer))
        content = self.presentation.frame(entry.body, self.name)
        id = prompt_id(self.name, split, entry.number)
        return Prompt(id, content, columns, self.name, tools=entry.tools)

    def refused(
        self, wrong: Callable[[Prompt], tuple[str, Why] | None], forgiven: bool
    ) -> list[LeftOut]:
        """The rows whose prompts will not do; `wrong` says of a prompt what is wrong with it.

        Raises KeelError for bad ones unless they are forgiven, and if no train prompt is left.
        """
        found: list[LeftOut] = []
        for split, stored in self.splits.items():
            before = len(found)
            for index, entry in enumerate(stored.entries):
                problem = wrong(self.prompt(split, index))
                if problem is None:
                    continue
                reason = f"{stored.where.place(entry.line)}: {problem[0]}"
                found.append(stored.where.left_out(entry.line, reason, entry.row, problem[1]))
            bad = [row for row in found[before:] if row.why == "bad"]
            Gathered("quarantine" if forgiven else "stop", bad).check("tasks")
            if split == "train" and bad and len(found) == len(stored.entries):
                raise all_bad(stored.where.source, bad)
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
    train, held = split_tables(source, f"task {source.name!r}: task.path is not set")
    name = f"{source.name}:{Path(str(source.path)).stem}"
    if held is None:
        return _split(name, train, source)
    return _two_tables(name, train, held, source)


def entry_task(source: TaskSource, seed: int) -> Any:
    """The task of a Python entry: what the function returns, a Task or rows.

    It is called with the options, and with the recipe's seed if it has a parameter `seed`.
    """
    made = call_entry(source, "task", seed)
    name = source.name.rpartition("/")[2]  # ids of prompts do not depend on the file's folder
    if all(callable(getattr(made, part, None)) for part in ("prompt", "size", "score")):
        return UserTask(name, made)
    try:
        rows = list_rows(made)
    except TypeError:
        raise KeelError(
            f"task {source.name!r} returns a {type(made).__name__}: return a task or rows of dicts"
        ) from None
    return _split(name, rows_table(rows, source.name), source)


def _split(name: str, table: Table, source: TaskSource) -> DataTask:
    """Both splits from one table, by the hash of the prompt; each has at least one prompt."""
    entries, bad = _entries(table, source)
    splits = splits_of([position(entry.body) for entry in entries], source.validation_fraction)
    train = [e for e, split in zip(entries, splits, strict=True) if split == "train"]
    validation = [e for e, split in zip(entries, splits, strict=True) if split == "validation"]
    return DataTask(name, Stored(train, table.where), Stored(validation, table.where), source, bad)


def _two_tables(name: str, train: Table, validation: Table, source: TaskSource) -> DataTask:
    """A table for each split; train prompts that are also in the other are left out."""
    held, bad_held = _entries(validation, source)
    taken = {position(entry.body) for entry in held}
    every, bad = _entries(train, source)
    kept, overlap = [], []
    for entry in every:
        if position(entry.body) in taken:
            reason = f"{train.where.place(entry.line)}: the prompt is also in the validation split"
            overlap.append(train.where.left_out(entry.line, reason, entry.row, "overlap"))
        else:
            kept.append(entry)
    if not kept:
        raise KeelError(
            f"task {name!r}: every train prompt is also in {source.validation_path!r}: "
            "drop validation_path, or give other rows"
        )
    splits = Stored(kept, train.where), Stored(held, validation.where)
    return DataTask(name, *splits, source, [*bad, *overlap, *bad_held])


def _entries(table: Table, source: TaskSource) -> tuple[list[StoredExample], list[LeftOut]]:
    """The table's rows as prompts, and its bad rows, in the order of their lines."""
    presentation = Presentation(source.prompt, source.system)
    entries, bad = [], Gathered(source.bad_rows, table.bad)
    for row, number, line in zip(table.rows, table.numbers, table.lines, strict=True):
        try:
            place = table.where.place(line)
            if source.answer is not None:
                _check_answer(row, source.answer, place)
            body = presentation.body(row, place)
            presentation.frame(body, place)
            with reading("tools", place):
                tools = read_tools(row.get("tools"))
        except KeelError as error:
            bad.rows.append(table.where.left_out(line, str(error), row))
            continue
        entries.append(StoredExample(number, line, body, row, tools))
    every = sorted(bad.rows, key=lambda left: left.line)
    if not entries:
        raise all_bad(table.where.source, every)
    bad.check("tasks")
    return entries, every


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
        raise KeelError(f"{column} is no text, and no list of texts: {message}") from None
    if not golds:
        raise KeelError(_no_answer(place, answer, row))
    pairs = zip(golds, texts, strict=True)
    if not all((text or isinstance(gold, str)) and encodable(text) for gold, text in pairs):
        raise KeelError(f"{column} is no text: leave the row out")


def _no_answer(place: str, name: str, columns: Row) -> str:
    column, _, key = name.partition(".")
    while key and isinstance(columns.get(column), Mapping):
        columns = columns[column]
        column, _, key = key.partition(".")
    if name in columns or column in columns:
        return f"{place}: the answer column {name!r} is empty: leave the row out"
    return f"{place}: {unknown('answer column', column, columns)}"
