"""Examples for supervised fine-tuning: rows as conversations and texts, as tokens, in blocks."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from keel.config.sources import SFTData
from keel.data.columns import likely_column, parsed_messages
from keel.data.judged_rows import Fields
from keel.data.splits import Placed, Splits, position, read_splits, tables_of
from keel.data.tables import SourceRow, all_bad, refuse_bad
from keel.models.chat import encode_answer, encode_prompt, end_of_sequence
from keel.models.conversations import ConversationEncoder
from keel.runs.rows import LeftOut
from keel.types import (
    Completion,
    Content,
    Group,
    KeelError,
    Message,
    Prompt,
    Split,
    Tools,
    text_of,
)

FORMS = (("messages",), ("prompt", "completion"), ("text",))
"""The columns of each form; of a row that has those of several it is the first."""
KNOWN = ("messages", "prompt", "completion", "text", "tools")


@dataclass(frozen=True, slots=True)
class SFTRow:
    """An example: a `completion` (text or messages) after a prompt, or, without one, a whole
    conversation or text."""

    id: str
    prompt: Content | None
    completion: Content
    tools: Tools = ()
    origin: SourceRow | None = field(default=None, compare=False, repr=False)

    @property
    def opening(self) -> Content:
        """What the example answers: its prompt, the turns before the first answer, or its text."""
        if self.prompt is not None or isinstance(self.completion, str):
            return self.completion if self.prompt is None else self.prompt
        roles = [turn["role"] for turn in self.completion]
        first = roles.index("assistant") if "assistant" in roles else 0
        return self.completion[:first] or self.completion

    @property
    def columns(self) -> dict[str, Any]:
        """The row as it is read."""
        said = self.completion
        whole = said if isinstance(said, str) else [dict(turn) for turn in said]
        tools = {"tools": list(self.tools)} if self.tools else {}
        if self.prompt is None:
            return {"text" if isinstance(whole, str) else "messages": whole, **tools}
        asked = self.prompt
        asked_whole = asked if isinstance(asked, str) else [dict(turn) for turn in asked]
        return {"prompt": asked_whole, "completion": whole, **tools}


def read_sft(source: SFTData, seed: int = 0, key: str = "data") -> Splits[SFTRow]:
    """The examples of a set on two splits; `key` is that of its table in the recipe.

    Raises KeelError for a row that is none, naming file, line, column and fix.
    """
    tables = tables_of(source, seed, "data")
    name = set_name(source)
    for table in tables:
        if table is not None:
            columns = {str(column) for row in table.rows for column in row.values}
            with _naming(table.source):
                form_of(columns, source.columns)

    return read_splits(source, tables, partial(place_row, source, name), name, key)


def place_row(source: SFTData, name: str, row: SourceRow, held: bool) -> Placed[SFTRow]:
    """The example of a row of the set `name`, and its position. Raises KeelError."""
    made = read_row(source, row, f"{name}/{'validation/' if held else ''}{row.number}")
    at = position(made.opening)
    return Placed(made, row, at, at)


def set_name(source: SFTData) -> str:
    """What examples of a set are called."""
    name = source.name.rpartition("/")[2]
    return name if source.path is None else f"{name}:{Path(source.path).stem}"


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Errors begin with the place."""
    try:
        yield
    except KeelError as error:
        raise KeelError(f"{place}: {error}") from None


