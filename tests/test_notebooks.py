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
    """What a notebook printed, and how many figures it showed."""
    book = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=SECONDS, kernel_name="python3", resources=where).execute()
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    printed = "".join(out["text"] for out in outputs if out.output_type == "stream")
    shown = [out["data"] for out in outputs if "data" in out]
    texts = "\n".join(data.get("text/plain", "") for data in shown)
    pictures = [d for d in shown if "image/png" in d or "<svg" in html(d) or "<img" in html(d)]
    return f"{printed}\n{texts}", len(pictures)


def html(data: dict[str, str]) -> str:
    return data.get("text/html", "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert path.stat().st_size < 10_000


def rewards_of(text: str) -> list[float]:
    """The greedy evaluations of a summary, before and after each stage; shares as rewards."""
    found = re.findall(r"(?:before|after) +validation greedy (?:reward )?([\d.]+)(%?)", text)
    return [float(number) / (100 if percent else 1) for number, percent in found]


@pytest.mark.slow
def test_quickstart_improves_and_goes_on(tmp_path: Path) -> None:
    text, pictures = execute("01_quickstart", tmp_path)
    before, after = rewards_of(text)[:2]
    assert before < 0.5
    assert after > 0.8
    pairs = re.findall(r"^ *\d+> \d* +\[([01])\]   \d* +\[([01])\]$", text, re.MULTILINE)
    assert len(pairs) == 8
    assert sum(last > first for first, last in pairs) > sum(last < first for first, last in pairs)
    sampled = re.findall(r"\[([01])\]   advantage ([+-][\d.]+)$", text, re.MULTILINE)
    assert len(sampled) == 16
    assert all((float(a) >= 0) is (reward == "1") for reward, a in sampled if float(a))
    assert any(float(advantage) for _, advantage in sampled)
    assert "30/30" in text
    assert (tmp_path / "runs/quickstart-1/report.html").is_file()
    assert (tmp_path / "sorting-model/model.safetensors").is_file()
    assert pictures == 2


@pytest.mark.slow
def test_own_model_learns_the_reward(tmp_path: Path) -> None:
    """The demonstrations are right one time in four; see the notebook."""
    text, pictures = execute("02_own_model_data_reward", tmp_path)
    before, after = rewards_of(text)
    assert before < 0.5
    assert after > 0.75
    assert pictures == 1
    assert "LoRA" in text
    assert "0 findings" in text
    assert re.search(r"^4290>\d$", text, re.MULTILINE)


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


@pytest.mark.slow
def test_chats_become_short_right_answers(tmp_path: Path) -> None:
    """The demonstrations are right three times in four, and half of them a sentence."""
    text, pictures = execute("04_chat_to_grpo", tmp_path)
    before, after = rewards_of(text)
    assert before < 0.7
    assert after > 0.75
    assert re.search(r"^greedy [\d.]+, sampled [\d.]+$", text, re.MULTILINE)
    assert re.search(r"^3 or 8\? 8$", text, re.MULTILINE)
    assert pictures == 1
