"""The notebooks of examples/notebooks run as they stand, and learn what they say."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.shared import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SECONDS = 600
"""Limit of one cell on a busy machine; the longest takes ten seconds of a core."""


def execute(name: str, folder: Path) -> tuple[str, int]:
    """What a notebook printed, and how many pictures it showed."""
    book = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=SECONDS, kernel_name="python3", resources=where).execute()
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    printed = "".join(out["text"] for out in outputs if out.output_type == "stream")
    shown = [out["data"] for out in outputs if "data" in out]
    texts = "\n".join(data.get("text/plain", "") for data in shown)
    return f"{printed}\n{texts}", sum("image/png" in data for data in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert path.stat().st_size < 10_000


@pytest.mark.slow
def test_own_model_learns_the_reward(tmp_path: Path) -> None:
    """The demonstrations are right one time in four; see the notebook."""
    text, pictures = execute("02_own_model_data_reward", tmp_path)
    before, after = re.findall(r"validation prompts: ([\d.]+) before, ([\d.]+) after", text)[0]
    assert float(before) < 0.5
    assert float(after) > 0.75
    assert pictures == 1
    assert "LoRA" in text
    assert re.search(r"\d+ findings", text)


@pytest.mark.slow
def test_own_loop_learns_by_both_algorithms(tmp_path: Path) -> None:
    text, pictures = execute("03_own_loop", tmp_path)
    curves = re.findall(r"(\w+): reward ([\d.]+) at step 1, ([\d.]+) at step 60", text)
    assert [name for name, *_ in curves] == ["grpo", "reinforce"]
    assert all(float(last) > float(first) + 0.4 for _, first, last in curves)
    answers = re.findall(r"^(\d)(\d)> (\d)$", text, re.MULTILINE)
    assert len(answers) == 5
    assert sum(max(a, b) == answer for a, b, answer in answers) >= 3
    assert pictures == 1
