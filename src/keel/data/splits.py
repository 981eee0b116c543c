"""The tables of a recipe's source, and its rows on two splits: no prompt or group is in both."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from keel.config.entry import load_function
from keel.config.fields import unknown
from keel.config.sources import PreferenceData, SFTData, TaskSource
from keel.data.tables import (
    SourceRow,
    Table,
    all_bad,
    list_rows,
    read_table,
    refuse_bad,
    rows_table,
)
from keel.runs.rows import LeftOut
from keel.types import Content, KeelError, Split, one_line, text_of

T = TypeVar("T")
Source = TaskSource | PreferenceData | SFTData
KINDS = {
    "jsonl": "a file with one JSON object a line",
    "parquet": "a Parquet file",
    "datasets": "what the `datasets` library loads by name",
}
"""The kinds of source that are tables."""


@dataclass(frozen=True, slots=True)
class Splits(Generic[T]):
    """Rows in two splits; no prompt, and no value of the group column, is in both.

    `left_out` are the rows in neither: bad ones, train rows whose prompt or group is also in the
    validation split (`overlap` counts these), and those with an empty answer, if the source says
    to drop them (`dropped`).
    """

    train: tuple[T, ...]
    validation: tuple[T, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def overlap(self) -> int:
        return sum(row.why == "overlap" for row in self.left_out)

    @property
    def dropped(self) -> int:
        return sum(row.why == "empty" for row in self.left_out)


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """What a row became, and the positions of its prompt and of its group, which decide its split.

    Without a group, rows of one prompt are one.
    """

    item: T
    row: SourceRow
    prompt: float
    group: float


Make = Callable[[SourceRow, bool], Placed[T] | None]
"""From a row and whether it is of a validation table; None: it is dropped for an empty answer."""


def source_tables(source: Source, where: str) -> tuple[Table, Table | None]:
    """The train table of a source of files, and the validation one if it is given.

    Bad rows are among the tables' `bad`. Raises KeelError that begins with `where`.
    """
    named = source.name == "datasets"
    if source.path is None:
        raise KeelError(where + (": give a data set's name" if named else ": give a file"))
    options = dict(source.options)
    split = str(options.pop("split", "train")) if named else "train"
    train = read_table(source.name, source.path, options, split, "quarantine")
    if source.validation_path is None:
        return train, None
    path, held = source.path, source.validation_path
    other = (path, options, held) if named else (held, options, split)
    return train, read_table(source.name, *other, "quarantine")


def tables_of(source: PreferenceData | SFTData, seed: int, what: str) -> tuple[Table, Table | None]:
    """The train table of a source, and the validation one if it is given; `what` is "preference
    data" or the like, in errors. `seed` goes to a Python entry that has such a parameter."""
    where = f"{what} {source.name!r}"
    if source.name in KINDS:
        return source_tables(source, f"{where}: path is not set")
    if ":" not in source.name:
        raise KeelError(f"{what}: {unknown('kind', source.name, [*KINDS, 'module:function'])}")
    for key, value in (("path", source.path), ("validation_path", source.validation_path)):
        if value is not None:
            raise KeelError(f"{where}: {key} is not read by a function: put it into options")
    return rows_table(call_entry(source, what, seed), where), None


