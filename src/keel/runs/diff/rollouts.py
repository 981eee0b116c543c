"""Where the rollouts of two runs part: step, sequence, token, and in what. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keel.runs.diff.values import (
    Around,
    Phase,
    around,
    clipped,
    distance,
    plain,
    reading,
    same,
    ulps,
    unequal,
)
from keel.runs.rollouts import COMPONENT
from keel.types import KeelError

if TYPE_CHECKING:
    import pyarrow as pa

ASKED = ("group", "prompt_id", "task", "prompt_format", "prompt")
DRAWN = ("tokens", "written", "log_probs")
ENDED = ("completion", "finish")
JUDGED = ("step_ends", "step_rewards", "outcome")
LEARNED = ("old_log_probs", "advantages")
PER_TOKEN = (*DRAWN, *LEARNED)
NEEDED = frozenset({"group", "prompt_id", "tokens", "log_probs", "completion"})
SEQUENCE = "sequence"
"""Stands for the column where a run lacks the whole sequence."""


@dataclass(frozen=True, slots=True)
class Column:
    """How a column of a step differs.

    In how many of the sequences (and tokens, where it has a value a token) that both runs have, by
    how much at most, and where first.
    """

    name: str
    sequences: int
    tokens: int | None
    largest: float | None
    sequence: int
    token: int | None


@dataclass(frozen=True, slots=True)
class Token:
    """The first token that differs in a step, both ids (None: the completion ended) and texts."""

    sequence: int
    token: int
    a: int | None
    b: int | None
    text: Around


@dataclass(frozen=True, slots=True)
class RolloutsDifference:
    """The first step whose rollouts differ.

    `rows` are both runs' sequences in it. `sequence` (a row, from 0), its `group` and `prompt_id`,
    `column` and `token` (from 0; None where the column has one value a sequence) say what differs
    first, `a` and `b` are its values (None: absent or null), `ulps` how many floats they are
    apart. `text` is where the texts part, of prompts and completions. `tokens` is the first token
    that differs, the same place or a later one. `columns` has every column that differs.
    """

    stage: str
    step: int
    phase: Phase
    rows: tuple[int, int]
    sequence: int
    group: int
    prompt_id: str
    column: str
    token: int | None
    a: Any
    b: Any
    ulps: int | None
    text: Around | None
    tokens: Token | None
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RolloutTable:
    """A rollouts file: each column as values, or as arrays where it has a value a token."""

    rows: int
    columns: dict[str, Sequence[Any]]
    single: frozenset[str]
    """The columns of 32-bit floats."""

    def column(self, name: str) -> Sequence[Any]:
        """A column; all null where the file has none such."""
        return self.columns.get(name) or [None] * self.rows


def compare(a: Path, b: Path, stage: str, step: int) -> RolloutsDifference | None:
    """What first differs between two rollouts files in the order of cause; None: nothing.

    First comes what was sampled, then what was scored, then what was learned from it. Within each
    the first sequence, and in that the prompt, then token by token the token before its log-prob
    (a log-prob that differs at an earlier token is where the models parted), then the ending.

    Raises:
        KeelError: a file is damaged.
    """
    left, right = read(a), read(b)
    names = _order((*left.columns, *right.columns))
    found = [column for name in names if (column := _column(name, left, right)) is not None]
    keyed = [(_key(column, names), column) for column in found]
    if left.rows != right.rows:
        short = min(left.rows, right.rows)
        alone = Column(SEQUENCE, 0, None, None, short, None)
        keyed.append(((0, short, 0, 0, 0), alone))
    if not keyed:
        return None
    (rank, *_), first = min(keyed, key=lambda pair: pair[0])
    return _told(first, _PHASES[rank], left, right, stage, step, tuple(found))


def read(path: Path) -> RolloutTable:
    """A rollouts file.

    Raises:
        KeelError: it cannot be read, or holds no rollouts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path):
        content = path.read_bytes()
    try:
        # In this thread alone: an error amid others has ended the process without a word.
        source = pa.BufferReader(content)
        table = pq.read_table(
            source, use_threads=False, pre_buffer=False, page_checksum_verification=True
        )
        table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise KeelError(f"cannot read {path}: {error}: mend or delete it") from error
    lacking = sorted(NEEDED - set(table.column_names))
    if lacking:
        raise KeelError(f"{path} holds no rollouts (no column {lacking[0]}): mend or delete it")
    names = [name for name in table.column_names if name not in ("stage", "step")]
    try:
        columns = {name: _values(name, table.column(name)) for name in names}
    except TypeError as error:
        raise KeelError(f"{path} holds no rollouts ({error}): mend or delete it") from None
    kinds = {name: _kind(table.column(name).type) for name in names}
    single = frozenset(name for name, kind in kinds.items() if pa.types.is_float32(kind))
    return RolloutTable(table.num_rows, columns, single)


_PHASES: tuple[Phase, ...] = ("sampling", "scoring", "learning", "scoring")
"""By rank. Extras, which rewards leave behind, are the last: nothing follows from them."""


