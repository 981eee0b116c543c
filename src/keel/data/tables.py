"""Rows from files: JSONL, Parquet, and what the `datasets` library loads."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.fields import BadRows, nearest, unknown
from keel.platform.extras import install_command
from keel.runs.rows import LeftOut, Why, shortened
from keel.types import KeelError, one_line

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row as it was read and where it stands: its file or name, its number (from 0, bad ones
    counted) and its line (from 1)."""

    source: str
    number: int
    line: int
    values: Row
    mark: str = ": row "
    """What stands between the source and the line."""

    @property
    def place(self) -> str:
        """What an error begins with."""
        return f"{self.source}{self.mark}{self.line}"

    def left_out(self, reason: str, why: Why = "bad") -> LeftOut:
        """The row as one that is not used; the reason begins with its place."""
        text = reason if reason.startswith(self.place) else f"{self.place}: {reason}"
        return LeftOut(self.source, self.line, shortened(text), self.values, why)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file or name; `bad` are those that could not be read."""

    source: str
    rows: Sequence[SourceRow]
    bad: tuple[LeftOut, ...] = ()


def refuse_bad(rows: Sequence[LeftOut], table: str = "") -> None:
    """Raise KeelError if there are bad rows, which a reader has gone on to find.

    It has the first row of each kind, and the key that drops them, of the recipe's `table`.
    """
    if not rows:
        return
    kinds: dict[str, list[LeftOut]] = {}
    for row in sorted(rows, key=lambda row: row.line):
        reason = row.reason.removeprefix(row.source).partition(str(row.line))[2]
        kinds.setdefault(_VALUES.sub(r"\1", reason), []).append(row)
    firsts = [
        some[0].reason + (f" ({len(some)} rows like it)" if len(some) > 1 else "")
        for some in list(kinds.values())[:KINDS_SHOWN]
    ]
    more = len(kinds) - len(firsts)
    firsts += [f"{more} other kinds of error"] if more else []
    several = f" ({len(rows)} bad rows)" if len(firsts) > 1 else ""
    key = f'; {table}.bad_rows = "quarantine" drops bad rows' if table else ""
    raise KeelError("; ".join(firsts) + several + key)


KINDS_SHOWN = 5
_VALUES = re.compile(r"(column '[^']*')|'[^']*'|= .*?(?=: )|\d+")
"""The parts of a reason in which rows of one kind differ."""


def read_table(
    kind: str, path: str, options: Mapping[str, Any], split: str, bad_rows: BadRows = "stop"
) -> Table:
    """Read a table; `kind` is jsonl, parquet or datasets.

    A row that cannot be read stops, in one line (KeelError), or is among the table's `bad`.
    """
    if kind == "datasets":
        return _usable(read_dataset(path, split, options), bad_rows)
    if options:
        raise KeelError(f"{kind}: unknown option {next(iter(options))!r}: it has no options")
    read = read_jsonl if kind == "jsonl" else read_parquet
    return _usable(read(_existing(path)), bad_rows)


def read_file(path: Path | str, bad_rows: BadRows = "stop") -> Table:
    """Read a table whose name says what it is: Parquet, or else JSONL."""
    kind = "parquet" if Path(path).suffix == ".parquet" else "jsonl"
    return read_table(kind, str(path), {}, "train", bad_rows)


def read_jsonl(path: Path) -> Table:
    """One JSON object a line; blank lines are passed over. A name in .gz is a compressed file."""
    bad: list[LeftOut] = []
    rows: list[SourceRow] = []
    try:
        # A byte that is not UTF-8 becomes half of a character, so that the line it is in is known.
        with path.open("rb") as raw:
            if raw.read(4) == b"PAR1":
                raise KeelError(f'{path}: a Parquet file: read it by name = "parquet"')
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
            for line, text in enumerate(file, start=1):
                if text.isspace():
                    continue
                number = len(rows) + len(bad)
                try:
                    rows.append(SourceRow(str(path), number, line, _row(text), ":"))
                except KeelError as error:
                    unread: Any = _shown(text)
                    bad.append(SourceRow(str(path), number, line, unread, ":").left_out(str(error)))
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error  # of a damaged .gz there is a text alone
        raise KeelError(f"{path}: cannot be read: {why}") from None
    return Table(str(path), rows, tuple(bad))


def read_parquet(path: Path) -> Table:
    """The rows of a Parquet file; they are counted from 1."""
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        table = None if len(set(names)) < len(names) else parquet.read_table(path)
    except Exception as error:  # of many kinds, for a file that is damaged
        raise KeelError(f"{path}: not a Parquet file: {one_line(error)[:300]}") from None
    if table is None:
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise KeelError(f"{path}: two columns are named {twice!r}: rename one of them")
    columns = []
    for at, name in enumerate(names):
        try:
            column = table.column(at)
            columns.append([_own(_short(value, column.type)) for value in column.to_pylist()])
        except Exception as error:  # text that is not UTF-8, the year 300000
            raise KeelError(
                f"{path}: column {name!r} cannot be read: {one_line(error)[:300]}"
            ) from None
    rows: list[Row] = [{} for _ in range(table.num_rows)]
    if columns:
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return _checked(str(path), rows)


def read_dataset(name: str, split: str, options: Mapping[str, Any]) -> Table:
    """A split of what `datasets.load_dataset(name, **options)` gives, or a part: `train[:9]`.

    With `streaming = true` the rows are read to the end of the part.
    """
    try:
        rows = list_rows(open_dataset(name, split, options))
    except KeelError:
        raise
    except Exception as error:
        raise KeelError(f"datasets: {name!r} cannot be read: {one_line(error)[:300]}") from None
    return _checked(f"{name}[{split}]", rows)


_PART = re.compile(r"([^\[+]+)\[(\d*):(\d*)\]")
"""A part of a split, by the numbers of its rows."""


def open_dataset(name: str, split: str, options: Mapping[str, Any]) -> Any:
    """A split, or a part of one, as an object of the `datasets` library, which may be streamed."""
    if importlib.util.find_spec("datasets") is None:
        raise KeelError(f"the library `datasets` is not installed: {install_command('data')}")
    datasets = importlib.import_module("datasets")
    try:
        part = _PART.fullmatch(split) if options.get("streaming") else None
        if part is None and ("[" in split or "+" in split):
            return datasets.load_dataset(name, split=split, **options)
        found, whole = datasets.load_dataset(name, **options), split if part is None else part[1]
        if whole not in found:
            raise KeelError(f"datasets: {name!r}: {unknown('split', whole, list(found))}")
        if part is None:
            return found[whole]
        first = int(part[2] or 0)
        rows = found[whole].skip(first)
        return rows.take(max(int(part[3]) - first, 0)) if part[3] else rows
    except KeelError:
        raise
    except Exception as error:
        raise KeelError(f"datasets: {name!r} cannot be loaded: {one_line(error)[:300]}") from None


def rows_table(rows: Sequence[Any], name: str) -> Table:
    """Rows that a Python function returned; bad ones are among the table's `bad`."""
    return _usable(_checked(name, rows), "quarantine")


