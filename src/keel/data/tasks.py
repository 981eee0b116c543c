"""Tasks: what they have in common, those whose prompts are drawn, and those of stored rows."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np

from keel.config.fields import unknown
from keel.config.sources import TaskSource
from keel.data.columns import (
    asked_and_answered,
    conversation_column,
    gold_entries,
    likely_column,
    parsed_messages,
    read_gold,
    read_messages,
    read_tools,
    reading,
)
from keel.data.splits import Placed, position, read_splits, source_tables, split_of
from keel.data.tables import (
    Row,
    SourceRow,
    Table,
    all_bad,
    encodable,
    refuse_bad,
)
from keel.graders.formats import answer_part, same_text
from keel.runs.rows import LeftOut, Why
from keel.types import Completion, Content, KeelError, Message, Prompt, Split, Tools, one_line


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

    @property
    def replies(self) -> bool:
        """Whether the environment can answer the policy, which a task without `reply` cannot."""
        return type(self).reply is not BaseTask.reply


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
                meant = likely_column(name, row) or "question"
                raise KeelError(f'{other}: name the column in `prompt`, as prompt = "{{{meant}}}"')
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


ATTEMPTS = 5_000
"""Draws for one prompt until one falls on its split; nine in ten validation draws do not."""


class Generated(BaseTask):
    """A task that generates a question and its answer; the score is exact match, 1 or 0.

    The prompt at (seed, split, index) is the first of the draws seeded by
    `SeedSequence([seed, split, index, attempt])` whose text the hash puts on that split.
    """

    correctness = True

    def __init__(
        self, name: str, seed: int = 0, presentation: Presentation | None = None, **options: Any
    ) -> None:
        self.name = name
        self.seed = seed
        self.presentation = presentation or Presentation()
        self.configure(**options)

    def configure(self) -> None:
        """Take the options of the task: its keyword parameters."""

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A question and its answer."""
        raise NotImplementedError

    def columns(self, rng: np.random.Generator, split: Split, index: int) -> dict[str, Any]:
        """The columns of a prompt; `prompt` is the question."""
        question, answer = self.draw(rng)
        return {"prompt": question, "answer": answer}

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at an index. Raises KeelError if no draw falls on the split."""
        for attempt in range(ATTEMPTS):
            key = [self.seed, int(split == "validation"), index, attempt]
            rng = np.random.default_rng(np.random.SeedSequence(key))
            columns = self.columns(rng, split, index)
            if split_of(columns["prompt"]) == split:
                body = self.presentation.body(columns, self.name)
                content = self.presentation.frame(body, self.name)
                return Prompt(prompt_id(self.name, split, index), content, columns, self.name)
        raise KeelError(
            f"task {self.name!r}: none of {ATTEMPTS} draws is on the {split} split, since there "
            "are too few different prompts: widen its options"
        )

    def gold(self, prompt: Prompt) -> str | None:
        """The right answer."""
        return str(prompt.columns["answer"])

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """1 for the right answer and nothing but it, else 0."""
        stated = answer_part(completion.text, prompt.opening) or ""
        return float(stated.strip() == self.gold(prompt))


def check_range(where: str, **bounds: int) -> None:
    """The options are whole numbers from 1 on, in rising order. Raises KeelError."""
    last = 1
    for name, value in bounds.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < last:
            raise KeelError(f"{where}: {name} = {value!r}: give a whole number from {last} on")
        last = value


MAX_DIGITS = 18
"""Most digits of a number that fits into 64 bits."""


class Addition(Generated):
    """Add two numbers of at most `digits` digits: `27+5=` asks for `32`."""

    def configure(self, *, digits: int = 2) -> None:
        check_range(f"task {self.name!r}", digits=digits)
        if digits > MAX_DIGITS:
            raise KeelError(f"task {self.name!r}: digits = {digits}: give at most {MAX_DIGITS}")
        self.digits = digits

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length for each number, then the number, so that short ones are not rare."""
        lengths = [int(rng.integers(1, self.digits + 1)) for _ in range(2)]
        a, b = (int(rng.integers(0, 10**n)) for n in lengths)
        return f"{a}+{b}=", str(a + b)


