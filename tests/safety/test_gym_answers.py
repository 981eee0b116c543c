"""Scorers of reasoning-gym that run an answer do not let it reach out of the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.config.sources import TaskSource
from keel.data.tasks.build import build_task
from keel.types import Completion, Task
from tests.data.tasks.made import completion
from tests.shared import needs_bubblewrap

pytest.importorskip("reasoning_gym")
pytestmark = needs_bubblewrap

RUNNING = (
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),
    *("countdown", "puzzle24", "polynomial_multiplication", "simple_integration"),
)
"""Names of data sets whose scorer evaluates what the answer says."""
WAYS = {
    "system": "__import__('os').system('touch {marker}')",
    "write": "open('{marker}', 'w')",
    "spawn": "__import__('subprocess').run(['touch', '{marker}'])",
    "exec": "__import__('os').execv('/bin/touch', ['touch', '{marker}'])",
    "posix_spawn": "__import__('os').posix_spawn('/bin/touch', ['touch', '{marker}'], {{}})",
    "link": "__import__('os').symlink('/', '{marker}')",
    "folder": "__import__('os').mkdir('{marker}')",
}


def answer(text: str) -> Completion:
    return completion(text)


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {name: build_task(TaskSource(name=f"reasoning_gym:{name}"), 0) for name in RUNNING}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_is_code_leaves_nothing(
    way: str, tasks: dict[str, Task], tmp_path: Path
) -> None:
    for name, task in tasks.items():
        marker = tmp_path / name
        prompt = task.prompt("train", 0)
        assert prompt is not None
        for text in (WAYS[way], f"[{WAYS[way]}]"):
            value = task.score(prompt, answer(text.format(marker=marker)))
            assert value is not None
            assert value < 1
        assert not marker.is_symlink()
        assert not marker.exists(), name


def test_an_answer_reads_no_file_of_the_user(tasks: dict[str, Task], tmp_path: Path) -> None:
    """The right answer, but only to somebody who may read."""
    task = tasks["countdown"]
    prompt = task.prompt("train", 0)
    gold = task.gold(prompt)
    assert gold is not None
    hidden = tmp_path / "hidden"
    hidden.write_text(gold)
    assert task.score(prompt, answer(gold)) == 1
    stolen = task.score(prompt, answer(f"eval(open('{hidden}').read())"))
    assert stolen is not None
    assert stolen < 1


def test_right_answers_are_right_still(tasks: dict[str, Task]) -> None:
    for name, task in tasks.items():
        for index in range(3):
            prompt = task.prompt("train", index)
            gold = task.gold(prompt)
            if gold is not None:
                assert task.score(prompt, answer(gold)) == 1, name


def test_an_answer_as_a_python_list_is_read(tasks: dict[str, Task]) -> None:
    """What the scorers evaluate for: the answer as a list, worth a share."""
    task = tasks["string_insertion"]
    prompt = task.prompt("train", 0)
    gold = task.gold(prompt)
    assert gold is not None
    value = task.score(prompt, answer(repr(list(gold))))
    assert value is not None
    assert 0 < value < 1