def list_rows(made: Any) -> list[Any]:
    """The rows of an iterable; of a data set of the `datasets` library without Arrow's nulls."""
    return list(made) if not hasattr(made, "features") else list(without_nulls(made))


def without_nulls(rows: Iterable[Row]) -> Iterable[Row]:
    """Rows of Arrow, their messages and tools without the keys that only other rows have."""
    return ({name: _own(value) for name, value in row.items()} for row in rows)


# ---------------------------------------------------------------- one row

_OF_MESSAGES = frozenset(("role", "from", "function", "parameters"))
"""Keys of which a message or a description of a tool has one."""


def _short(value: Any, kind: Any) -> Any:
    """A value of an Arrow type; a float of 16 or 32 bits as its shortest decimal number.

    The float of 64 bits that is nearest to a float32 of 0.1 is 0.10000000149011612.
    """
    if isinstance(value, list) and hasattr(kind, "value_type"):  # a map has none
        return [_short(one, kind.value_type) for one in value]
    if isinstance(value, dict):
        return {name: _short(one, kind.field(name).type) for name, one in value.items()}
    if isinstance(value, float) and kind.bit_width < 64:
        return float(str((np.float16 if kind.bit_width == 16 else np.float32)(value)))
    return value


def _own(value: Any) -> Any:
    """A cell of an Arrow table; messages and tools without the keys that only other rows have.

    A struct has the same keys in every row, and null for those that a row lacks.
    """
    first = value[0] if isinstance(value, list) and value else None
    of_messages = isinstance(first, dict) and not _OF_MESSAGES.isdisjoint(first)
    return _without_nulls(value) if of_messages else value