def take_options(
    function: Any, options: Mapping[str, Any], where: str, *, own: tuple[str, ...] = ()
) -> None:
    """Raise KeelError for an option that `function` has no parameter for; `own` are not options."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    names = [n for n in parameters if n not in own]
    for option in options:
        if option not in names:
            none = f"unknown option {option!r}: it has no options"
            raise KeelError(f"{where}: {unknown('option', option, names) if names else none}")


def call_entry(source: Source, what: str, seed: int) -> Any:
    """What a Python entry returns: a task, or rows as a list; `what` is "task" or the data's name.

    It is called with the options, and with `seed` if it has a parameter of that name. Raises
    KeelError.
    """
    where = f"{what} {source.name!r}"
    function = load_function(source.name, what)
    options = dict(source.options)
    take_options(function, options, where)
    if "seed" in inspect.signature(function).parameters:
        options.setdefault("seed", seed)
    try:
        made = function(**options)
        if what == "task" and is_task(made):
            return made
        if not isinstance(made, str | bytes | Mapping) and _is_iterable(made):
            return list_rows(made)
    except KeelError:
        raise
    except Exception as error:
        raise KeelError(f"{where} raises {one_line(error, named=True)}") from error
    wanted = "a task or rows of dicts" if what == "task" else "rows of dicts"
    raise KeelError(f"{where} returns a {type(made).__name__}: return {wanted}")


def _is_iterable(made: Any) -> bool:
    """Whether it can be iterated, also by `__getitem__` alone, as data sets of torch."""
    try:
        iter(made)
    except TypeError:
        return False
    return True


def is_task(made: Any) -> bool:
    """Whether an object is a task and not rows."""
    return all(callable(getattr(made, part, None)) for part in ("prompt", "size", "score"))


# ---------------------------------------------------------------- splits

VALIDATION_FRACTION = 0.1
"""Share of the contents that the validation split of an endless task gets."""


def position(content: Content) -> float:
    """Where a content lies in [0, 1), by SHA-256: what decides its split, whatever the order.

    Blanks at the ends of a text and the form of its line endings make no difference, and a text is
    the same as one message of the user.
    """
    if not isinstance(content, str) and len(content) == 1 and content[0]["role"] == "user":
        content = text_of(content[0])
    if isinstance(content, str):
        text = _trimmed(content)
    else:
        turns = [{**turn, "content": _trimmed(text_of(turn))} for turn in content]
        text = json.dumps(turns, sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2.0**48


def _trimmed(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def places(content: Content) -> Iterator[float]:
    """Where a prompt lies in any form that a task's rows may have: with and without its system
    message, and as text if one turn is left."""
    yield position(content)
    if isinstance(content, str):
        return
    turns = [turn for at, turn in enumerate(content) if at or turn["role"] != "system"]
    yield position(turns)


def split_of(content: Content) -> Split:
    """The split that a content is on, by its hash; so the splits never overlap."""
    return "validation" if position(content) < VALIDATION_FRACTION else "train"


def splits_of(places: Sequence[float], validation_fraction: float) -> list[Split]:
    """The split of each row from where its key lies in [0, 1) (`position`).

    Few rows may all fall on one split: the key nearest to the other goes over, so that two
    different keys always give two splits. One key alone is on the train split.
    """
    held = {p for p in places if p < validation_fraction}
    different = set(places)
    if len(different) < 2:
        held = set()
    elif not held:
        held = {min(different)}
    elif held == different:
        held = different - {max(different)}
    return ["validation" if p in held else "train" for p in places]


def read_splits(
    source: Source,
    tables: tuple[Table, Table | None],
    make: Make[T],
    name: str,
    key: str,
) -> Splits[T]:
    """Both splits, by the hash of the prompt or group, or of a table each.

    Raises KeelError for a bad row unless the source drops them (its `key` in the recipe), and if a
    table or the train split is left without rows.
    """
    train, validation = tables
    kept, left = placed_rows(train, make, False, name, source, key)
    if validation is None:
        splits = splits_of([row.group for row in kept], source.validation_fraction)
        held = [row for row, split in zip(kept, splits, strict=True) if split == "validation"]
        kept = [row for row, split in zip(kept, splits, strict=True) if split == "train"]
    else:
        held, left_held = placed_rows(validation, make, True, f"{name}/validation", source, key)
        left += left_held
    prompts, groups = {row.prompt for row in held}, {row.group for row in held}
    found = [row for row in kept if row.prompt not in prompts and row.group not in groups]
    reason = "the prompt or group is also in the validation split"
    left += [
        row.row.left_out(reason, "overlap")
        for row in kept
        if row.prompt in prompts or row.group in groups
    ]
    if not found:
        raise KeelError(
            f"{name}: every train prompt is also in the validation split: drop validation_path or "
            "group, or give other rows"
        )
    items = tuple(row.item for row in found), tuple(row.item for row in held)
    return Splits(*items, tuple(left))


def placed_rows(
    table: Table,
    make: Make[T],
    held: bool,
    name: str,
    source: Source,
    key: str,
) -> tuple[list[Placed[T]], list[LeftOut]]:
    """What the table's rows became, and those left out: bad ones, and with an empty answer."""
    found: list[Placed[T]] = []
    dropped: list[LeftOut] = []
    bad = list(table.bad)
    for row in table.rows:
        try:
            placed = make(row, held)
        except KeelError as error:
            bad.append(row.left_out(str(error)))
            continue
        if placed is None:
            dropped.append(row.left_out("an answer is empty", "empty"))
        else:
            found.append(placed)
    if source.bad_rows == "stop":
        refuse_bad(bad, key)
    if not found and bad:
        raise all_bad(table.source, sorted(bad, key=lambda one: one.line))
    if not found:
        raise KeelError(f"{name}: no rows are left: every one has an empty answer")
    return found, sorted([*bad, *dropped], key=lambda one: one.line)
