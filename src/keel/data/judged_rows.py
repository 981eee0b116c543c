"""The rows that reward models learn from, read column by column. Torch-free.

Named as TRL names its columns: `prompt/chosen/rejected`, `prompt/completion/label`,
`prompt/completions/labels`. A refusal names row, column, value and fix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.config.fields import unknown
from keel.data.columns import (
    likely_column,
    parsed_messages,
    prompt_columns,
    read_messages,
    read_tools,
)
from keel.data.tables import SourceRow, encodable
from keel.types import Content, KeelError, Message, Tools, shorten, text_of


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """What rows of every kind have.

    `id` names the row; rows of one prompt share a `prompt`. Rows with the same `group` hang
    together, by a column that the data names; if it names none (None), rows of one prompt do.
    `tools` are described to the model by the chat template.
    """

    id: str
    prompt: Content
    group: str | None = field(default=None, kw_only=True)
    tools: Tools = field(default=(), kw_only=True)
    origin: SourceRow | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def answers(self) -> Mapping[str, str]:
        """The texts of the answers by their columns; names of one column are joined by a stroke."""
        raise NotImplementedError

    @property
    def columns(self) -> dict[str, Any]:
        """The row as readers take it, without its id and group."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Preference(JudgedRow):
    """Two answers to one prompt.

    `probability` is that of `chosen` being the better one: 1 for a plain preference, between for a
    soft label, ½ for a tie. `margin` is by how much its score is to lie above (Bradley–Terry with
    margin).
    """

    chosen: str
    rejected: str
    probability: float = 1.0
    margin: float = 0.0

    @property
    def answers(self) -> Mapping[str, str]:
        return {"chosen": self.chosen, "rejected": self.rejected}

    @property
    def columns(self) -> dict[str, Any]:
        more = {"probability": self.probability, "margin": self.margin}
        return {**prompt_columns(self.prompt, self.tools), **self.answers, **more}


@dataclass(frozen=True, slots=True)
class Labelled(JudgedRow):
    """One answer, right (1) or wrong (0); between, a share of judges."""

    completion: str
    label: float

    @property
    def answers(self) -> Mapping[str, str]:
        return {"completion": self.completion}

    @property
    def columns(self) -> dict[str, Any]:
        return {**prompt_columns(self.prompt, self.tools), **self.answers, "label": self.label}


@dataclass(frozen=True, slots=True)
class Stepwise(JudgedRow):
    """An answer in steps, each right (1) or wrong (0); None if it was not judged.

    The completion is the steps joined by a separator.
    """

    steps: tuple[str, ...]
    labels: tuple[float | None, ...]

    @property
    def answers(self) -> Mapping[str, str]:
        return {"completions/steps": "".join(self.steps)}

    @property
    def columns(self) -> dict[str, Any]:
        answers = {"completions": list(self.steps), "labels": list(self.labels)}
        return {**prompt_columns(self.prompt, self.tools), **answers}

    @property
    def first_error(self) -> int | None:
        """The index (from 0) of the first wrong step; None if every judged step is right."""
        return first_wrong(self.labels)


def first_wrong(labels: Sequence[float | None]) -> int | None:
    """The index of the first label that says wrong; None if none does."""
    return next((i for i, label in enumerate(labels) if label is not None and label < 0.5), None)


