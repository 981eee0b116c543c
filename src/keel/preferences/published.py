"""Published preference data (PandaLM, LLMBar), read into pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.config.fields import BadRows, unknown
from keel.data.preferences.schema import Origin, Preference
from keel.data.tables import Gathered
from keel.preferences.agreement import Agreement, Bootstrap, cohen_kappa, percent_agreement
from keel.runs.quarantine import LeftOut
from keel.types import KeelError

TIE, FIRST, SECOND = 0, 1, 2
"""A verdict: neither answer, the one that stood first, the one that stood second."""


@dataclass(frozen=True, slots=True)
class Annotated:
    """Two answers in the order in which they were shown, and each judge's verdict."""

    id: str
    prompt: str
    answers: tuple[str, str]
    votes: tuple[int, ...]
    origin: Origin | None = field(default=None, compare=False, repr=False)

    @property
    def share(self) -> float:
        """The share of the votes for the first answer; a tie is half a vote for each."""
        return sum({FIRST: 1.0, TIE: 0.5, SECOND: 0.0}[v] for v in self.votes) / len(self.votes)

    @property
    def majority(self) -> int | None:
        """The verdict of more than half of the judges; None where there is none."""
        verdict, count = Counter(self.votes).most_common(1)[0]
        return verdict if 2 * count > len(self.votes) else None

    @property
    def is_empty(self) -> bool:
        """Whether one of the answers is blank."""
        return not all(answer.strip() for answer in self.answers)

    def preference(self) -> Preference:
        """The answer with more of the votes as `chosen`, the first where they have the same."""
        first, second = self.answers
        if self.share < 0.5:
            return Preference(self.id, self.prompt, second, first, 1.0 - self.share)
        return Preference(self.id, self.prompt, first, second, self.share)

    def row(self) -> dict[str, Any]:
        """One line of JSONL; `first` says which answer stood first, as the votes count them."""
        pair = self.preference()
        return {
            "id": pair.id,
            "prompt": pair.prompt,
            "chosen": pair.chosen,
            "rejected": pair.rejected,
            "probability": pair.probability,
            "first": "rejected" if self.share < 0.5 else "chosen",
            "votes": list(self.votes),
        }


@dataclass(frozen=True, slots=True)
class Imported:
    """What a published file holds; `read_as_text` counts answers that were true or false.

    `bad` are the rows that could not be read.
    """

    rows: tuple[Annotated, ...]
    read_as_text: int = 0
    bad: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of one row of a published file, to be checked."""

    path: Path
    number: int
    row: Mapping[str, Any]

    @property
    def origin(self) -> Origin:
        """Where the row stands."""
        return Origin(str(self.path), ": row ", self.number, self.row)

    def get(self, column: str) -> Any:
        """What the column holds. Raises KeelError where there is no such column."""
        if column not in self.row:
            raise KeelError(
                f"{self.path}: row {self.number}: {unknown('column', column, self.row)}"
            )
        return self.row[column]

    def text(self, column: str) -> str:
        """The column's text. A JSON true is the text True, which a table program turned into it."""
        value = self.get(column)
        if isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self.wrong(column, "is not a text")
        return value

    def verdict(self, column: str, allowed: Sequence[int]) -> int:
        """A verdict as a whole number."""
        value = self.get(column)
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            raise self.wrong(column, f"is none of {', '.join(map(str, allowed))}")
        return value

    def wrong(self, column: str, why: str) -> KeelError:
        """The column is refused."""
        return KeelError(
            f"{self.path}: row {self.number}: {column} = {self.row[column]!r} {why}: "
            "fix the file, or download it again"
        )


