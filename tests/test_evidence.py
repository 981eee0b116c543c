"""The measured pages of the documentation hold what the studies say."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.algorithms.presets import PRESETS
from studies.evidence import algorithms, pages

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
    found = pages.comparison(task)
    assert {one["arm"] for one in found["arms"]} == {*PRESETS}
    assert all(len(one["scores"]) == 10 for one in found["arms"])
    assert len(found["pairs"]) == len(PRESETS) - 1
    assert {*pages.curves(task)} == {*PRESETS}


def test_a_difference_is_bold_where_its_interval_leaves_out_0() -> None:
    above = {"mean": 0.1, "low": 0.05, "high": 0.15}
    assert pages.emphasised(above) == "**+10.0 [5.0, 15.0]**"
    assert pages.emphasised({**above, "low": -0.05}) == "+10.0 [-5.0, 15.0]"
