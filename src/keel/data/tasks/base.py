"""What tasks have in common: defaults of the protocol, the two splits, and how a prompt is put."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from keel.config.fields import unknown
from keel.data.columns import parsed_messages, read_messages, reading
from keel.data.tables import encodable
from keel.types import Completion, Content, KeelError, Message, Prompt, Split, one_line


class BaseTask:
    """The defaults of the Task protocol; tasks override those that differ."""

    name: str
    correctness = False
    """Whether a score of 1 means that the answer is right; see `RewardSource.correctness`."""

    def size(self, split: Split) -> int | None:
        """Endless."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at an index; every task has its own."""
        raise NotImplementedError

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """None: no score."""
        return None

    def gold(self, prompt: Prompt) -> str | None:
        """No answer known."""
        return None

    def reply(self, prompt: Prompt, text: str) -> str | None:
        """No answer of the environment: the conversation ends."""
        return None


SEED_NAMES: Mapping[Split, str] = {"train": "train", "validation": "heldout"}
"""The names of the splits in what seeds random numbers: with others, results would change."""


def prompt_id(task: str, split: Split, index: int) -> str:
    """The id of a task's prompt, which seeds the random numbers of its completions."""
    return f"{task}/{SEED_NAMES[split]}/{index}"


def split_and_index(prompt: Prompt) -> tuple[Split, int]:
    """The arguments that a prompt's id was made from."""
    _, split, index = prompt.id.rsplit("/", 2)
    return ("train" if split == "train" else "validation"), int(index)


@dataclass(frozen=True, slots=True)
class Presentation:
    """How a row becomes what the policy reads.

    `template` is a format string over the row's columns, or the name of a column; one that holds
    messages is taken as they are. `system` makes the prompt a conversation, with that system
    message or, if it is empty, with none.
    """

    template: str = "{prompt}"
    system: str | None = None

    def body(self, row: Mapping[str, Any], where: str) -> Content:
        """The prompt without the system message. Raises KeelError that begins with `where`."""
        column = self._column(row)
        for name in (column,) if column is not None else names_of(self.template):
            if name not in row:
                other = f"{where}: {unknown('column', name, row)}"
                raise KeelError(f'{other}: name the column in `prompt`, as prompt = "{{question}}"')
            if row[name] is None or (isinstance(row[name], float) and math.isnan(row[name])):
                raise KeelError(f"{where}: column {name!r} is empty: leave the row out")
        value = None if column is None else parsed_messages(row[column])
        if column is not None and not isinstance(value, str):
            return self._other(value, column, where)
        try:
            text = self.template.format_map(row) if value is None else value
        except Exception as error:
            message = one_line(error)[:300]
            raise KeelError(f"{where}: prompt = {self.template!r} fails: {message}") from None
        return _text(text, where)

    def _other(self, value: Any, column: str, where: str) -> Content:
        """A column that holds no text: messages, or a number that is put as one."""
        if isinstance(value, list | tuple):
            with reading(column, where):
                return read_messages(value)
        if isinstance(value, Mapping | bytes):
            kind = "a table" if isinstance(value, Mapping) else "bytes"
            raise KeelError(
                f"{where}: column {column!r} holds {kind}, not a text or messages: name another "
                "column in `prompt`"
            )
        return _text(format(value), where)

    def frame(self, body: Content, where: str) -> Content:
        """The body with the system message, if there is one."""
        if self.system is None:
            return body
        turns = [Message(role="user", content=body)] if isinstance(body, str) else list(body)
        if self.system and turns[0]["role"] == "system":
            raise KeelError(f"{where}: the messages begin with a system message: drop task.system")
        opening = [Message(role="system", content=self.system)] if self.system else []
        return (*opening, *turns)

    def _column(self, row: Mapping[str, Any]) -> str | None:
        """The column that the template is the name of, with or without braces."""
        if self.template in row:
            return self.template
        if self.template[:1] == "{" and self.template[-1:] == "}" and self.template[1:-1] in row:
            return self.template[1:-1]
        return None


@lru_cache(maxsize=256)
def names_of(template: str) -> tuple[str, ...]:
    """The columns that a format string names. Raises KeelError for one that is none."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise KeelError(f"prompt = {template!r}: {error}: write {{{{ for {{") from None
    fields = [field for _, field, _, _ in parts if field is not None]
    # Not a template: the name of a column, and a wrong one.
    return tuple(re.split(r"[.\[]", field)[0] for field in fields) or (template,)


def _text(text: str, where: str) -> str:
    if not text or text.isspace():
        raise KeelError(f"{where}: the prompt is empty: leave the row out, or fix `prompt`")
    if not encodable(text):
        raise KeelError(f"{where}: the prompt holds invalid UTF-8 (a lone surrogate): fix it")
    return text