def form_of(columns: Collection[str], names: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """The columns of the form that a row has, and whether its messages are `conversations`.

    Raises KeelError, with the names that were probably meant, if it has none.
    """
    for form in FORMS:
        if all(names.get(part, part) in columns for part in form):
            return form, False
    if "conversations" in columns and "messages" not in names:
        return ("messages",), True
    raise KeelError(
        f"the columns are {', '.join(sorted(columns))[:200] or 'none'}, and an example has "
        f"messages, prompt and completion, or text{guess_columns(columns)}"
    )


def guess_columns(columns: Collection[str]) -> str:
    """A hint at the columns that were probably meant."""
    if {"instruction", "input"} <= set(columns):
        return (
            ": join instruction and input into one column, or return rows of prompt and completion "
            'from a function (name = "module:function")'
        )
    for form in FORMS:
        found = {part: likely_column(part, columns) for part in form}
        if all(found.values()) and any(part != name for part, name in found.items()):
            pairs = ", ".join(f'{part} = "{name}"' for part, name in found.items() if part != name)
            return f": did you mean columns = {{{pairs}}}?"
    return ': name them, as in columns = {prompt = "question", completion = "answer"}'


def read_row(source: SFTData, row: SourceRow, id: str) -> SFTRow:
    """The example of a row. Raises KeelError."""
    for name in source.columns:
        if name not in KNOWN:
            raise KeelError(f"columns.{name}: the columns of an example are {', '.join(KNOWN)}")
    with _naming(row.place):
        form, sharegpt = form_of(list(map(str, row.values)), source.columns)
    names = {**source.columns, **({"messages": "conversations"} if sharegpt else {})}
    fields = Fields(row.values, row.place, names, row)
    made = SFTRow(id, None, "", fields.tools(), row)
    if form == ("text",):
        text = fields.value("text")
        if not isinstance(text, str) or not text.strip():
            raise fields.wrong("text", "give a text that is not empty")
        return replace(made, completion=fields.prompt("text"))
    if form == ("messages",):
        turns = fields.prompt("messages")
        if isinstance(turns, str):
            raise fields.wrong("messages", "give a list of messages")
        return replace(made, completion=_with_system(turns, source.system))
    prompt = fields.prompt("prompt")
    plain = isinstance(parsed_messages(fields.value("completion")), str)
    completion = fields.answer("completion") if plain else fields.prompt("completion")
    if isinstance(completion, str) and not completion:
        raise fields.wrong("completion", "the completion is empty: leave the row out")
    if not isinstance(completion, str) and all(t["role"] != "assistant" for t in completion):
        raise fields.wrong("completion", "no message in it is the assistant's")
    if source.system is not None and not source.raw:
        turns = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        prompt = _with_system(turns, source.system)
    return replace(made, prompt=prompt, completion=completion)


def _with_system(turns: Sequence[Message], system: str | None) -> tuple[Message, ...]:
    own = turns[0]["role"] in ("system", "developer")
    if system is None or own:
        return tuple(turns)
    return (Message(role="system", content=system), *turns)


# ---------------------------------------------------------------- as tokens


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """An example in tokens; `written` marks those that bear loss, never the first."""

    id: str
    tokens: npt.NDArray[np.int64]
    written: npt.NDArray[np.bool_]

    @property
    def group(self) -> Group:
        """The same as a completion: all before the first token that bears loss is its prompt."""
        start = int(self.written.argmax())
        tokens, written = self.tokens[start:], self.written[start:]
        nothing = np.zeros(len(tokens), dtype=np.float32)
        made = Completion(tokens, nothing, written, "eos", "")
        return Group(Prompt(self.id, "", tokens=tuple(self.tokens[:start].tolist())), (made,))


Block = tuple[Trained, ...]
"""The examples that are packed together; one, without packing."""


@dataclass(frozen=True, eq=False)
class SFTEncoder:
    """Encodes the examples of a set.

    `loss_on` says which tokens bear loss: "assistant", those that the model itself would write, or
    "all". An example of more than `limit` tokens is cut there, or with `drop` left out; `long`
    counts those.
    """

    chat: ConversationEncoder
    loss_on: Literal["assistant", "all"]
    limit: int | None
    drop: bool
    raw: bool = False
    long: Counter[str] = field(default_factory=Counter)

    def __call__(self, row: SFTRow) -> Trained | None:
        """The example; None if it is left out for its length. Raises KeelError."""
        segments = self._segments(row)
        tokens = np.array([one for part, _ in segments for one in part], dtype=np.int64)
        everything = self.loss_on == "all"
        parts = [np.full(len(part), own or everything) for part, own in segments]
        written = np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)
        written[:1] = False  # nothing predicts the first token
        if not written.any():
            where = "" if row.origin is None else f"{row.origin.place}: "
            why = _silence(row, len(tokens))
            raise KeelError(f"{where}no token of the example bears loss: {why}: leave the row out")
        if self.limit is not None and len(tokens) > self.limit:
            tokens, written = tokens[: self.limit], written[: self.limit]
            what = "dropped" if self.drop else "cut" if written.any() else "empty"
            self.long[what] += 1
            if what != "cut":
                return None
        return Trained(row.id, tokens, written)

    def counts(self) -> Iterator[str]:
        """A line for each thing that was done to examples of more tokens than the limit."""
        what = {
            "cut": "cut to",
            "empty": "left out, since no token that bears loss is among the first",
            "dropped": "left out: more than",
        }
        for name, words in what.items():
            if self.long[name]:
                yield f"{self.long[name]} examples {words} {self.limit} tokens"

    def _segments(self, row: SFTRow) -> list[tuple[list[int], bool]]:
        chat, name = self.chat, row.id
        template = bool(getattr(chat.tokenizer, "chat_template", None)) and not self.raw
        prompt, completion = row.prompt, row.completion
        if prompt is None and isinstance(completion, str):
            tokens = list(encode_prompt(Prompt(name, completion), chat, raw=True).tokens)
            end = end_of_sequence(chat.tokenizer)
            return [(tokens if tokens[-1:] == end else [*tokens, *end], True)]
        if prompt is None:
            return chat.turns(_messages(completion), name, row.tools)
        if isinstance(prompt, str) and isinstance(completion, str) and not template:
            found = encode_answer(prompt, completion, name, chat, row.tools, raw=True)
            return [(found.prompt, False), (found.answer, True)]
        asked = _messages(prompt)
        answers = _messages(completion, "assistant")
        plain = len(answers) == 1 and set(answers[0]) <= {"role", "content"}
        if plain and self.loss_on == "assistant":
            found = encode_answer(asked, text_of(answers[0]), name, chat, row.tools)
            return [(found.prompt, False), (found.answer, True)]
        segments = chat.turns((*asked, *answers), name, row.tools)
        own = [at for at, (_, written) in enumerate(segments) if written]
        known = own[-sum(turn["role"] == "assistant" for turn in answers) :]
        return [(part, at in known) for at, (part, _) in enumerate(segments)]


