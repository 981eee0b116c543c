"""Reading the verdict in a judge's reply, or why there is none; never a guess."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.rewards.judge.prompts import Question
from keel.rewards.judge.store import StoredAnswer

FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The `value` of the verdict and the `reason` for it; or None, and what is `wrong`."""

    value: int | str | None = None
    reason: str = ""
    wrong: str = ""


def parse(answer: StoredAnswer, question: Question) -> ParsedReply:
    """Parse a reply: one JSON object that has the key with one of its values.

    It may be in a code fence, and follow reasoning that ends with `</think>`.
    """
    if answer.refusal:
        return ParsedReply(wrong=f"refused: {answer.refusal}")
    if answer.finish == "length":
        return ParsedReply(wrong="cut off at max_tokens")
    text = answer.text.strip()
    if not text.startswith(("{", "```")):  # or the reason may contain it
        text = text.rpartition(THOUGHT)[2].strip()
    fenced = FENCE.fullmatch(text)
    try:
        found = json.loads(
            fenced[1] if fenced else text,
            object_pairs_hook=_once,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError):
        return ParsedReply(wrong=f"not one JSON object: {text!r:.80}")
    if not isinstance(found, dict) or question.key not in found:
        return ParsedReply(wrong=f"no {question.key!r} in {text!r:.80}")
    value = _known(found[question.key], question.values)
    if value is None:
        return ParsedReply(
            wrong=f"{question.key} = {found[question.key]!r:.60} is none of the choices"
        )
    reason = found.get("reason")
    return ParsedReply(value, reason if isinstance(reason, str) else "")


def _known(value: Any, values: Sequence[int | str]) -> int | str | None:
    """The choice that equals a value: neither true for 1 nor "7" for 7, but 7.0 for 7."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int | str) and value in values else None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object without repeated keys."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
