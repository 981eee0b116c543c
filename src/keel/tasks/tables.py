"""Rows from files: JSONL, Parquet, and what the `datasets` library loads."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.suggest import nearest, unknown
from keel.types import KeelError

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows, and for each where it stands, to point at in an error."""

    rows: Sequence[Row]
    places: Sequence[str]

    def __len__(self) -> int:
        return len(self.rows)


def read_table(kind: str, path: str, options: Mapping[str, Any], split: str) -> Table:
    """Read a table; `kind` is jsonl, parquet or datasets. Raises KeelError in one line."""
    if kind == "datasets":
        return read_dataset(path, split, options)
    if options:
        raise KeelError(f"{kind}: unknown option {next(iter(options))!r}: it has no options")
    return read_jsonl(_existing(path)) if kind == "jsonl" else read_parquet(_existing(path))


def read_jsonl(path: Path) -> Table:
    """One JSON object a line; blank lines are passed over."""
    rows, places = [], []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                rows.append(_row(line, f"{path}:{number}"))
                places.append(f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise KeelError(f"{path}: not UTF-8 text ({error.reason}): save it as UTF-8") from None
    except OSError as error:
        raise KeelError(f"{path}: cannot be read: {error.strerror}") from None
    return _not_empty(rows, places, str(path))


def read_parquet(path: Path) -> Table:
    """The rows of a Parquet file; they are counted from 1."""
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise KeelError(f"{path}: not a Parquet file: {_line(error)}") from None
    return _not_empty(rows, [f"{path}: row {n}" for n in range(1, len(rows) + 1)], str(path))


def read_dataset(name: str, split: str, options: Mapping[str, Any]) -> Table:
    """One split of what `datasets.load_dataset(name, **options)` gives."""
    if importlib.util.find_spec("datasets") is None:
        raise KeelError("the library `datasets` is not installed: pip install 'keel-rl[data]'")
    datasets = importlib.import_module("datasets")
    try:
        found = datasets.load_dataset(name, **options)
    except Exception as error:
        raise KeelError(f"datasets: {name!r} cannot be loaded: {_line(error)}") from None
    if split not in found:
        raise KeelError(f"datasets: {name!r}: {unknown('split', split, list(found))}")
    rows = list(found[split])
    where = f"{name}[{split}]"
    return _not_empty(rows, [f"{where}: row {n}" for n in range(1, len(rows) + 1)], where)


def rows_table(rows: Sequence[Any], where: str) -> Table:
    """Rows that a Python function returned."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise KeelError(f"{where}: row {number} is a {kind}, not a dict of columns")
    return _not_empty(rows, [f"{where}: row {n}" for n in range(1, len(rows) + 1)], where)


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if found.is_file():
        return found
    if found.is_dir():
        raise KeelError(f"{path}: is a folder: name a file in it")
    siblings = [p.name for p in found.parent.iterdir()] if found.parent.is_dir() else []
    guess = nearest(found.name, siblings)
    mend = f"did you mean {str(found.parent / guess)!r}?" if guess else "mend the path"
    raise KeelError(f"{path}: there is no such file (looked from {Path.cwd()}): {mend}")


def _row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise KeelError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise KeelError(f"{place}: not readable: nested too deeply") from None
    if not isinstance(row, dict):
        raise KeelError(f"{place}: a JSON {type(row).__name__}, not an object: one {{…}} a line")
    return row


def _not_empty(rows: Sequence[Row], places: Sequence[str], where: str) -> Table:
    if not rows:
        raise KeelError(f"{where}: no rows: the data set is empty")
    return Table(rows, places)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
