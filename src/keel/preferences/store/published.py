"""PandaLM's and LLMBar's published files, each of which holds one JSON list of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.data.preferences.fields import Fields
from keel.data.tables import Table, rows_table
from keel.preferences.store.formats import Attribution, answer_records, compared, read_text
from keel.preferences.store.records import Record
from keel.runs.values import clean_text
from keel.types import KeelError

TIE, FIRST, SECOND = 0, 1, 2
"""A vote: neither answer, the one that stood first, the one that stood second."""
TEST_SET = "testset-v1.json"
PEOPLE = ("annotator1", "annotator2", "annotator3")
SETS = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")
AS_PUBLISHED = "dataset.json"
"""The one name that every file of LLMBar has as published; its folder names the set."""


def pandalm_table(path: Path) -> Table:
    """The test set, from its file or the folder that holds it."""
    file = path / TEST_SET if path.is_dir() else path
    return rows_table([_clean(row) for row in _rows(file, f"PandaLM's {TEST_SET}")], str(file))


def read_pandalm(fields: Fields, by: Attribution) -> Iterator[Record]:
    """A label for each vote; the prompt is the instruction, and the input after a blank line."""
    parts = [read_text(fields, name) for name in ("instruction", "input")]
    prompt = "\n\n".join(part for part in parts if part.strip())
    if not prompt:
        raise fields.wrong("instruction", "it is empty: leave the row out")
    votes = {person: _vote(fields, person, (TIE, FIRST, SECOND)) for person in PEOPLE}
    id = f"pandalm/{fields.value('idx')}"
    yield from _voted(fields, by, prompt, ("response1", "response2"), votes, id)


def llmbar_table(path: Path) -> Table:
    """One file, or those under a folder.

    Of a folder with the published layout (`Natural/dataset.json`) only files of that name are read,
    since models' verdicts are next to them, and only LLMBar's own sets if there are any; of any
    other folder every `*.json`.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob(AS_PUBLISHED)) or sorted(path.rglob("*.json"))
        if not files:
            raise KeelError(f"{path}: holds no *.json: give LLMBar's folder or one of its files")
        if files[0].name == AS_PUBLISHED:
            files = [file for file in files if _set(file) in SETS] or files
    rows = [
        {**_clean(row), "id": f"llmbar/{_set(file)}/{number}"}
        for file in files
        for number, row in enumerate(_rows(file, "a file of LLMBar"))
    ]
    return rows_table(rows, str(path))


def read_llmbar(fields: Fields, by: Attribution) -> Iterator[Record]:
    """The label is the one vote."""
    prompt = fields.prompt("input")
    votes = {"llmbar": _vote(fields, "label", (FIRST, SECOND))}
    yield from _voted(fields, by, prompt, ("output_1", "output_2"), votes, fields.value("id"))


def _voted(
    fields: Fields,
    by: Attribution,
    prompt: Any,
    names: Sequence[str],
    votes: Mapping[str, int],
    id: str,
) -> Iterator[Record]:
    answers = answer_records(fields, by, prompt, [read_text(fields, name) for name in names])
    for person, vote in votes.items():
        value = 0.5 if vote == TIE else float(vote == FIRST)
        who = Attribution(by.source, person, by.round)
        yield from compared(*answers, value, who, columns={"id": id}, shown=True)


def _vote(fields: Fields, name: str, allowed: Sequence[int]) -> int:
    value = fields.value(name)
    if not isinstance(value, int) or value not in allowed:
        raise fields.wrong(name, f"give one of {', '.join(map(str, allowed))}")
    return value


def _set(path: Path) -> str:
    return path.resolve().parent.name if path.name == AS_PUBLISHED else path.stem


def _rows(path: Path, what: str) -> list[Any]:
    """The rows of a JSON file that holds a list; `what` it should be."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise KeelError(f"{path}: cannot be read: {error.strerror}: give {what}") from None
    except UnicodeDecodeError as error:
        raise KeelError(f"{path}: not UTF-8 text ({error.reason}): give {what}") from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise KeelError(f"{path}: not JSON: {error.msg} at {at}: give {what}") from None
    if not isinstance(found, list):
        raise KeelError(f"{path}: a JSON {type(found).__name__}, not a list of rows: give {what}")
    return found


def _clean(row: Any) -> Any:
    """A row without lone surrogates, which no store can hold; an answer that a table program
    turned into a JSON true is the text True."""
    if not isinstance(row, dict):
        return row
    return {
        name: clean_text(str(value)) if isinstance(value, bool | str) else value
        for name, value in row.items()
    }