def read_cells(path: Path, what: str) -> list[Cell]:
    """The rows of a JSON file that holds a list of objects, counted from 1; `what` it should be.

    Raises:
        KeelError: no such file, not JSON, or something else in it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise KeelError(f"{path}: there is no such file: give {what}") from None
    except OSError as error:
        raise KeelError(f"{path}: cannot be read: {error.strerror}: give {what}") from None
    except UnicodeDecodeError as error:
        raise KeelError(f"{path}: not UTF-8 text ({error.reason}): give {what}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise KeelError(f"{path}: not JSON: {error.msg} at {where}: give {what}") from None
    if not isinstance(found, list) or not found:
        kind = "an empty list" if found == [] else f"a JSON {type(found).__name__}"
        raise KeelError(f"{path}: {kind}, not a list of rows: give {what}")
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise KeelError(f"{path}: row {number}: a JSON {kind}, not an object: give {what}")
    return [Cell(path, number, row) for number, row in enumerate(found, start=1)]


def _rows(
    path: Path, what: str, make: Callable[[Cell], Annotated], bad: Gathered
) -> list[Annotated]:
    """The rows of a published file, those that cannot be read taken by `bad`."""
    rows = []
    for cell in read_cells(path, what):
        try:
            rows.append(make(cell))
        except KeelError as error:
            bad.rows.append(cell.origin.left_out(str(error)))
    return rows


SETS = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")
AS_PUBLISHED = "dataset.json"
"""The one name that every set's file has where it was published; its folder names the set."""


def read_llmbar(path: Path, bad_rows: BadRows = "stop") -> Imported:
    """One file, or those under a folder; the label is the one vote.

    Of a folder with the published layout (`Natural/dataset.json`) only files of that name are read,
    since models' verdicts are next to them, and only LLMBar's own sets where there are any; of any
    other folder every `*.json`. Raises KeelError.
    """
    if not path.is_dir():
        return _files([path], bad_rows)
    files = sorted(path.rglob(AS_PUBLISHED)) or sorted(path.rglob("*.json"))
    if not files:
        raise KeelError(f"{path}: holds no *.json: give LLMBar's folder or one of its files")
    if files[0].name == AS_PUBLISHED:
        files = [file for file in files if _set(file) in SETS] or files
    first: dict[str, Path] = {}
    for file in files:
        if first.setdefault(_set(file), file) is not file:
            name = _set(file)
            raise KeelError(f"{file}: the set {name!r} is in {first[name]} as well: move one away")
    return _files(files, bad_rows)


def is_llmbar(folder: Path) -> bool:
    """Whether the folder holds the natural set, as one file or with the published layout."""
    names = ("Natural.json", f"Natural/{AS_PUBLISHED}")
    inside = any(True for name in names for _ in folder.rglob(name))
    return inside or (_set(folder / AS_PUBLISHED) in SETS and (folder / AS_PUBLISHED).is_file())


def _set(path: Path) -> str:
    return path.resolve().parent.name if path.name == AS_PUBLISHED else path.stem


def _files(paths: Sequence[Path], bad_rows: BadRows) -> Imported:
    bad = Gathered(bad_rows)
    rows = [row for p in paths for row in _rows(p, "a file of LLMBar", _llmbar, bad)]
    bad.check()
    return Imported(tuple(rows), bad=tuple(bad.rows))


def _llmbar(cell: Cell) -> Annotated:
    """A row, named by its set and its number from 0: llmbar/Natural/0."""
    prompt = cell.text("input")
    if not prompt.strip():
        raise cell.wrong("input", "is empty")
    answers = cell.text("output_1"), cell.text("output_2")
    vote = cell.verdict("label", (FIRST, SECOND))
    id = f"llmbar/{_set(cell.path)}/{cell.number - 1}"
    return Annotated(id, prompt, answers, (vote,), cell.origin)


TEST_SET = "testset-v1.json"
PEOPLE = ("annotator1", "annotator2", "annotator3")
VERDICTS = {"0": TIE, "tie": TIE, "1": FIRST, "2": SECOND}


@dataclass(frozen=True, slots=True)
class PandaLMJudge:
    """A model's verdict of each row, in the rows' order; None where it gave none to be used."""

    name: str
    verdicts: tuple[int | None, ...]

    @property
    def unusable(self) -> int:
        """How many verdicts say neither an answer nor a tie."""
        return sum(verdict is None for verdict in self.verdicts)


@dataclass(frozen=True, slots=True)
class Against:
    """A judge compared with the people's majority.

    `accuracy` and `kappa` are over the `accuracy.n` rows that have a majority and a usable verdict;
    `accuracy_of_all` counts the `unusable` ones as wrong. `split` are rows without a majority.
    """

    accuracy: Agreement
    kappa: Agreement
    accuracy_of_all: Agreement
    unusable: int
    split: int


