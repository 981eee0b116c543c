"""Files of published and of TRL's forms into the store, and its labels as rows of TRL's form."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.fields import BadRows
from keel.data import judged_rows as judged
from keel.data.columns import prompt_columns
from keel.data.judged_rows import Fields, finite, last_turn
from keel.data.tables import Table, all_bad, read_file, refuse_bad
from keel.platform.files import write_bytes
from keel.preferences.records import (
    CompletionRecord,
    JudgedPair,
    LabelRecord,
    PairRecord,
    PromptRecord,
    Record,
    Source,
    StepsRecord,
    mean_label,
)
from keel.preferences.store import PreferenceStore
from keel.runs.rows import LeftOut, Why, write_quarantine
from keel.runs.values import record_line
from keel.types import Content, KeelError, Message, one_line


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


# ---------------------------------------------------------------- into the store

Read = Callable[[Fields, Attribution], Iterator[Record]]
READERS: Mapping[str, Callable[[], Read]] = {
    "trl": lambda: read_trl,
    "steps": lambda: read_steps,
    "hh": lambda: read_hh,
    "ultrafeedback": lambda: read_ultrafeedback,
    "helpsteer": HelpSteerReader,
    "helpsteer-preference": lambda: read_helpsteer_preference,
}
"""What makes the reader of each kind; a new one for each file."""
DEFAULTS: Mapping[str, tuple[Source, str]] = {"ultrafeedback": ("judge", "gpt-4")}
"""Source and annotator of the kinds that no person labelled."""
BATCH = 500
"""Rows of a transaction: annotators wait for it at most."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did: rows read, rows left out, and new records by table.

    `repeated` are judgements (labels, or answers in steps) that were there already, in the store or
    earlier in the file.
    """

    rows: int
    left_out: tuple[LeftOut, ...]
    added: dict[str, int]
    repeated: int


def import_file(
    store: PreferenceStore,
    kind: str,
    path: Path,
    by: Attribution,
    bad_rows: BadRows = "quarantine",
) -> ImportReport:
    """Add a file (JSONL or Parquet) of one of `READERS`.

    An import that was interrupted is completed by another: what is there is not added twice.
    Raises KeelError if the file cannot be read, or none of its rows; with `bad_rows` "stop" also
    for any row that cannot be read, and then nothing is added.
    """
    table = read_file(path, bad_rows)
    left = list(table.bad)
    parsed = _parsed(table, READERS[kind](), by, left)
    if bad_rows == "stop":
        parsed = iter(list(parsed))
        refuse_bad(left)
    rows = judgements = 0
    added: Counter[str] = Counter()
    batch: list[Record] = []
    for records in parsed:
        rows += 1
        judgements += sum(isinstance(record, LabelRecord | StepsRecord) for record in records)
        batch += records
        if rows % BATCH == 0:
            added.update(_add(store, batch))
            batch = []
    if not rows and left:
        raise all_bad(str(path), left)
    added.update(_add(store, batch))
    repeated = judgements - added["labels"] - added["steps"]
    return ImportReport(rows, tuple(left), dict(added), repeated)


def _parsed(
    table: Table, read: Read, by: Attribution, left: list[LeftOut]
) -> Iterator[list[Record]]:
    """The records of each row that can be read; the others are added to `left`."""
    for row in table.rows:
        try:
            yield list(read(Fields(row.values, row.place), by))
        except KeelError as error:
            why: Why = "empty" if isinstance(error, EmptyAnswer) else "bad"
            left.append(row.left_out(str(error), why))


def _add(store: PreferenceStore, batch: Iterable[Record]) -> dict[str, int]:
    """Add what several rows share, such as a prompt, once."""
    return store.add({(type(record), record.id): record for record in batch}.values())


def write_left_out(store: Path, source: Path, report: ImportReport) -> Path | None:
    """List the rows of a file that were left out, as `runs.rows` does.

    Returns the list's file, or None if there are none.
    """
    mark = hashlib.sha256(str(source.resolve()).encode("utf-8", "replace")).hexdigest()[:8]
    target = store.with_name(f"{store.name}.quarantine") / f"{source.stem}-{mark}.jsonl"
    write_quarantine(target, report.left_out)
    return target if report.left_out else None


# ---------------------------------------------------------------- out of it


@dataclass(frozen=True, slots=True)
class Selection:
    """Which labels count: of these sources, rounds and annotators; of all if None."""

    sources: Collection[Source] | None = None
    rounds: Collection[int] | None = None
    annotators: Collection[str] | None = None

    def takes(self, label: Any) -> bool:
        """Whether a label (or labelled steps) is one of them."""
        return (
            (self.sources is None or label.source in self.sources)
            and (self.rounds is None or label.round in self.rounds)
            and (self.annotators is None or label.annotator in self.annotators)
        )


def preference_rows(
    store: PreferenceStore, selection: Selection = Selection()
) -> Iterator[dict[str, Any]]:
    """A row of `id/prompt/chosen/rejected/probability` for each pair with a label that counts.

    `probability` is the mean of the labels' values; `chosen` is the answer with ½ or more, the
    first if both have ½. `margin` is there if it is not 0. Columns of the pair follow.
    """
    for pair in store.judged_pairs():
        found = mean_label(label for label in pair.labels if selection.takes(label))
        if found is not None:
            yield _preference(pair, *found)


def steps_rows(
    store: PreferenceStore, selection: Selection = Selection()
) -> Iterator[dict[str, Any]]:
    """A row of `prompt/completions/labels` for each answer in labelled steps that counts."""
    for record in store.steps():
        if selection.takes(record):
            prompt = store.prompt(record.prompt)
            yield {
                **prompt_columns(prompt.content, prompt.tools),
                "completions": list(record.steps),
                "labels": list(record.labels),
                **record.columns,
            }


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as Parquet if the name ends so, else as JSONL, whole or not at all.

    Returns how many. Raises KeelError if there is none, or Parquet cannot hold them.
    """
    every = list(rows)
    if not every:
        raise KeelError(f"{out}: nothing to write: no label is of this source, round and annotator")
    if out.suffix == ".parquet":
        write_bytes(out, _parquet(out, every))
    else:
        write_bytes(out, b"".join(record_line(row, {}) for row in every))
    return len(every)


def _parquet(out: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        file = io.BytesIO()
        parquet.write_table(table, file)
    except pyarrow.ArrowException as error:
        raise KeelError(
            f"{out}: a column has values of several types ({one_line(error)}): name a .jsonl file"
        ) from None
    return file.getvalue()


def _preference(judged: JudgedPair, value: float, margin: float) -> dict[str, Any]:
    first = value >= 0.5
    chosen, rejected = judged.first.text, judged.second.text
    columns = judged.pair.columns
    row = {
        "id": columns.get("id", judged.pair.id),
        **prompt_columns(judged.prompt.content, judged.prompt.tools),
        "chosen": chosen if first else rejected,
        "rejected": rejected if first else chosen,
        "probability": value if first else 1 - value,
        **({"margin": margin if first else -margin} if margin else {}),
    }
    return row | {name: columns[name] for name in columns if name not in row}
