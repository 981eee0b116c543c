"""What the preference store holds, as frozen values.

An `id` that is left empty becomes a hash of the content, so that adding the same thing twice is one
row. The hash is of what a record says, and not of what it took: seconds, cost, round and columns
are the first one's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from keel.config.fields import unknown
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


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def content_id(*parts: Any) -> str:
    """32 hexadecimal digits that tell contents apart."""
    return hashlib.blake2b(_encode(parts).encode("ascii"), digest_size=16).hexdigest()


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