def read_pandalm(path: Path, bad_rows: BadRows = "stop") -> Imported:
    """The test set, from its file or the folder that holds it.

    The prompt is the instruction, and the input, where there is one, after a blank line. Raises
    KeelError, naming file, row and column.
    """
    file, bad = path / TEST_SET if path.is_dir() else path, Gathered(bad_rows)
    rows = _rows(file, f"PandaLM's {TEST_SET}", _pandalm, bad)
    bad.check()
    if len({row.id for row in rows}) < len(rows):
        raise KeelError(f"{file}: two rows have the same idx: fix the file, or download it again")
    answers = [o.row[c] for row in rows if (o := row.origin) for c in ("response1", "response2")]
    read_as_text = sum(isinstance(answer, bool) for answer in answers)
    return Imported(tuple(rows), read_as_text, tuple(bad.rows))


def _pandalm(cell: Cell) -> Annotated:
    parts = [cell.text("instruction"), cell.text("input")]
    prompt = "\n\n".join(part for part in parts if part.strip())
    if not prompt:
        raise cell.wrong("instruction", "is empty")
    answers = cell.text("response1"), cell.text("response2")
    votes = tuple(cell.verdict(person, (TIE, FIRST, SECOND)) for person in PEOPLE)
    return Annotated(f"pandalm/{_number(cell)}", prompt, answers, votes, cell.origin)


def read_judges(folder: Path, rows: Sequence[Annotated]) -> list[PandaLMJudge]:
    """The models' verdict files next to the test set (`NAME-testset-v1.json`), by name.

    Their verdicts are numbers, or texts such as "1", "Tie" and "garbage"; the last is unusable.
    """
    return [_judge(path, rows) for path in sorted(folder.glob(f"*-{TEST_SET}"))]


def compare(judge: PandaLMJudge, rows: Sequence[Annotated]) -> Against:
    """How far a judge agrees with the people's majority; intervals are drawn over prompts."""
    usable, every = [], []
    for row, verdict in zip(rows, judge.verdicts, strict=True):
        if row.majority is None:
            continue
        every.append((row.prompt, row.majority, verdict))
        if verdict is not None:
            usable.append((row.prompt, row.majority, verdict))
    people, model = [m for _, m, _ in usable], [v for _, _, v in usable]
    drawn = Bootstrap(groups=[prompt for prompt, _, _ in usable])
    return Against(
        percent_agreement(people, model, drawn),
        cohen_kappa(people, model, drawn),
        percent_agreement(
            [m for _, m, _ in every],
            [v for _, _, v in every],
            Bootstrap(groups=[prompt for prompt, _, _ in every]),
        ),
        unusable=len(every) - len(usable),
        split=len(rows) - len(every),
    )


def _judge(path: Path, rows: Sequence[Annotated]) -> PandaLMJudge:
    name = path.name.removesuffix(f"-{TEST_SET}")
    found: dict[str, int | None] = {}
    for cell in read_cells(path, "a model's verdicts"):
        found[f"pandalm/{_number(cell)}"] = _verdict(cell)
    missing = [row.id for row in rows if row.id not in found]
    if missing:
        raise KeelError(
            f"{path}: {len(missing)} rows have no verdict, {missing[0]} the first: "
            "move the file away, or download it again"
        )
    return PandaLMJudge(name, tuple(found[row.id] for row in rows))


def _verdict(cell: Cell) -> int | None:
    """The column is named after the model: gpt_result, pandalm_result."""
    column = _result(cell.row)
    value = cell.get(column)
    if not isinstance(value, str | int):  # a JSON true reads "true" below, which is none of them
        return None
    return VERDICTS.get(str(value).strip().lower())


def _result(row: Mapping[str, object]) -> str:
    return next((c for c in row if c.endswith("_result")), "gpt_result")


def _number(cell: Cell) -> int:
    number = cell.get("idx")
    if isinstance(number, bool) or not isinstance(number, int):
        raise cell.wrong("idx", "is no whole number")
    return number
