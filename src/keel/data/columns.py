"""Gold answers, messages and descriptions of tools in rows of data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, cast

from keel.data.tables import encodable
from keel.types import Content, KeelError, Message, Tools, text_of

ALIASES = {
    "messages": "conversations conversation dialogue dialog chat turns",
    "prompt": "question instruction query input problem user",
    "completion": "answer response output solution assistant reply",
    "text": "content document body",
    "chosen": "preferred accepted better response_chosen",
    "rejected": "dispreferred worse response_rejected",
}
"""Names that data sets give the columns that Keel reads: for hints."""
EXACT = 2**53
"""Up to here every whole number is a float."""


def read_gold(value: Any) -> Any:
    """The answer without what tables add; None if it is empty.

    NaN and a blank text are empty, and 14.0 is 14: a column of numbers with gaps holds floats. A
    list loses its empty entries. Raises ValueError with what the value holds instead of an answer.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        return _scalar(value)
    entries = map(_scalar, value)
    return [one for one in entries if one is not None] or None


def gold_entries(gold: Any) -> list[Any]:
    """The answers of what `read_gold` returns, any of which is right."""
    return gold if isinstance(gold, list) else [] if gold is None else [gold]


def shown_gold(value: Any) -> str | None:
    """A column's answers as a text to read; None if there are none."""
    try:
        golds = gold_entries(read_gold(value))
        return " or ".join(map(str, golds)) if golds else None
    except ValueError:
        return str(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, Mapping):
        raise ValueError(f"a table of {', '.join(map(str, value))[:80]}")
    if isinstance(value, list | tuple | set | bytes):
        raise ValueError(f"a {type(value).__name__} in it")
    if isinstance(value, float | Decimal):
        if math.isnan(value):
            return None
        return int(value) if -EXACT < value < EXACT and value % 1 == 0 else value
    return None if isinstance(value, str) and not value.strip() else value


def likely_column(name: str, columns: Iterable[Any]) -> str | None:
    """The column that is `name` or probably meant by it, if any is."""
    folded = {str(column).casefold(): str(column) for column in columns}
    return next((folded[n] for n in (name, *ALIASES.get(name, "").split()) if n in folded), None)


FORM = '[{"role": …, "content": …}, …], each content a text'
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Those that chat templates know, which may have others."""
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
"""The roles of ShareGPT's `{"from": …, "value": …}`."""


@contextmanager
def reading(column: str, where: str) -> Iterator[None]:
    """Inside, what a column holds instead of messages or tools is a KeelError."""
    try:
        yield
    except ValueError as error:
        raise KeelError(f"{where}: column {column!r} holds {error}") from None


def read_messages(value: Any) -> tuple[Message, ...]:
    """Messages with every key that they have, for the chat template.

    `content` is a text, or parts of text, which are joined; None or missing only next to
    `tool_calls`. ShareGPT's `from` and `value` become `role` and `content`. Raises ValueError with
    what the value holds instead.
    """
    turns = value if isinstance(value, list | tuple) else ()
    if not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(f"a list that is not of messages ({FORM})")
    return tuple(_message(turn, f"message {number}") for number, turn in enumerate(turns, 1))


def conversation_column(template: str, columns: Mapping[str, Any]) -> str | None:
    """The column of a row with a whole conversation that the prompt is taken from: the one that a
    template names, or, without a column `prompt`, the one that the default template means."""
    values = {name: parsed_messages(columns.get(name)) for name in ("messages", "conversations")}
    found = [name for name, value in values.items() if isinstance(value, list | tuple)]
    named = template.strip("{}")
    if named == "prompt" and named not in columns:
        return next(iter(found), None)
    return named if named in found else None


def asked_and_answered(value: Any) -> dict[str, Any]:
    """A conversation as a `prompt` and, if it ends with the assistant's turn, its `answer`.

    Raises ValueError with what the value holds instead of messages.
    """
    turns = read_messages(parsed_messages(value))
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        return {"prompt": turns}
    return {"prompt": turns[:-1], "answer": text_of(turns[-1])}


def parsed_messages(value: Any) -> Any:
    """The messages in a column that holds them as JSON text; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    turns = isinstance(found, list) and all(
        isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in found
    )
    return found if found and turns else value


def _message(turn: Mapping[str, Any], name: str) -> Message:
    message = dict(turn)
    if "role" not in turn and isinstance(turn.get("from"), str):
        sender = message.pop("from")
        if sender not in SHAREGPT:
            known = ", ".join(SHAREGPT)
            raise ValueError(f"{name} from {sender[:40]!r}: rename it to one of {known}")
        message = {"role": SHAREGPT[sender], "content": message.pop("value", None)} | message
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is not None and not (
        isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)
    ):
        raise ValueError(f"{name} with tool_calls that are not a list of objects: fix them")
    if isinstance(content, list | tuple):
        content = message["content"] = _joined(content, name)
    fine = isinstance(content, str) or (content is None and calls)
    if not fine or not isinstance(message.get("role"), str):
        keys = ", ".join(map(str, turn))[:80]
        raise ValueError(f"a list that is not of messages ({FORM}): {name} has the keys {keys}")
    role = message["role"]
    if role not in ROLES and (meant := role.strip().lower()) in ROLES:
        raise ValueError(f"{name} of role {role!r}: write {meant!r}")
    _check(message, name)
    return cast(Message, message)


def _joined(parts: Sequence[Any], name: str) -> str:
    """The text of content in parts."""
    texts = []
    for part in parts:
        part = part if isinstance(part, Mapping) else {"text": part}
        text, kind = part.get("text"), part.get("type", "text")
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"{name} with a part of type {str(kind)[:40]!r}: each content a text")
        texts.append(text)
    return "".join(texts)


def read_tools(value: Any) -> Tools:
    """Descriptions of tools: a list of JSON schemas, or JSON text; None and "" are no tools.

    Raises ValueError with what the value holds instead.
    """
    try:
        value = json.loads(value or "null") if isinstance(value, str) else value
        if isinstance(value, list):
            value = [json.loads(one) if isinstance(one, str) else one for one in value]
    except (ValueError, RecursionError):
        value = 0
    value = () if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError("no list of tools (JSON schemas), nor its JSON text: rename the column")
    _check(value, "a tool")
    return tuple(value)


def _check(value: Any, name: str) -> None:
    """Raise ValueError for what JSON or UTF-8 cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{name} with a value that JSON cannot hold: make it a text") from None
    if not encodable(text):
        raise ValueError("invalid UTF-8 (a lone surrogate): fix it")


def prompt_columns(content: Content, tools: Tools) -> dict[str, Any]:
    """A prompt as the columns of a row: `prompt`, and `tools` if there are any."""
    shown = content if isinstance(content, str) else [dict(turn) for turn in content]
    return {"prompt": shown, **({"tools": list(tools)} if tools else {})}
