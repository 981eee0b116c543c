"""LLMBar: pairs of answers of which one follows the instruction and the other does not.

Source: Zeng et al. 2023 [2310.07641], https://github.com/princeton-nlp/LLMBar (MIT). One natural
set and four adversarial ones, in which the wrong answer was made to look the better one.
"""

from __future__ import annotations

from pathlib import Path

from keel.data.preferences.published import FIRST, SECOND, Annotated, Imported, read_cells
from keel.types import KeelError

SETS = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")
AS_PUBLISHED = "dataset.json"
"""The one name that every set's file has where it was published; its folder names the set."""


def read_llmbar(path: Path) -> Imported:
    """One file, or those under a folder; the label is the one vote.

    Of a folder with the published layout (`Natural/dataset.json`) only files of that name are read,
    since models' verdicts are next to them, and only LLMBar's own sets where there are any; of any
    other folder every `*.json`. Raises KeelError.
    """
    if not path.is_dir():
        return Imported(_file(path))
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
    return Imported(tuple(row for file in files for row in _file(file)))


def is_llmbar(folder: Path) -> bool:
    """Whether the folder holds the natural set, as one file or with the published layout."""
    names = ("Natural.json", f"Natural/{AS_PUBLISHED}")
    inside = any(True for name in names for _ in folder.rglob(name))
    return inside or (_set(folder / AS_PUBLISHED) in SETS and (folder / AS_PUBLISHED).is_file())


def _set(path: Path) -> str:
    return path.resolve().parent.name if path.name == AS_PUBLISHED else path.stem


def _file(path: Path) -> tuple[Annotated, ...]:
    """Rows are named by their set and their number from 0: llmbar/Natural/0."""
    rows = []
    for cell in read_cells(path, "a file of LLMBar"):
        prompt = cell.text("input")
        if not prompt.strip():
            raise cell.wrong("input", "is empty")
        answers = cell.text("output_1"), cell.text("output_2")
        vote = cell.verdict("label", (FIRST, SECOND))
        rows.append(Annotated(f"llmbar/{_set(path)}/{cell.number - 1}", prompt, answers, (vote,)))
    return tuple(rows)