def _kind(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return kind.value_type if pa.types.is_list(kind) else kind


def _values(name: str, column: pa.ChunkedArray) -> Sequence[Any]:
    import pyarrow as pa

    if name not in PER_TOKEN:
        values: list[Any] = column.to_pylist()
        return values
    number = pa.types.is_list(column.type) and _kind(column.type)
    if not number or not (
        pa.types.is_integer(number) or pa.types.is_floating(number) or pa.types.is_boolean(number)
    ):
        raise TypeError(f"column {name} is {column.type}")
    return [
        cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None for cell in column
    ]


def _order(names: Sequence[str]) -> list[str]:
    """The columns in the order of cause."""
    known = (*ASKED, *DRAWN, *ENDED, *JUDGED, "reward", *LEARNED)
    components = sorted({name for name in names if name.startswith(COMPONENT)})
    rest = sorted({name for name in names if name not in known and name not in components})
    return [*ASKED, *DRAWN, *ENDED, *components, *JUDGED, "reward", *LEARNED, *rest]


def _key(column: Column, order: Sequence[str]) -> tuple[int, int, int, int, int]:
    """Rank of the phase, sequence, part of the sequence, token, column."""
    name, at = column.name, order.index(column.name)
    if name in DRAWN:
        return 0, column.sequence, 1, column.token or 0, at
    if name in (*ASKED, *ENDED):
        return 0, column.sequence, 0 if name in ASKED else 2, 0, at
    scored = name in JUDGED or name.startswith((COMPONENT, "reward"))
    rank = 2 if name in LEARNED else 1 if scored else 3
    return rank, column.sequence, 0, at, column.token or 0


def _column(name: str, left: RolloutTable, right: RolloutTable) -> Column | None:
    """How a column differs in the sequences that both have; None: not at all."""
    pairs = zip(left.column(name), right.column(name), strict=False)
    sequences = tokens = 0
    largest: float | None = None
    first: tuple[int, int | None] | None = None
    for at, (a, b) in enumerate(pairs):
        if name in PER_TOKEN:
            token, count, apart = _arrays(a, b)
        else:
            token, count, apart = None, int(not same(a, b)), distance(a, b)
        if not count:
            continue
        sequences, tokens = sequences + 1, tokens + count
        first = (at, token) if first is None else first
        if apart is not None and name != "tokens" and name != "group":
            largest = max(apart, largest or 0.0)
    if first is None:
        return None
    return Column(name, sequences, tokens if name in PER_TOKEN else None, largest, *first)


def _arrays(a: Any, b: Any) -> tuple[int, int, float | None]:
    """First place, number and largest distance of what differs; a longer one's rest counts."""
    if a is None or b is None:
        alone = a if b is None else b
        return 0, 0 if alone is None else max(1, len(alone)), None
    short = min(len(a), len(b))
    wrong = unequal(a[:short], b[:short])
    count = int(wrong.sum()) + abs(len(a) - len(b))
    if not wrong.any():
        return short, count, None
    with np.errstate(invalid="ignore"):
        apart = np.abs(a[:short][wrong].astype(np.float64) - b[:short][wrong].astype(np.float64))
    finite = apart[np.isfinite(apart)]
    is_number = a.dtype.kind != "b" and finite.size > 0
    return int(wrong.argmax()), count, float(finite.max()) if is_number else None


def _told(
    first: Column,
    phase: Phase,
    left: RolloutTable,
    right: RolloutTable,
    stage: str,
    step: int,
    columns: tuple[Column, ...],
) -> RolloutsDifference:
    """The first difference with its values and surroundings."""
    at, name = first.sequence, first.name
    has = left if at < left.rows else right
    prompt_id = str(has.column("prompt_id")[at])
    if name == SEQUENCE:
        a, b = (prompt_id if table is has else None for table in (left, right))
    else:
        a, b = (_value(table.column(name)[at], first.token) for table in (left, right))
    kind = np.float32 if {name} <= left.single & right.single else np.float64
    texts = {"tokens": "completion", "completion": "completion", "prompt": "prompt"}
    text = None
    if name in texts:
        text = around(*(str(table.column(texts[name])[at]) for table in (left, right)))
    return RolloutsDifference(
        stage=stage,
        step=step,
        phase=phase,
        rows=(left.rows, right.rows),
        sequence=at,
        group=int(has.column("group")[at]),
        prompt_id=prompt_id,
        column=name,
        token=first.token,
        a=clipped(a, b)[0],
        b=clipped(a, b)[1],
        ulps=ulps(a, b, kind),
        text=text,
        tokens=next((_token(c, left, right) for c in columns if c.name == "tokens"), None),
        columns=columns,
    )


def _token(column: Column, left: RolloutTable, right: RolloutTable) -> Token:
    at, token = column.sequence, column.token or 0
    a, b = (_value(table.column("tokens")[at], token) for table in (left, right))
    text = around(*(str(table.column("completion")[at]) for table in (left, right)))
    return Token(at, token, a, b, text)


def _value(cell: Any, token: int | None) -> Any:
    """A cell's value; None where it has none at the token."""
    if token is None or cell is None:
        return cell
    return plain(cell[token]) if token < len(cell) else None
