"""The measured pages of the documentation hold what the studies say; the list of mutations fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keel.algorithms.presets import PRESETS
from studies import mutations
from studies.evidence import algorithms, distillation, pages

PAGES = sorted(pages.MEASURED_PAGES.glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.filled(text) == text, "python -m studies.evidence pages"


def test_every_table_is_on_a_page() -> None:
    used = {name for page in PAGES for name in pages.TABLE.findall(page.read_text("utf-8"))}
    assert used == {*pages.TABLES}


@pytest.mark.parametrize("task", algorithms.TASKS)
def test_every_preset_was_measured_with_ten_seeds(task: str) -> None:
    found = pages.comparison(algorithms.RESULTS / task)
    assert {one["arm"] for one in found["arms"]} == {*algorithms.COMPARED}
    assert all(len(one["scores"]) == 10 for one in found["arms"])
    assert len(found["pairs"]) == len(algorithms.COMPARED) - 1
    assert {*pages.curves(algorithms.RESULTS / task)} == {*algorithms.COMPARED}


@pytest.mark.parametrize("task", distillation.LEVELS)
def test_presets_with_a_teacher_were_measured_with_ten_seeds(task: str) -> None:
    own = {*PRESETS} - {*algorithms.COMPARED} - algorithms.NOT_MEASURED
    assert own == {distillation.STUDENT}
    found = pages.comparison(distillation.MEASURED / task)
    assert [one["arm"] for one in found["arms"]] == [*distillation.ARMS]
    assert all(len(one["scores"]) == 10 for one in found["arms"])
    for arm, courses in distillation.courses(task).items():
        scores = next(one["scores"] for one in found["arms"] if one["arm"] == arm)
        assert [course[2, -1] for course in courses] == scores


def test_tokens_to_a_level_are_interpolated_between_evaluations() -> None:
    course = np.array([[0, 5, 10], [0, 100, 300], [0.2, 0.6, 0.8]])
    assert distillation.tokens_to(course, 0.4) == pytest.approx(50)
    assert distillation.tokens_to(course, 0.7) == pytest.approx(200)
    assert distillation.tokens_to(course, 0.1) == 0
    assert distillation.tokens_to(course, 0.9) == np.inf


def test_every_mutation_fits_the_code() -> None:
    """`make soak` breaks these passages, and wants the tests named with them to fail."""
    for one in mutations.MUTATIONS:
        assert (mutations.PACKAGE / one.file).read_text("utf-8").count(one.old) == 1, one.what
        assert all((mutations.ROOT / path).exists() for path in one.tests), one.what