def _without_nulls(value: Any) -> Any:
    """The value without null keys; a message keeps `content = None` next to its calls."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = ("content",) if value.get("tool_calls") else ()
    return {k: _without_nulls(v) for k, v in value.items() if v is not None or k in kept}


def _row(text: str) -> Row:
    try:
        text.encode()
        row = _DECODER.decode(text.rstrip("\r\n"))
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        raise KeelError(f"not UTF-8 text (the byte 0x{byte:02x}): save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise KeelError(f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # a key twice, a number of too many digits
        raise KeelError(f"not readable: {one_line(error)[:300]}") from None
    except RecursionError:
        raise KeelError("not readable: nested too deeply") from None
    if not isinstance(row, dict):
        raise KeelError(f"a JSON {type(row).__name__}, not an object: one {{…}} a line")
    if ("\\ud" in text or "\\uD" in text) and not encodable(json.dumps(row, ensure_ascii=False)):
        raise KeelError("holds half of a character (\\ud800 to \\udfff alone), fix the row")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys must differ: of two values for one, neither may go unseen."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise ValueError(f"the key {twice[:60]!r} stands there twice: drop one")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _shown(text: str) -> str:
    """A line as it stands, bytes that are not UTF-8 as \\xff."""
    line = text.rstrip("\n")
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _not_columns(row: Any) -> str | None:
    """What is wrong with a row that Python code made."""
    if not isinstance(row, Mapping):
        return f" is a {type(row).__name__}, not a dict of columns"
    strange = [key for key in row if not isinstance(key, str)]
    return f": a column is named {strange[0]!r}: name columns by texts" if strange else None


# ---------------------------------------------------------------- a whole table


def _checked(source: str, rows: Sequence[Any]) -> Table:
    """The rows that are dicts of columns."""
    kept, bad = [], []
    for number, values in enumerate(rows):
        row = SourceRow(source, number, number + 1, values)
        reason = _not_columns(values)
        if reason is not None:
            bad.append(row.left_out(f"{row.place}{reason}"))
        else:
            kept.append(row if isinstance(values, dict) else replace(row, values=dict(values)))
    return Table(source, kept, tuple(bad))


def _usable(table: Table, bad_rows: BadRows) -> Table:
    if bad_rows == "stop":
        refuse_bad(table.bad)
    if not table.rows and table.bad:
        raise all_bad(table.source, table.bad)
    if not table.rows:
        raise KeelError(f"{table.source}: no rows: the data set is empty")
    return table


def all_bad(name: str, rows: Sequence[LeftOut]) -> KeelError:
    """A source that has nothing but bad rows."""
    return KeelError(f"{name}: no row of {len(rows)} can be read; the first: {rows[0].reason}")


def _existing(path: str) -> Path:
    try:
        found = Path(path).expanduser()
        if found.is_file():
            return found
        if found.is_dir():
            raise KeelError(f"{path}: is a folder: name a file in it")
        siblings = [p.name for p in found.parent.iterdir()] if found.parent.is_dir() else []
    except (OSError, RuntimeError) as error:  # not allowed, too long a name, no such user's home
        why = error.strerror if isinstance(error, OSError) else error
        raise KeelError(f"{path[:60]}: cannot be read: {why}: fix the path") from None
    guess = nearest(found.name, siblings)
    fix = f"did you mean {str(found.parent / guess)!r}?" if guess else "fix the path"
    raise KeelError(f"{path}: there is no such file (looked from {Path.cwd()}): {fix}")


_SURROGATE = re.compile(r"[\ud800-\udfff]")


def encodable(text: str) -> bool:
    """Whether a text has no lone surrogate, which UTF-8 cannot encode."""
    return text.isascii() or _SURROGATE.search(text) is None
