"""Pages of `keel view` that change while someone uses them, in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keel.runs.layout import RunFolder
from tests.shared import needs_chromium
from tests.view.chromium import WAIT, Served, part, serve, sync_api
from tests.view.hostile import TWO_STAGES, add_step

expect = sync_api.expect
pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of three runs of two stages, each with a step of the first."""
    folder = tmp_path_factory.mktemp("runs")
    for at, name in enumerate("abc"):
        add_step(RunFolder.create(folder / name, TWO_STAGES), 0, 1, reward=at / 10)
    with serve(folder) as server:
        yield server


def test_focus_stays_with_a_row_that_moves(page: sync_api.Page, served: Served) -> None:
    page.goto(served.url)
    table = part(page, "runs")
    table.locator("th", has_text="newest").click()
    links = table.locator("tbody a")
    expect(links).to_have_text(["a", "b", "c"])
    table.get_by_role("link", name="c").focus()
    add_step(RunFolder.open(served.folder / "c"), 0, 2, reward=-1.0)
    expect(links).to_have_text(["c", "a", "b"], timeout=WAIT)
    expect(links.first).to_be_focused()


def test_smoothing_follows_keys_in_quick_succession(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/curves?run=a")
    slider = page.get_by_role("slider", name="smoothing")
    slider.locator("[tabindex='0']").focus()
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    page.wait_for_url("**smooth=81**")
    expect(slider).to_have_attribute("aria-valuenow", "81")
    expect(page.get_by_text("mean of 81 steps")).to_be_visible()


def test_controls_stay_when_the_next_stage_begins(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/rollouts?run=b")
    loss = page.get_by_text("loss of the step")
    expect(loss).to_be_visible()
    stages = page.get_by_role("combobox", name="stage")
    expect(stages).to_be_hidden()
    step = part(page, "step")
    step.fill("12")
    add_step(RunFolder.open(served.folder / "b"), 1, 1)
    expect(stages).to_be_visible(timeout=WAIT)
    expect(step).to_be_focused()
    expect(step).to_have_value("12")
    expect(loss).to_be_visible()
    stages.click()
    page.get_by_role("option", name="two").click()
    page.wait_for_url("**stage=two**")
    expect(step).to_have_value("1")
    page.wait_for_url("**row=0**")
