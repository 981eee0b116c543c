"""What tasks have in common: defaults of the protocol, the two sides, and how a prompt is put."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from keel.config.suggest import unknown
from keel.types import Completion, Content, KeelError, Message, Prompt, Side

HELDOUT_SHARE = 0.1
"""Share of the contents that the held-out side of an endless task gets."""


class BaseTask:
    """A task that cannot tell anything; tasks override what they know."""

    name: str

    def size(self, side: Side) -> int | None:
        """Endless."""
        return None

    def prompt(self, side: Side, index: int) -> Prompt:
        """The prompt at an index; every task has its own."""
        raise NotImplementedError

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """No verdict."""
        return None

    def gold(self, prompt: Prompt) -> str | None:
        """No answer known."""
        return None

    def reply(self, prompt: Prompt, text: str) -> str | None:
        """The environment says nothing: the conversation ends."""
        return None


def position(content: Content) -> float:
    """Where a content lies in [0, 1), by SHA-256: what decides its side, whatever the order."""
    text = content if isinstance(content, str) else json.dumps(list(content), sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2.0**48


def side_of(content: Content, heldout_share: float = HELDOUT_SHARE) -> Side:
    """The side that a content is on, by its hash; so the sides never overlap."""
    return "heldout" if position(content) < heldout_share else "train"


def side_and_index(prompt: Prompt) -> tuple[Side, int]:
    """The address in a prompt's id, `NAME/SIDE/INDEX`."""
    _, side, index = prompt.id.rsplit("/", 2)
    return ("heldout" if side == "heldout" else "train"), int(index)


@dataclass(frozen=True, slots=True)
class Presentation:
    """How a row becomes what the policy reads.

    `template` is a format string over the row's columns, or the name of a column; one that holds
    messages is taken as they are. `system` makes the prompt a conversation, with that system
    message or, where it is empty, with none.
    """

    template: str = "{prompt}"
    system: str | None = None

    def body(self, row: Mapping[str, Any], where: str) -> Content:
        """The prompt without the system message. Raises KeelError that begins with `where`."""
        self._check(row, where)
        column = self._column(row)
        if column is not None and isinstance(row[column], list | tuple):
            return _messages(row[column], column, where)
        template = self.template if column is None else f"{{{column}}}"
        try:
            text = template.format_map(row)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise KeelError(f"{where}: prompt = {self.template!r} fails: {error}") from None
        if not text.strip():
            raise KeelError(f"{where}: the prompt is empty: leave the row out, or mend `prompt`")
        return text

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
        bare = self.template.removeprefix("{").removesuffix("}")
        if self.template in (bare, f"{{{bare}}}") and bare in row:
            return bare
        return None

    def _check(self, row: Mapping[str, Any], where: str) -> None:
        """Every column that the template names is there and holds something."""
        try:
            fields = [field for _, field, _, _ in Formatter().parse(self.template)]
        except ValueError as error:
            raise KeelError(f"prompt = {self.template!r}: {error}: write {{{{ for {{") from None
        names = [f.split(".")[0].split("[")[0] for f in fields if f is not None]
        if not names:
            # Not a template: the name of a column, and a wrong one.
            names = [self.template]
        for name in names:
            if name not in row:
                raise KeelError(f"{where}: {unknown('column', name, row)}")
            if row[name] is None:
                raise KeelError(f"{where}: column {name!r} is empty: leave the row out")


def _messages(value: Any, column: str, where: str) -> tuple[Message, ...]:
    turns = list(value)
    fine = [
        isinstance(turn, Mapping)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in turns
    ]
    if not turns or not all(fine):
        raise KeelError(
            f"{where}: column {column!r} holds a list that is not of messages "
            '([{"role": …, "content": …}, …]): name another column in `prompt`'
        )
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)
