"""LLMBar: pairs of answers of which one follows the instruction and the other does not.

Source: Zeng et al. 2023 [2310.07641], https://github.com/princeton-nlp/LLMBar (MIT). One natural
set and four adversarial ones, in which the wrong answer was made to look the better one.
"""

from __future__ import annotations

from pathlib import Path

from keel.preferences.annotated import FIRST, SECOND, Annotated, Imported, read_cells
from keel.types import KeelError


def read_llmbar(path: Path) -> Imported:
    """One file, or every `*.json` under a folder; the label is the one vote. Raises KeelError."""
    if not path.is_dir():
        return Imported(_file(path))
    files = sorted(path.rglob("*.json"))
    if not files:
        raise KeelError(f"{path}: holds no *.json: give LLMBar's folder or one of its files")
    return Imported(tuple(row for file in files for row in _file(file)))


def _file(path: Path) -> tuple[Annotated, ...]:
    """Rows are named by their set and their number from 0: llmbar/Natural/0."""
    rows = []
    for cell in read_cells(path, "a file of LLMBar"):
        prompt = cell.text("input")
        if not prompt.strip():
            raise cell.wrong("input", "is empty")
        answers = cell.text("output_1"), cell.text("output_2")
        vote = cell.verdict("label", (FIRST, SECOND))
        rows.append(Annotated(f"llmbar/{path.stem}/{cell.number - 1}", prompt, answers, (vote,)))
    return tuple(rows)