class SortDigits(Generated):
    """Sort the digits: `7301>` asks for `0137`, with `separator` between them if one is set."""

    def configure(self, *, min_digits: int = 4, max_digits: int = 8, separator: str = "") -> None:
        self.separator = separator
        check_range(f"task {self.name!r}", min_digits=min_digits, max_digits=max_digits)
        self.min_digits = min_digits
        self.max_digits = max_digits

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length, then each digit, all equally likely."""
        length = int(rng.integers(self.min_digits, self.max_digits, endpoint=True))
        # Floats in one call: an order of magnitude cheaper here than `integers` of a size.
        digits = "".join(str(int(10 * u)) for u in rng.random(length).tolist())
        return f"{digits}>", self.separator.join(sorted(digits))


class Reverse(Generated):
    """Reverse the letters: `keel>` asks for `leek`."""

    def configure(self, *, min_letters: int = 3, max_letters: int = 8) -> None:
        check_range(f"task {self.name!r}", min_letters=min_letters, max_letters=max_letters)
        self.min_letters = min_letters
        self.max_letters = max_letters

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length, then each letter, all equally likely."""
        length = int(rng.integers(self.min_letters, self.max_letters, endpoint=True))
        letters = "".join(string.ascii_lowercase[int(26 * u)] for u in rng.random(length).tolist())
        return f"{letters}>", letters[::-1]


GENERATORS: dict[str, type[Generated]] = {
    "addition": Addition,
    "reverse": Reverse,
    "sort_digits": SortDigits,
}

MISTAKE_SHARE = 0.6
"""How often the careless teacher makes its mistake."""


