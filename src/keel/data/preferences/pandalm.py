"""PandaLM's test set: 999 pairs of answers with three people's verdicts, and two models' verdicts.

Source: Wang et al. 2023 [2306.05087], https://github.com/WeOpenML/PandaLM (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keel.data.preferences.agreement import Agreement, Bootstrap, cohen_kappa, percent_agreement
from keel.data.preferences.published import (
    FIRST,
    SECOND,
    TIE,
    Annotated,
    Cell,
    Imported,
    read_cells,
)
from keel.types import KeelError

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


def read_pandalm(path: Path) -> Imported:
    """The test set, from its file or the folder that holds it.

    The prompt is the instruction, and the input, where there is one, after a blank line. Raises
    KeelError, naming file, row and column.
    """
    file = path / TEST_SET if path.is_dir() else path
    rows, read_as_text = [], 0
    for cell in read_cells(file, f"PandaLM's {TEST_SET}"):
        parts = [cell.text("instruction"), cell.text("input")]
        prompt = "\n\n".join(part for part in parts if part.strip())
        if not prompt:
            raise cell.wrong("instruction", "is empty")
        answers = cell.text("response1"), cell.text("response2")
        read_as_text += sum(isinstance(cell.row[c], bool) for c in ("response1", "response2"))
        votes = tuple(cell.verdict(person, (TIE, FIRST, SECOND)) for person in PEOPLE)
        rows.append(Annotated(f"pandalm/{_number(cell)}", prompt, answers, votes))
    if len({row.id for row in rows}) < len(rows):
        raise KeelError(f"{file}: two rows have the same idx: fix the file, or download it again")
    return Imported(tuple(rows), read_as_text)


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
