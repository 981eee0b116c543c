"""Rows of published and of TRL's forms, each as records of the store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.data import judged_rows as judged
from keel.data.judged_rows import Fields, finite, last_turn
from keel.preferences.records import (
    CompletionRecord,
    LabelRecord,
    PairRecord,
    PromptRecord,
    Record,
    Source,
    StepsRecord,
)
from keel.types import Content, KeelError, Message


@dataclass(frozen=True, slots=True)
class Attribution:
    """Whom the labels are of, in which round, and whether empty answers are kept."""

    source: Source = "human"
    annotator: str = ""
    round: int = 0
    keep_empty: bool = False


class EmptyAnswer(KeelError):
    """A row with a blank answer, which is left out."""


def read_trl(fields: Fields, by: Attribution) -> Iterator[Record]:
    """`prompt`, `chosen`, `rejected`, `probability`, `margin`; other columns stay with the pair."""
    found = judged.pair(fields, "")
    # 1 − (1 − p), as the rejected answer's share rounds: a row that is exported reads back equal.
    value = found.probability if found.probability >= 0.5 else 1 - (1 - found.probability)
    answers = answer_records(fields, by, found.prompt, (found.chosen, found.rejected))
    columns = _others(fields, judged.PAIR)
    yield from compared(*answers, value, by, margin=found.margin, columns=columns)


def read_steps(fields: Fields, by: Attribution) -> Iterator[Record]:
    """`prompt`, `completions`, `labels`, or `steps` and the first wrong one."""
    found = judged.stepwise(fields, "")
    if not by.keep_empty and not "".join(found.steps).strip():
        raise EmptyAnswer(f"{fields.place}: an answer is empty")
    prompt = PromptRecord(found.prompt, fields.tools_column())
    columns = _others(fields, judged.STEPWISE)
    who = (by.source, by.annotator, "", by.round)
    yield from (
        prompt,
        StepsRecord(prompt.id, found.steps, found.labels, *who, columns=columns),
    )


HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TURN = re.compile(f"({HUMAN}|{ASSISTANT})")


def read_hh(fields: Fields, by: Attribution) -> Iterator[Record]:
    """HH-RLHF's `chosen` and `rejected`: whole transcripts, cut at the last turn both begin."""
    texts = [fields.answer(name) for name in ("chosen", "rejected")]
    chosen, rejected = (text if isinstance(text, str) else "" for text in texts)
    ends = (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    common = chosen[: next(ends, min(len(chosen), len(rejected)))]
    at = common.rfind(ASSISTANT)
    if at < 0:
        raise fields.wrong("rejected", f"it shares no {ASSISTANT!r} with 'chosen'")
    cut = at + len(ASSISTANT)
    answers = [text[cut:].strip() for text in (chosen, rejected)]
    for name, text in zip(("chosen", "rejected"), (chosen[cut:], rejected[cut:]), strict=True):
        if _TURN.search(text):
            raise fields.wrong(name, "the transcripts differ before their last turn")
    if answers[0] == answers[1]:
        raise fields.wrong("rejected", "it is the same as 'chosen'")
    head, *parts = _TURN.split(common[:at])
    if head.strip() or not parts:
        raise fields.wrong("chosen", f"give a transcript that begins with {HUMAN!r}")
    roles = {HUMAN: "user", ASSISTANT: "assistant"}
    turns = tuple(
        Message(role=roles[mark], content=text.strip())
        for mark, text in zip(parts[::2], parts[1::2], strict=True)
    )
    yield from compared(*answer_records(fields, by, turns, answers), 1.0, by)


def read_ultrafeedback(fields: Fields, by: Attribution) -> Iterator[Record]:
    """UltraFeedback: several scored completions, or `chosen` and `rejected` with their scores.

    Every two completions of different texts are a pair. The better score wins; equal ones are a
    tie. A completion's score is `fine-grained_score`, the mean of its aspects, or `overall_score`.
    """
    if fields.there("chosen"):
        names = ("chosen", "rejected")
        prompt, texts = last_turn(
            fields, names, fields.prompt("prompt") if fields.has("prompt") else None
        )
        scores = [_score(fields, f"score_{name}") for name in names]
        columns = [{"score": score} for score in scores]
        answers = answer_records(fields, by, prompt, texts, columns=columns)
        yield from compared(*answers, _better(*scores), by)
        return
    prompt, rows = fields.prompt("instruction"), fields.value("completions")
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise fields.wrong("completions", "give a list of completions")
    if len(rows) < 2:
        raise fields.wrong("completions", "one completion is not a pair: leave the row out")
    parts = [Fields(row, f"{fields.place}: completion {n}") for n, row in enumerate(rows, 1)]
    scores = [_score(part, part.first("fine-grained_score", "overall_score")) for part in parts]
    models = [str(part.row.get("model") or "") for part in parts]
    columns = [{"score": score} for score in scores]
    texts = [read_text(part, "response") for part in parts]
    head, found = answer_records(fields, by, prompt, texts, models, columns)
    for at, first in enumerate(found):
        for other in range(at + 1, len(found)):
            if first.text != found[other].text:
                value = _better(scores[at], scores[other])
                yield from compared(head, (first, found[other]), value, by)


ASPECTS = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


class HelpSteerReader:
    """HelpSteer and HelpSteer2: scored responses, of which those to one prompt are pairs.

    The more helpful wins; equal helpfulness is a tie. The scores stay with the completion.
    """

    def __init__(self) -> None:
        self._earlier: dict[str, list[tuple[CompletionRecord, float]]] = {}

    def __call__(self, fields: Fields, by: Attribution) -> Iterator[Record]:
        scores = {name: _score(fields, name) for name in ASPECTS}
        prompt = _turns(fields.prompt("prompt"))
        texts = [read_text(fields, "response")]
        head, (found,) = answer_records(fields, by, prompt, texts, columns=[scores])
        yield from (head, found)
        earlier = self._earlier.setdefault(head.id, [])
        for other, score in earlier:
            if other.text == found.text:
                continue
            yield from compared(head, (other, found), _better(score, scores["helpfulness"]), by)
        earlier.append((found, scores["helpfulness"]))


STRENGTH = 3
"""Of a preference: −3 is that the first response is much better, 3 that the second is."""


def read_helpsteer_preference(fields: Fields, by: Attribution) -> Iterator[Record]:
    """HelpSteer2-Preference and HelpSteer3: two responses and how far one is preferred.

    P(the first is better) = ½ − strength / 6, so that a slight preference is a soft label.
    """
    column = fields.first("preference_strength", "overall_preference")
    strength = _score(fields, column)
    if abs(strength) > STRENGTH:
        raise fields.wrong(column, f"give a number from -{STRENGTH} to {STRENGTH}")
    prompt = _turns(fields.prompt(fields.first("prompt", "context")))
    names = (fields.first("response_1", "response1"), fields.first("response_2", "response2"))
    answers = answer_records(fields, by, prompt, [read_text(fields, name) for name in names])
    columns = {"preference_strength": strength}
    value = 0.5 - strength / (2 * STRENGTH)
    yield from compared(*answers, value, by, columns=columns, shown=True)


# ---------------------------------------------------------------- parts of a row


def answer_records(
    fields: Fields,
    by: Attribution,
    prompt: Content,
    texts: Sequence[str],
    models: Sequence[str] = (),
    columns: Sequence[Mapping[str, Any]] = (),
) -> tuple[PromptRecord, list[CompletionRecord]]:
    """The prompt's record and that of each answer."""
    if not by.keep_empty and not all(text.strip() for text in texts):
        raise EmptyAnswer(f"{fields.place}: an answer is empty")
    head = PromptRecord(prompt, fields.tools_column())
    return head, [
        CompletionRecord(
            head.id,
            text,
            models[at] if models else "",
            round=by.round,
            columns=columns[at] if columns else {},
        )
        for at, text in enumerate(texts)
    ]


def compared(
    prompt: PromptRecord,
    answers: Sequence[CompletionRecord],
    value: float,
    by: Attribution,
    *,
    margin: float = 0.0,
    columns: Mapping[str, Any] | None = None,
    shown: bool = False,
) -> Iterator[Record]:
    """The records of two answers compared.

    `value` is P(the one given first is better); `shown` says that it was shown first.

    Which is the pair's first depends on the answers alone: the place says nothing about the
    winner, and rows that disagree are labels of the same pair.
    """
    one, other = answers
    if one.text == other.text and value != 0.5:
        raise KeelError("the two answers are the same text, and no tie: leave the row out")
    swapped = one.id > other.id
    first, second = (other, one) if swapped else (one, other)
    pair = PairRecord(prompt.id, first.id, second.id, by.round, columns=columns or {})
    if pair.columns.get("id") == pair.id:
        pair = PairRecord(prompt.id, first.id, second.id, by.round)
    side = ("second" if swapped else "first") if shown else None
    yield from (prompt, first, second, pair)
    yield LabelRecord(
        pair.id,
        1 - value if swapped else value,
        by.source,
        by.annotator,
        round=by.round,
        margin=-margin if swapped else margin,
        shown_first=side,  # type: ignore[arg-type]
    )


def _others(fields: Fields, known: Sequence[str]) -> dict[str, Any]:
    """The columns that the kind has no meaning for, without empty ones."""
    own = {fields.names.get(name, name) for name in known}
    found = {k: v for k, v in fields.row.items() if k not in own and v is not None}
    for name, value in found.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise fields.wrong(name, "no JSON: drop the column, or make it a text") from None
    return found


def read_text(fields: Fields, name: str) -> str:
    """A column's text."""
    found = fields.answer(name)
    if not isinstance(found, str):
        raise fields.wrong(name, "give a text")
    return found


def _score(fields: Fields, name: str) -> float:
    found = finite(fields.value(name))
    if found is None:
        raise fields.wrong(name, "give a finite number")
    return found


def _better(one: float, other: float) -> float:
    """P(the first is better) of two scores: 1, 0 or a tie."""
    return 0.5 if one == other else float(one > other)


_MARK = re.compile(r"\n*<extra_id_1>(User|Assistant)\n")


def _turns(prompt: Content) -> Content:
    """Messages of a HelpSteer2 prompt of several turns; any other stays as it is."""
    if not isinstance(prompt, str) or not _MARK.search(prompt):
        return prompt
    first, *parts = _MARK.split(prompt)
    return (
        Message(role="user", content=first),
        *(
            Message(role=role.lower(), content=text)
            for role, text in zip(parts[::2], parts[1::2], strict=True)
        ),
    )