def gold(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer itself."""
    return gold


def careless(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer with, in six of ten, one and the same mistake: first and last exchanged.

    Imitation takes the mistake over as well; a verifier does not.
    """
    if rng.random() < MISTAKE_SHARE and len(gold) > 1:
        return gold[-1] + gold[1:-1] + gold[0]
    return gold


@dataclass(frozen=True, slots=True)
class StoredExample:
    """One row, ready: where it stands, its prompt and its tools."""

    row: SourceRow
    body: Content
    tools: Tools = ()


class DataTask(BaseTask):
    """Rows on two splits.

    `sources` names the file of each. `left_out` are the rows that are in neither split: bad ones,
    and train rows whose prompt is also in the validation split (`overlap` counts these). If an
    answer column is set, the reward is exact match with its text, or with any entry of its list,
    ignoring blanks at the ends. Of a column of whole conversations (`conversation`) the last turn
    is the answer if it is the assistant's, and the turns before it are the prompt.
    """

    correctness = True

    def __init__(
        self, name: str, source: TaskSource, train: Table, validation: Table | None = None
    ) -> None:
        self.name = name
        first = train.rows[0].values if train.rows else {}
        self.conversation = conversation_column(source.prompt, first)
        self.answer = self.named_answer = source.answer
        template = source.prompt
        if self.conversation is not None:
            template = "{prompt}"
            if self.answer is None and _answered(train, self.conversation):
                self.answer = "answer"
        self.presentation = Presentation(template, source.system)
        found = read_splits(source, (train, validation), self._placed, name, "tasks")
        self.splits: Mapping[Split, Sequence[StoredExample]]
        self.splits = {"train": found.train, "validation": found.validation}
        self.sources: Mapping[Split, str]
        self.sources = {"train": train.source, "validation": (validation or train).source}
        self.left_out, self.overlap = found.left_out, found.overlap

    def _placed(self, row: SourceRow, held: bool) -> Placed[StoredExample]:
        name = self.conversation
        if name is not None and name in row.values:
            with reading(name, row.place):
                made = asked_and_answered(row.values[name])
            if self.named_answer is None and self.answer is not None and "answer" not in made:
                raise KeelError(
                    f"{row.place}: column {name!r} does not end with the assistant's turn"
                )
            kept = {**made, **row.values} if self.named_answer else {**row.values, **made}
            row = replace(row, values={**kept, "prompt": made["prompt"]})
        if self.answer is not None:
            _check_answer(row.values, self.answer, row.place)
        body = self.presentation.body(row.values, row.place)
        self.presentation.frame(body, row.place)
        with reading("tools", row.place):
            tools = read_tools(row.values.get("tools"))
        at = position(body)
        return Placed(StoredExample(row, body, tools), row, at, at)

    def validate_on_all(self) -> None:
        """Put every row into both splits, in the order of the file: nothing is trained."""
        rows = [entry for split in self.splits.values() for entry in split]
        every = sorted(rows, key=lambda entry: entry.row.number)
        self.splits = {"train": every, "validation": every}

    def size(self, split: Split) -> int:
        """How many rows the split has."""
        return len(self.splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        """The row at an index; its id holds the row's number in its file."""
        entry = self.splits[split][index]
        columns = dict(entry.row.values)
        if self.answer is not None:
            columns["answer"] = read_gold(_gold(entry.row.values, self.answer))
        content = self.presentation.frame(entry.body, self.name)
        id = prompt_id(self.name, split, entry.row.number)
        return Prompt(id, content, columns, self.name, tools=entry.tools)

    def refused(
        self, wrong: Callable[[Prompt], tuple[str, Why] | None], forgiven: bool
    ) -> list[LeftOut]:
        """The rows whose prompts will not do; `wrong` says of a prompt what is wrong with it.

        Raises KeelError for bad ones unless they are forgiven, and if no train prompt is left.
        """
        found: list[LeftOut] = []
        for split, entries in self.splits.items():
            before = len(found)
            for index, entry in enumerate(entries):
                if (problem := wrong(self.prompt(split, index))) is not None:
                    found.append(entry.row.left_out(*problem))
            bad = [row for row in found[before:] if row.why == "bad"]
            if not forgiven:
                refuse_bad(bad, "tasks")
            if split == "train" and bad and len(found) == len(entries):
                raise all_bad(self.sources[split], bad)
        return found

    def gold(self, prompt: Prompt) -> str | None:
        """The text of the answer column, of a list its first entry."""
        golds = gold_entries(prompt.columns["answer"]) if self.answer is not None else []
        return str(golds[0]) if golds else None

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """1 for a gold answer and nothing but it, else 0."""
        if self.answer is None:
            return None
        stated = answer_part(completion.text, prompt.opening)
        golds = gold_entries(prompt.columns["answer"])
        return float(stated is not None and any(same_text(stated, str(gold)) for gold in golds))


def _answered(table: Table, column: str) -> bool:
    """Whether a conversation of the table ends with the assistant's turn."""
    for row in table.rows:
        with suppress(ValueError):  # a bad row
            if "answer" in asked_and_answered(row.values.get(column)):
                return True
    return False


def data_task(source: TaskSource) -> DataTask:
    """The task of a file or `datasets` name. Raises KeelError, naming file and line."""
    tables = source_tables(source, f"task {source.name!r}: task.path is not set")
    return DataTask(f"{source.name}:{Path(str(source.path)).stem}", source, *tables)


def _gold(row: Row, answer: str) -> Any:
    """The value of the answer column, or of a key of its table or tables: `answers.text`."""
    column, _, key = answer.partition(".")
    inner = row.get(column)
    if answer in row or not key:
        return row.get(answer)
    if isinstance(inner, list | tuple):
        found = [_gold(one, key) for one in inner if isinstance(one, Mapping)]
        return [gold for one in found for gold in (one if isinstance(one, list) else [one])]
    return _gold(inner, key) if isinstance(inner, Mapping) else None


def _check_answer(row: Row, answer: str, place: str) -> None:
    column = f"{place}: the answer column {answer!r}"
    value = _gold(row, answer)
    table = value[0] if isinstance(value, list) and value else value
    if isinstance(table, Mapping):
        key = next((str(k) for k, v in table.items() if isinstance(v, str | list)), "KEY")
        keys = ", ".join(map(str, table))[:80]
        raise KeelError(f"{column} is a table of {keys}: name a key: answer = '{answer}.{key}'")
    try:
        golds = gold_entries(read_gold(value))
        texts = [str(gold) for gold in golds]
    except Exception as error:  # also of a value's own class, or of too many digits
        message = one_line(error)[:300]
        raise KeelError(f"{column} is not a text or a list of texts: {message}") from None
    if not golds:
        raise KeelError(_no_answer(place, answer, row))
    pairs = zip(golds, texts, strict=True)
    if not all((text or isinstance(gold, str)) and encodable(text) for gold, text in pairs):
        raise KeelError(f"{column} is not a text: leave the row out")


def _no_answer(place: str, name: str, columns: Row) -> str:
    column, _, key = name.partition(".")
    while key and isinstance(columns.get(column), Mapping):
        columns = columns[column]
        column, _, key = key.partition(".")
    if name in columns or column in columns:
        return f"{place}: the answer column {name!r} is empty: leave the row out"
    return f"{place}: {unknown('answer column', column, columns)}"