SHOWN = 60
"""Characters of a wrong value that its error shows."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A row, where it stands, and the file's own names of columns (`names["prompt"]`, …)."""

    row: Mapping[str, Any]
    place: str
    names: Mapping[str, str] = field(default_factory=dict)
    origin: SourceRow | None = None

    def has(self, name: str) -> bool:
        """Whether the column is there and holds something."""
        return self.row.get(self.names.get(name, name)) is not None

    def there(self, name: str) -> bool:
        """Whether there is such a column, null or not."""
        return self.names.get(name, name) in self.row

    def value(self, name: str) -> Any:
        """What the column holds; None if a Parquet file or a JSON null says so."""
        column = self.names.get(name, name)
        if column not in self.row:
            meant = likely_column(column, self.row)
            hint = f"; or set columns = {{{name} = {json.dumps(meant)}}}" if meant else ""
            known = unknown("column", column, map(str, self.row))
            raise KeelError(f"{self.place}: {known}{hint}")
        return self.row[column]

    def first(self, *names: str) -> str:
        """The first of the names that the row has a column for; the first of all if none."""
        return next((n for n in names if self.there(n)), names[0])

    def wrong(self, name: str, fix: str) -> KeelError:
        """The column's value is refused; `fix` is what to give instead."""
        column = self.names.get(name, name)
        shown = shorten(repr(self.row.get(column)), SHOWN)
        return KeelError(f"{self.place}: column {column!r} = {shown}: {fix}")

    # ------------------------------------------------------------ what a column may hold

    def answer(self, name: str) -> str | tuple[Message, ...]:
        """Text, or messages that end in the assistant's turn."""
        value = parsed_messages(self.value(name))
        if isinstance(value, str):
            return self._whole(name, value)
        turns = self._messages(name)
        if turns[-1]["role"] != "assistant":
            raise self.wrong(name, "the last message must be the assistant's")
        lost = [key for key in ("tool_calls", "reasoning_content") if turns[-1].get(key)]
        if lost:
            raise self.wrong(
                name,
                f"an answer is a text, and the last message has {lost[0]}: write it into the "
                "content, as the model writes it, or leave the row out",
            )
        return turns

    def prompt(self, name: str) -> Content:
        """Text that is not blank, or messages."""
        value = parsed_messages(self.value(name))
        if not isinstance(value, str):
            return self._messages(name)
        if not value.strip():
            raise self.wrong(name, "the prompt is empty: leave the row out")
        return self._whole(name, value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts, at least one."""
        value = self.value(name)
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self.wrong(name, "give a list of texts")
        if not value:
            raise self.wrong(name, "the list is empty: leave the row out")
        return tuple(self._whole(name, text) for text in value)

    def number(self, name: str, default: float) -> float:
        """A finite number; the default if the column is absent or null."""
        if not self.has(name):
            return default
        found = finite(self.value(name))
        if found is None:
            raise self.wrong(name, "give a finite number")
        return found

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1; the default if the column is absent or null."""
        found = self.number(name, default)
        if not 0 <= found <= 1:
            raise self.wrong(name, "give a number from 0 to 1")
        return found

    def tools(self) -> Tools:
        """The row's descriptions of tools; none if the column is absent or null."""
        try:
            return read_tools(self.value("tools")) if self.has("tools") else ()
        except ValueError as error:
            raise self.wrong("tools", f"it holds {error}") from None

    def tools_column(self) -> dict[str, Any]:
        """The tools as a column of a prompt; empty without any."""
        tools = self.tools()
        return {"tools": list(tools)} if tools else {}

    def _messages(self, name: str) -> tuple[Message, ...]:
        value = parsed_messages(self.value(name))
        try:
            # A column of one answer may hold its message alone.
            return read_messages([value] if isinstance(value, Mapping) else value)
        except ValueError as error:
            raise self.wrong(name, f"give a text or messages: it holds {error}") from None

    def _whole(self, name: str, text: str) -> str:
        if not encodable(text):
            raise self.wrong(name, "it holds invalid UTF-8 (a lone surrogate): fix it")
        return text


def finite(value: Any) -> float | None:
    """The value as a finite float; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        return None
    return number if math.isfinite(number) else None


def judgement(value: Any) -> float | None:
    """Right or wrong as 1 or 0, or a share of judges from 0 to 1; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    number = finite(value)
    return number if number is not None and 0 <= number <= 1 else None


def last_turn(
    fields: Fields, names: Sequence[str], prompt: Content | None
) -> tuple[Content, list[str]]:
    """The prompt, and the text of each answer.

    Answers that are whole conversations hold the prompt in their leading turns, which must be the
    same in all of them. Where the row also has a `prompt`, it must say the same: a text as the
    content of one of these turns, messages as all of them.
    """
    answers = [fields.answer(name) for name in names]
    if len({isinstance(answer, str) for answer in answers}) == 2:
        raise fields.wrong(names[1], f"give it in the form of {names[0]!r}, as text or messages")
    leads: list[tuple[Message, ...]] = []
    texts: list[str] = []
    for answer in answers:
        leads.append(() if isinstance(answer, str) else answer[:-1])
        texts.append(answer if isinstance(answer, str) else text_of(answer[-1]))
    if any(lead != leads[0] for lead in leads):
        raise fields.wrong(
            names[1],
            f"its turns before the last are not those of {names[0]!r}: "
            "answers to compare are one assistant turn each",
        )
    return _joined(fields, leads[0], prompt, isinstance(answers[0], str), names[0]), texts


def _joined(
    fields: Fields, lead: tuple[Message, ...], prompt: Content | None, text: bool, name: str
) -> Content:
    if prompt is None and not lead:
        what = "a text" if text else "one turn"
        raise KeelError(
            f"{fields.place}: no column {fields.names.get('prompt', 'prompt')!r}, and {name!r} is "
            f"{what}: add the column, or give whole conversations"
        )
    if prompt is None:
        return lead
    if not lead:
        # A text before the assistant's message is the user's.
        chat = isinstance(prompt, str) and not text
        return (Message(role="user", content=str(prompt)),) if chat else prompt
    same = (
        any(prompt == text_of(turn) for turn in lead)
        if isinstance(prompt, str)
        else tuple(prompt) == lead
    )
    if not same:
        raise fields.wrong("prompt", f"it is not what the turns of {name!r} begin with: drop one")
    return lead


PAIR = ("prompt", "chosen", "rejected", "probability", "margin", "tools")
LABELLED = ("prompt", "completion", "label", "tools")
FIRST_ERROR = ("first_error", "mistake_index")
STEPWISE = ("prompt", "input", "completions", "steps", "labels", "tools", *FIRST_ERROR)
"""The columns that a row of each kind may have; others are passed over."""


def pair(fields: Fields, id: str) -> Preference:
    """`chosen` and `rejected`, with `prompt` unless they are whole conversations."""
    prompt, (chosen, rejected) = last_turn(fields, ("chosen", "rejected"), _prompt(fields))
    probability = fields.share("probability", 1.0)
    if chosen == rejected and probability != 0.5:
        raise KeelError(
            f"{fields.place}: chosen and rejected are the same text and probability is "
            f"{probability:g}: set probability to 0.5 (a tie), or leave the row out"
        )
    margin = fields.number("margin", 0.0)
    more: dict[str, Any] = {"tools": fields.tools(), "origin": fields.origin}
    return Preference(id, prompt, chosen, rejected, probability, margin, **more)


def labelled(fields: Fields, id: str) -> Labelled:
    """`completion` and `label`, with `prompt` unless the completion is a whole conversation."""
    prompt, (completion,) = last_turn(fields, ("completion",), _prompt(fields))
    label = judgement(fields.value("label"))
    if label is None:
        raise fields.wrong("label", "give true, false or a number from 0 to 1")
    return Labelled(id, prompt, completion, label, tools=fields.tools(), origin=fields.origin)


def stepwise(fields: Fields, id: str) -> Stepwise:
    """`completions` (or `steps`) and `labels`, or `first_error` (or `mistake_index`)."""
    prompt = fields.prompt(fields.first("prompt", "input"))
    name = fields.first("completions", "steps")
    steps = fields.texts(name)
    error = next((e for e in FIRST_ERROR if fields.there(e)), None)
    if fields.has("labels"):
        if error is not None and fields.has(error):
            raise fields.wrong(error, "the row has labels as well: drop one of the two")
        labels = _labels(fields, name, len(steps))
    elif error is not None:
        labels = _until(fields, error, len(steps))
    else:
        raise fields.wrong("labels", "give a list with a label a step, or a first_error column")
    return Stepwise(id, prompt, steps, labels, tools=fields.tools(), origin=fields.origin)


def _prompt(fields: Fields) -> Content | None:
    return fields.prompt("prompt") if fields.has("prompt") else None


def _labels(fields: Fields, steps: str, count: int) -> tuple[float | None, ...]:
    found = fields.value("labels")
    if not isinstance(found, list | tuple):
        raise fields.wrong("labels", "give a list with a label a step")
    if len(found) != count:
        raise fields.wrong("labels", f"{len(found)} labels for {count} {steps}: give as many")
    labels = tuple(None if label is None else judgement(label) for label in found)
    if any(ours is None and theirs is not None for ours, theirs in zip(labels, found, strict=True)):
        raise fields.wrong("labels", "each is true, false, a number from 0 to 1, or null")
    if all(label is None for label in labels):
        raise fields.wrong("labels", "no step is judged: leave the row out")
    return labels


def _until(fields: Fields, column: str, count: int) -> tuple[float | None, ...]:
    """From the index of the first wrong step: right before it, wrong there, unjudged after.

    Some writers of Parquet keep integers that may be null as floats, so 3.0 is 3.
    """
    found = fields.value(column)
    index = finite(found)
    if found is None:
        return (1.0,) * count
    if index is None or index not in range(count):
        raise fields.wrong(
            column, f"give the index of a step, 0 to {count - 1}, or null if all are right"
        )
    at = int(index)
    return (*[1.0] * at, 0.0, *[None] * (count - at - 1))