def _silence(row: SFTRow, tokens: int) -> str:
    """Why no token of an example bears loss."""
    turns = row.completion
    if tokens < 2:
        return f"it has {tokens} token{'s' * (tokens != 1)}, and nothing predicts the first"
    if not isinstance(turns, str) and all(turn["role"] != "assistant" for turn in turns):
        roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
        return f"no message is the assistant's (roles: {roles})"
    return "the chat template writes nothing of the assistant's messages"


def _messages(content: Content, role: str = "user") -> tuple[Message, ...]:
    return (Message(role=role, content=content),) if isinstance(content, str) else tuple(content)


# ---------------------------------------------------------------- in blocks


def pack(examples: Sequence[Trained], size: int) -> list[Block]:
    """Blocks of at most `size` tokens, by best fit: the longest example first, each into the block
    with the least room that still holds it, of equal ones that which has had it the longest."""
    blocks: list[list[Trained]] = []
    rooms: list[int] = []
    """The different rooms that are left, ascending."""
    of_room: dict[int, deque[int]] = {}
    for example in sorted(examples, key=lambda one: -len(one.tokens)):
        at = bisect.bisect_left(rooms, len(example.tokens))
        if at == len(rooms):
            number, room = len(blocks), size
            blocks.append([])
        else:
            room = rooms[at]
            number = of_room[room].popleft()
            if not of_room[room]:
                del rooms[at], of_room[room]
        blocks[number].append(example)
        room -= len(example.tokens)
        if room not in of_room:
            bisect.insort(rooms, room)
        of_room.setdefault(room, deque()).append(number)
    return [tuple(block) for block in blocks]


@dataclass(frozen=True, eq=False)
class StoredSet:
    """The blocks of a set in memory."""

    name: str
    blocks: Sequence[Block]

    def size(self, split: Split) -> int:
        return len(self.blocks)

    def prompt(self, split: Split, index: int) -> Block:
        """The block at an index."""
        return self.blocks[index]


def encode_rows(
    rows: Sequence[SFTRow], encode: Callable[[SFTRow], Trained | None], bad_rows: str, key: str
) -> tuple[list[Trained], list[LeftOut]]:
    """The examples that are used, in order, and the rows that cannot be encoded.

    Raises KeelError for such a row if bad rows stop the run.
    """
    found: list[Trained] = []
    bad: list[LeftOut] = []
    for row in rows:
        try:
            one = encode(row)
            found += [] if one is None else [one]
        except KeelError as error:
            if row.origin is None:
                raise
            bad.append(row.origin.left_out(str(error)))
    if bad_rows == "stop":
        refuse_bad(bad, key)
    if rows and len(bad) == len(rows):
        raise all_bad(bad[0].source, bad)
    return found, bad
