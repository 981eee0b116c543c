"""What the preference store holds, as frozen values, and the tables that hold them.

An `id` that is left empty becomes a hash of the content, so that adding the same thing twice is one
row. The hash is of what a record says, and not of what it took: seconds, cost, round and columns
are the first one's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar, get_args

from keel.config.fields import unknown
from keel.platform.sqlite import Format
from keel.types import Content, KeelError, Tools

Source = Literal["human", "judge", "rule", "reward_model"]
"""Who judges."""
SOURCES: tuple[Source, ...] = get_args(Source)
Side = Literal["first", "second"]
"""One of a pair's completions."""
CostKind = Literal["api", "human", "gpu"]
"""What money or time goes to."""
CostUnit = Literal["dollars", "hours"]


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt as text or messages, with any columns (such as a reference answer)."""

    content: Content
    columns: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            _set(self, "content", tuple(self.content))
        _name(self, "prompt", self.content, self.columns)

    @property
    def tools(self) -> Tools:
        """The column of that name."""
        return tuple(self.columns.get("tools") or ())


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """An answer to a prompt.

    `model` wrote it with `sampling` settings in `round`; `tokens` is its length, `seconds` and
    `cost` (dollars) what it took, of a server ("api") or of this machine ("gpu").
    """

    prompt: str
    text: str
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    tokens: int | None = None
    seconds: float | None = None
    cost: float | None = None
    kind: CostKind = "api"
    columns: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        _finite(self, "seconds", "cost")
        _name(self, "completion", self.prompt, self.text, self.model)


@dataclass(frozen=True, slots=True)
class PairRecord:
    """Two completions of one prompt, to be compared. The higher its `priority`, the sooner."""

    prompt: str
    first: str
    second: str
    round: int = 0
    priority: float = 0.0
    columns: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        _finite(self, "priority")
        _name(self, "pair", self.prompt, self.first, self.second)


@dataclass(frozen=True, slots=True)
class LabelRecord:
    """A judgement of a pair.

    `value` is P(the first completion is better): ½ is a tie, None is a skip. `margin` is by how
    much the first one's score is above the second's. `annotator` names the person or model that
    judged, `rubric` its instructions, `version` the reward model. `shown_first` is the side that
    was shown first, `at` when it was made (seconds since 1970), `cost` is in dollars.
    """

    pair: str
    value: float | None
    source: Source
    annotator: str = ""
    rubric: str = ""
    version: str = ""
    round: int = 0
    margin: float = 0.0
    shown_first: Side | None = None
    seconds: float | None = None
    cost: float | None = None
    note: str = ""
    at: float | None = None
    id: str = ""

    def __post_init__(self) -> None:
        if self.value is not None and not 0 <= self.value <= 1:
            raise KeelError(f"label: value = {self.value!r}: give a number from 0 to 1, or None")
        _among("source", self.source, SOURCES)
        if self.shown_first is not None:
            _among("shown_first", self.shown_first, get_args(Side))
        _finite(self, "margin", "seconds", "cost", "at")
        who = (self.source, self.annotator, self.rubric, self.version, self.round)
        verdict = (self.value, self.margin, self.shown_first, self.note)
        _name(self, "label", self.pair, *who, *verdict)


@dataclass(frozen=True, slots=True)
class StepsRecord:
    """An answer in steps, each right (1) or wrong (0) or between; None if it was not judged."""

    prompt: str
    steps: tuple[str, ...]
    labels: tuple[float | None, ...]
    source: Source
    annotator: str = ""
    version: str = ""
    round: int = 0
    seconds: float | None = None
    cost: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        _among("source", self.source, SOURCES)
        for name in ("steps", "labels"):
            _set(self, name, tuple(getattr(self, name)))
        if len(self.steps) != len(self.labels):
            raise KeelError(f"steps: {len(self.labels)} labels of {len(self.steps)} steps")
        if any(label is not None and not 0 <= label <= 1 for label in self.labels):
            raise KeelError("steps: labels: give numbers from 0 to 1, or None")
        _finite(self, "seconds", "cost")
        who = (self.source, self.annotator, self.version, self.round)
        _name(self, "steps", self.prompt, self.steps, self.labels, *who)


@dataclass(frozen=True, slots=True)
class CostRecord:
    """An entry of the ledger: `amount` of a `unit` for `purpose`, of what is on no other record.

    Equal amounts may be spent twice, so that the caller gives each entry its `id`. A forecast is
    what a round is expected to take.
    """

    id: str
    kind: CostKind
    amount: float
    unit: CostUnit
    purpose: str = ""
    round: int = 0
    forecast: bool = False

    def __post_init__(self) -> None:
        if not self.id:
            raise KeelError("cost: id is empty: name the entry, so that it is counted once")
        _among("kind", self.kind, get_args(CostKind))
        _among("unit", self.unit, get_args(CostUnit))
        _finite(self, "amount")
        _set(self, "forecast", bool(self.forecast))  # SQLite has no booleans


Record = PromptRecord | CompletionRecord | PairRecord | LabelRecord | StepsRecord | CostRecord
"""What is added to the store."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A pair that one annotator has until `expires` (seconds, of the caller's clock)."""

    id: int
    pair: str
    annotator: str
    expires: float


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A pair with its texts and its labels, in the order in which they were added."""

    pair: PairRecord
    prompt: PromptRecord
    first: CompletionRecord
    second: CompletionRecord
    labels: tuple[LabelRecord, ...] = ()


def mean_label(labels: Iterable[LabelRecord]) -> tuple[float, float] | None:
    """The means of value and margin over the labels that are not skips; None if there is none."""
    found = [(label.value, label.margin) for label in labels if label.value is not None]
    if not found:
        return None
    return sum(v for v, _ in found) / len(found), sum(m for _, m in found) / len(found)


_encode_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def content_id(*parts: Any) -> str:
    """32 hexadecimal digits that tell contents apart."""
    return hashlib.blake2b(_encode_sorted(parts).encode("ascii"), digest_size=16).hexdigest()


def _name(record: Any, *content: Any) -> None:
    if record.id:
        return
    try:
        _set(record, "id", content_id(*content))
    except (TypeError, ValueError, RecursionError) as error:
        raise KeelError(f"{content[0]}: no JSON: {error}: give texts, numbers and lists") from None


def _set(record: Any, name: str, value: Any) -> None:
    object.__setattr__(record, name, value)


def _among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise KeelError(unknown(name, value, known))


def _finite(record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None and not math.isfinite(value):
            raise KeelError(f"{name} = {value!r}: give a finite number")


# ---------------------------------------------------------------- tables

R = TypeVar("R")
_encode = json.JSONEncoder(ensure_ascii=False).encode
TYPES = {
    **dict.fromkeys(("str", "Source", "CostKind", "CostUnit"), "TEXT NOT NULL"),
    **dict.fromkeys(("int", "bool"), "INTEGER NOT NULL"),
    **{"float": "REAL NOT NULL", "float | None": "REAL"},
    **{"int | None": "INTEGER", "Side | None": "TEXT"},
}
"""The columns of a record's fields; a field of any other type is a column that holds JSON."""
REFERENCES = {"prompt": "prompts", "first": "completions", "second": "completions", "pair": "pairs"}
"""The tables whose ids these fields hold."""


