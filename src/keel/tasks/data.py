"""Stored rows as a task: JSONL, Parquet, a `datasets` name, or rows from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.entry import load_entry
from keel.config.sources import TaskSource
from keel.config.suggest import unknown
from keel.tasks.base import BaseTask, Presentation, position, side_of
from keel.tasks.generated import take_options
from keel.tasks.tables import Table, read_table, rows_table
from keel.tasks.user import UserTask
from keel.types import Completion, Content, KeelError, Prompt, Side
from keel.verify.text import same_text

KINDS = {
    "jsonl": "a file with one JSON object a line",
    "parquet": "a Parquet file",
    "datasets": "what the `datasets` library loads by name",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One row, ready: its number in its file (from 0), its prompt, its columns."""

    number: int
    body: Content
    columns: Mapping[str, Any]


class DataTask(BaseTask):
    """Rows on two sides.

    `overlap` counts the train rows left out because their prompt is also held out. The gold answer
    is the `answer` column's text; the verdict, exact match with it (blanks around aside) where an
    answer column is set, else none: rewards judge.
    """

    def __init__(
        self,
        name: str,
        train: Sequence[Entry],
        heldout: Sequence[Entry],
        presentation: Presentation,
        answer: str | None,
        overlap: int = 0,
    ) -> None:
        self.name = name
        self.sides: Mapping[Side, Sequence[Entry]] = {"train": train, "heldout": heldout}
        self.presentation = presentation
        self.answer = answer
        self.overlap = overlap

    def size(self, side: Side) -> int:
        """How many rows the side has."""
        return len(self.sides[side])

    def prompt(self, side: Side, index: int) -> Prompt:
        """The row at an index; its id holds the row's number in its file."""
        entry = self.sides[side][index]
        content = self.presentation.frame(entry.body, self.name)
        return Prompt(f"{self.name}/{side}/{entry.number}", content, entry.columns, self.name)

    def gold(self, prompt: Prompt) -> str | None:
        """The text of the answer column."""
        return None if self.answer is None else str(prompt.columns[self.answer])

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """1 for the gold answer and nothing but it, else 0."""
        gold = self.gold(prompt)
        return None if gold is None else float(same_text(completion.text, gold))


def data_task(source: TaskSource) -> DataTask:
    """The task of a file or `datasets` name. Raises KeelError, naming file and line."""
    if source.path is None:
        what = "a data set's name" if source.name == "datasets" else "a file"
        raise KeelError(f"task {source.name!r}: task.path is not set: give {what}")
    options = dict(source.options)
    split = str(options.pop("split", "train")) if source.name == "datasets" else "train"
    train = read_table(source.name, source.path, options, split)
    name = f"{source.name}:{Path(source.path).stem}"
    if source.heldout_path is None:
        return _split(name, train, source)
    if source.name == "datasets":
        held = read_table(source.name, source.path, options, source.heldout_path)
    else:
        held = read_table(source.name, source.heldout_path, options, split)
    return _two_tables(name, train, held, source)


def entry_task(source: TaskSource, seed: int) -> Any:
    """The task of a Python entry: what the function returns, a Task or rows.

    It is called with the options, and with the recipe's seed if it has a parameter `seed`.
    """
    function: Callable[..., Any] = load_entry(source.name, "task")
    if not callable(function):
        raise KeelError(f"task {source.name!r}: it is a {type(function).__name__}, not a function")
    options = dict(source.options)
    take_options(function, options, f"task {source.name!r}")
    if "seed" in inspect.signature(function).parameters:
        options.setdefault("seed", seed)
    try:
        made = function(**options)
    except KeelError:
        raise
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"task {source.name!r} raises {message}") from error
    if all(callable(getattr(made, part, None)) for part in ("prompt", "size", "score")):
        return UserTask(source.name, made)
    try:
        rows = list(made)
    except TypeError:
        raise KeelError(
            f"task {source.name!r} returns a {type(made).__name__}: return a task or rows of dicts"
        ) from None
    return _split(source.name, rows_table(rows, source.name), source)


def _split(name: str, table: Table, source: TaskSource) -> DataTask:
    """Both sides from one table, by the hash of the prompt; each has at least one prompt."""
    entries = _entries(table, source)
    sides = [side_of(entry.body, source.heldout_share) for entry in entries]
    places = [position(entry.body) for entry in entries]
    if len(set(places)) > 1 and len(set(sides)) == 1:
        # Few rows may all fall on one side: the one nearest to the other goes over.
        low, high = min(places), max(places)
        sides = (
            ["heldout" if p == low else "train" for p in places]
            if sides[0] == "train"
            else ["train" if p == high else "heldout" for p in places]
        )
    train = [e for e, side in zip(entries, sides, strict=True) if side == "train"]
    heldout = [e for e, side in zip(entries, sides, strict=True) if side == "heldout"]
    if not train:  # one prompt alone, on the held-out side
        train, heldout = heldout, train
    return DataTask(name, train, heldout, _presentation(source), source.answer)


def _two_tables(name: str, train: Table, heldout: Table, source: TaskSource) -> DataTask:
    """A table a side; train prompts that are also held out are left out of training."""
    held = _entries(heldout, source)
    taken = {position(entry.body) for entry in held}
    every = _entries(train, source)
    kept = [entry for entry in every if position(entry.body) not in taken]
    if not kept:
        raise KeelError(
            f"task {name!r}: every train prompt is also in {source.heldout_path!r}: "
            "drop heldout_path, or give other rows"
        )
    overlap = len(every) - len(kept)
    return DataTask(name, kept, held, _presentation(source), source.answer, overlap)


def _presentation(source: TaskSource) -> Presentation:
    return Presentation(source.prompt, source.system)


def _entries(table: Table, source: TaskSource) -> list[Entry]:
    presentation = _presentation(source)
    entries = []
    for number, (row, place) in enumerate(zip(table.rows, table.places, strict=True)):
        columns = dict(row)
        if source.answer is not None:
            if columns.get(source.answer) is None:
                raise KeelError(_no_answer(place, source.answer, columns))
            columns.setdefault("answer", columns[source.answer])
        body = presentation.body(columns, place)
        presentation.frame(body, place)
        entries.append(Entry(number, body, columns))
    return entries


def _no_answer(place: str, answer: str, columns: Mapping[str, Any]) -> str:
    if answer in columns:
        return f"{place}: the answer column {answer!r} is empty: leave the row out"
    return f"{place}: {unknown('answer column', answer, columns)}"