class TableLayout(Generic[R]):
    """A record type and its table: the fields are the columns, in order.

    `same` are the fields in which two records of one id must agree.
    """

    def __init__(self, noun: str, table: str, record: type[R], same: Sequence[str]) -> None:
        self.noun, self.table, self.record = noun, table, record
        self.types = {field.name: str(field.type) for field in fields(record)}  # type: ignore[arg-type]
        self.fields = tuple(self.types)
        self.same = tuple(map(self.fields.index, same))
        self._json = tuple(at for at, kind in enumerate(self.types.values()) if kind not in TYPES)
        self._get = attrgetter(*self.fields)

    def statement(self) -> str:
        """What makes the table. `seq` is the order of adding; a number is never used again."""
        columns = [
            f'"{name}" {TYPES.get(kind, "TEXT NOT NULL")}'
            + (" UNIQUE" if name == "id" else "")
            + (f" REFERENCES {REFERENCES[name]} (id)" if name in REFERENCES else "")
            for name, kind in self.types.items()
        ]
        # Humans fill the places of a pair; triggers count them.
        columns += ["taken INTEGER NOT NULL DEFAULT 0"] if self.table == "pairs" else []
        every = ", ".join(["seq INTEGER PRIMARY KEY AUTOINCREMENT", *columns])
        return f"CREATE TABLE IF NOT EXISTS {self.table} ({every})"

    def names(self, alias: str = "") -> str:
        """The columns of a SELECT or INSERT; `alias` is the table's in a join."""
        before = f"{alias}." if alias else ""
        return ", ".join(f'{before}"{name}"' for name in self.fields)

    def row(self, record: R) -> tuple[Any, ...]:
        """A record as its row."""
        values = list(self._get(record))
        for at in self._json:
            value = values[at]
            # Most columns are empty, and the encoder is slow to start.
            values[at] = "{}" if value.__class__ is dict and not value else _encode(value)
        return tuple(values)

    def content(self, row: Sequence[Any]) -> list[Any]:
        """The values in which two records of one id must agree."""
        return [json.loads(row[at]) if at in self._json else row[at] for at in self.same]

    def read(self, row: Sequence[Any]) -> R:
        """The record of a row."""
        values = list(row)
        for at in self._json:
            values[at] = json.loads(values[at])
        return self.record(*values)


PROMPTS = TableLayout("prompt", "prompts", PromptRecord, ("content",))
COMPLETIONS = TableLayout("completion", "completions", CompletionRecord, ("prompt", "text"))
PAIRS = TableLayout("pair", "pairs", PairRecord, ("prompt", "first", "second"))
LABELS = TableLayout("label", "labels", LabelRecord, ("pair", "value"))
STEPS = TableLayout("steps", "steps", StepsRecord, ("prompt", "steps", "labels"))
COSTS = TableLayout("cost", "costs", CostRecord, ("kind", "amount", "unit"))
LAYOUTS: tuple[TableLayout[Any], ...] = (PROMPTS, COMPLETIONS, PAIRS, LABELS, STEPS, COSTS)

# `taken` counts the places of a pair that humans fill: open leases and labels that are not skips;
# triggers keep it, so that the next pair is found by an index alone.
_STATEMENTS = (
    *(layout.statement() for layout in LAYOUTS),
    "CREATE INDEX IF NOT EXISTS completions_prompt ON completions (prompt)",
    "CREATE INDEX IF NOT EXISTS pairs_next ON pairs (taken, priority DESC, seq)",
    "CREATE INDEX IF NOT EXISTS pairs_round ON pairs (round, taken, priority DESC, seq)",
    "CREATE INDEX IF NOT EXISTS labels_pair ON labels (pair, source, annotator)",
    # A number is never used again, so that an expired lease is not taken for a later one.
    """CREATE TABLE IF NOT EXISTS leases (
        id INTEGER PRIMARY KEY AUTOINCREMENT, pair TEXT NOT NULL REFERENCES pairs (id),
        annotator TEXT NOT NULL, expires REAL NOT NULL, label TEXT UNIQUE
    )""",
    "CREATE INDEX IF NOT EXISTS leases_open ON leases (expires) WHERE label IS NULL",
    "CREATE INDEX IF NOT EXISTS leases_annotator ON leases (annotator) WHERE label IS NULL",
    """CREATE TRIGGER IF NOT EXISTS lease_made AFTER INSERT ON leases BEGIN
        UPDATE pairs SET taken = taken + 1 WHERE id = NEW.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS lease_dropped AFTER DELETE ON leases
        WHEN OLD.label IS NULL BEGIN
        UPDATE pairs SET taken = taken - 1 WHERE id = OLD.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS lease_used AFTER UPDATE OF label ON leases BEGIN
        UPDATE pairs SET taken = taken + (NEW.label IS NULL) - (OLD.label IS NULL)
        WHERE id = NEW.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS label_made AFTER INSERT ON labels
        WHEN NEW.source = 'human' AND NEW.value IS NOT NULL BEGIN
        UPDATE pairs SET taken = taken + 1 WHERE id = NEW.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS label_dropped AFTER DELETE ON labels
        WHEN OLD.source = 'human' AND OLD.value IS NOT NULL BEGIN
        UPDATE pairs SET taken = taken - 1 WHERE id = OLD.pair; END""",
)
FORMAT = Format(
    application=0x4B505246,  # KPRF
    version=2,
    statements=_STATEMENTS,
)
