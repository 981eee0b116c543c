"""The pages of `keel view` in headless Chromium, over a real server and real runs."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from keel.runs.reader import load
from keel.runs.writer import Recorder
from tests.shared import needs_chromium
from tests.training.small import run
from tests.view import hostile
from tests.view.chromium import NAMELESS, WAIT, Served, part, serve, sync_api, tab

expect = sync_api.expect
pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of three runs: two trained by different algorithms, and a hostile one."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("grpo", "ppo"):
        run(folder / name, f"algorithm={name}", "steps=3", "evaluation.prompts=4")
    hostile.write(folder / "hostile")
    with serve(folder) as server:
        yield server


def asked(page: sync_api.Page) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def test_curves_show_status_formula_and_panels(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/curves?run=ppo")
    part(page, "status").wait_for()
    assert "step 3 of 3" in part(page, "status").inner_text()
    assert part(page, "formula").locator("math").count() >= 2
    panels = ("reward", "signal", "kl", "entropy", "length", "update", "value")
    for key in panels:
        assert part(page, f"panel-{key}").locator("canvas").count() == 1, key
    assert "over the step's completions" in part(page, "panel-reward").inner_text()


def test_formulas_are_set_by_a_mathematical_font(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/curves?run=ppo")
    first = part(page, "formula").first
    first.locator("munder").wait_for()
    page.wait_for_function("""[...document.fonts].some(
        font => font.family.includes("Keel Math") && font.status == "loaded")""")
    box = "e => [e.children[0], e.children[1]].map(c => c.getBoundingClientRect().toJSON())"
    subs = [sub.evaluate(box) for sub in first.locator("msub").all()[1:3]]  # of ρ and of A
    assert len({round(index["top"], 1) for _, index in subs}) == 1
    total, limit = first.locator("munder").first.evaluate(box)
    assert total["height"] > 22, "the sum of a line of its own is larger than the text"
    assert total["bottom"] <= limit["bottom"]
    assert total["left"] < limit["left"] < limit["right"] < total["right"]


def test_runs_are_listed_and_overlaid(page: sync_api.Page, served: Served) -> None:
    page.goto(served.url)
    part(page, "runs").wait_for()
    rows = part(page, "runs").locator("tbody tr")
    assert rows.count() == 3
    line = part(page, "runs").locator("tr", has_text="grpo").inner_text()
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d\s+sort_digits\s+grpo", line)
    assert "accuracy" in part(page, "runs").locator("thead").inner_text()
    for name in ("grpo", "ppo"):
        part(page, "runs").locator("tr", has_text=name).locator(".q-checkbox").click()
    part(page, "open").click()
    page.wait_for_url("**/curves**")
    assert asked(page)["run"] == ["grpo", "ppo"]
    part(page, "panel-reward").locator("canvas").wait_for()
    chart = part(page, "panel-reward").locator(".chart")
    expect(chart).to_have_attribute("aria-label", re.compile(r"representing grpo seed 0\."))
    expect(chart).to_have_attribute("aria-label", re.compile(r"representing ppo seed 0\."))


def add_steps(folder: Path, *rewards: float) -> None:
    """Continue a run's records."""
    place, records = load(folder).folder, load(folder).metrics()
    metrics = {k: v for k, v in records[-1].items() if k not in ("stage", "step")}
    with Recorder(place) as recorder:
        for step, reward in enumerate(rewards, start=len(records) + 1):
            recorder.metrics(0, step, {**metrics, "reward": reward})
            recorder.timings(0, step, {"total": 0.1})


def test_every_page_follows_a_run_that_goes_on(
    browser: sync_api.Browser, page: sync_api.Page, served: Served
) -> None:
    """Two pages that read the same files: neither takes the news from the other."""
    folder = served.folder / "live"
    shutil.copytree(served.folder / "grpo", folder, dirs_exist_ok=True)
    with tab(browser, served.url) as other:
        for opened in (page, other):
            opened.goto(f"{served.url}/curves?run=live")
            opened.wait_for_selector("text=step 3 of 3")
        for step, reward in enumerate((0.875, 0.625, 0.375), start=4):
            add_steps(folder, reward)
            for opened in (page, other):
                opened.wait_for_selector(f"text=step {step} of 3")
                chart = part(opened, "panel-reward").locator(".chart")
                shown = re.compile(re.escape(f"{step}, {reward}"))
                expect(chart).to_have_attribute("aria-label", shown, timeout=WAIT)


def test_rollouts_show_group_tokens_and_terms_of_the_loss(
    page: sync_api.Page, served: Served
) -> None:
    page.goto(f"{served.url}/rollouts?run=ppo&step=2&row=1")
    part(page, "group").wait_for()
    rows = load(served.folder / "ppo").rollouts(2)
    members = [row for row in rows if row["group"] == rows[1]["group"]]
    assert part(page, "group").locator("tbody tr").count() == len(members)
    tokens = part(page, "tokens").locator(".tok")
    assert tokens.count() == len(rows[1]["tokens"])
    assert "advantage" in (tokens.first.get_attribute("title") or "")
    tokens.first.click()
    card = part(page, "token")
    card.locator("text=terms of the loss").wait_for()
    terms = [rows[1][name][0] for name in ("loss/policy", "loss/value")]
    assert f"policy {terms[0]:+.4g}" in card.inner_text()
    assert f"loss {sum(terms):+.4g}" in card.inner_text()
    assert asked(page)["token"] == ["0"]


def test_groups_of_a_step_are_counted_and_turned(page: sync_api.Page, served: Served) -> None:
    rows = load(served.folder / "grpo").rollouts(3)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    rewards = {g: [row["reward"] for row in rows if row["group"] == g] for g in groups}
    spread = {g: max(found) - min(found) for g, found in rewards.items()}
    page.goto(f"{served.url}/rollouts?run=grpo&step=3")
    part(page, "place").wait_for()
    at = groups.index(max(groups, key=lambda g: spread[g]))
    expect(part(page, "place")).to_have_text(f"{at + 1} of {len(groups)}")
    expect(page.get_by_text("grpo", exact=True)).to_be_visible()
    page.goto(f"{served.url}/rollouts?run=grpo&step=3&row=0")
    expect(part(page, "place")).to_have_text(f"1 of {len(groups)}")
    page.get_by_label("next group").click()
    expect(part(page, "place")).to_have_text(f"2 of {len(groups)}")
    page.keyboard.press("n")
    expect(part(page, "place")).to_have_text(f"3 of {len(groups)}")
    page.keyboard.press("p")
    expect(part(page, "place")).to_have_text(f"2 of {len(groups)}")
    best = max(
        (at for at, row in enumerate(rows) if row["group"] == groups[1]),
        key=lambda at: rows[at]["reward"],
    )
    page.wait_for_url(f"**&row={best}*")


def test_new_steps_appear_while_the_page_is_open(page: sync_api.Page, served: Served) -> None:
    shutil.copytree(served.folder / "grpo", served.folder / "growing", dirs_exist_ok=True)
    folder = load(served.folder / "growing").folder
    page.goto(f"{served.url}/rollouts?run=growing&step=1&row=0")
    expect(part(page, "newest")).to_have_text("newest: step 3")
    with Recorder(folder) as recorder:
        recorder.rollouts(0, 4, [hostile.row("fresh")])
    expect(part(page, "newest")).to_have_text("newest: step 4", timeout=WAIT)
    assert asked(page)["step"] == ["1"]
    page.get_by_role("button", name="newest step").click()
    expect(part(page, "tokens")).to_have_text(" fresh", timeout=WAIT)
    folder.rollouts(0, 4).write_bytes(b"PAR1 no table")
    page.reload()
    expect(part(page, "problem")).to_contain_text("step-000004.parquet")
    page.get_by_role("button", name="earlier step").click()
    part(page, "tokens").wait_for()
    part(page, "search").fill("5")
    part(page, "go").click()
    part(page, "hits").wait_for()
    left_out = "rollouts/step-000004.parquet is damaged and left out"
    expect(part(page, "problem")).to_have_text(left_out)


def test_controls_have_names_and_keys(page: sync_api.Page, served: Served) -> None:
    for path in ("/", "/curves?run=ppo", "/rollouts?run=ppo&step=1&row=0"):
        page.goto(f"{served.url}{path}")
        page.wait_for_selector(".page")
        page.wait_for_timeout(500)
        assert page.evaluate(NAMELESS) == [], path
    part(page, "tokens").wait_for()
    page.keyboard.press(".")
    page.wait_for_url("**token=0**")
    page.keyboard.press(".")
    page.wait_for_url("**token=1**")
    page.goto(f"{served.url}/")
    link = part(page, "runs").get_by_role("link", name="ppo")
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/curves?run=ppo")


def test_colours_change_with_the_measure(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/rollouts?run=ppo&step=2&row=1&colour=entropies")
    first = part(page, "tokens").locator(".tok").first
    first.wait_for()
    assert "0,158,115" in (first.get_attribute("style") or "").replace(" ", "")
    part(page, "colour").click()
    page.get_by_role("option", name="log-prob").click()
    page.wait_for_url("**colour=log_probs**")


def test_search_and_filters_go_over_all_steps(page: sync_api.Page, served: Served) -> None:
    loaded = load(served.folder / "grpo")
    rows = [row for step in (1, 2, 3) for row in loaded.rollouts(step)]
    page.goto(f"{served.url}/rollouts?run=grpo")
    part(page, "search").fill("55")
    part(page, "go").click()
    part(page, "hits").wait_for()
    wanted = sum("55" in row["completion"] + "\n" + row["prompt"] for row in rows)
    assert part(page, "hits").inner_text().startswith(f"{wanted} of {len(rows)} completions")
    assert asked(page)["text"] == ["55"]
    part(page, "results").locator("tbody tr").first.click()
    page.wait_for_function("location.search.includes('step=')")
    page.goto(f"{served.url}/rollouts?run=grpo&step=3&row=0")
    part(page, "same-prompt").click()
    part(page, "hits").wait_for()
    wanted = sum(row["prompt_id"] == loaded.rollouts(3)[0]["prompt_id"] for row in rows)
    assert part(page, "hits").inner_text().startswith(f"{wanted} of")


def test_shared_address_shows_the_same(page: sync_api.Page, served: Served) -> None:
    address = f"{served.url}/rollouts?run=grpo&step=1&row=2&colour=loss&token=1&text=5"
    page.goto(address)
    part(page, "hits").wait_for()
    assert part(page, "search").input_value() == "5"
    assert part(page, "step").input_value() == "1"
    assert "terms of the loss" in part(page, "token").inner_text()
    assert asked(page) == parse_qs(urlsplit(address).query) | {"stage": ["rl"]}


def test_keys_move_through_steps_and_completions(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/rollouts?run=grpo&step=1&row=0")
    part(page, "tokens").wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_function("location.search.includes('row=2')")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("location.search.includes('step=2')")
    page.keyboard.press("/")
    page.wait_for_function("document.activeElement.tagName === 'INPUT'")
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    part(page, "hits").wait_for()
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.wait_for_selector("text=earlier step")


def test_run_without_rollouts_says_so(page: sync_api.Page, served: Served) -> None:
    shutil.copytree(served.folder / "grpo", served.folder / "bare", dirs_exist_ok=True)
    shutil.rmtree(served.folder / "bare" / "rollouts")
    page.goto(f"{served.url}/rollouts?run=bare")
    page.wait_for_selector("text=this run has no rollouts yet")
    for key in ("j", "ArrowRight", "/"):
        page.keyboard.press(key)
    page.wait_for_timeout(300)
    assert part(page, "problem").inner_text() == "this run has no rollouts yet"


def test_damaged_run_is_named_on_every_page(page: sync_api.Page, served: Served) -> None:
    shutil.copytree(served.folder / "grpo", served.folder / "torn", dirs_exist_ok=True)
    (served.folder / "torn" / "run.json").write_text("{")
    for path in ("/curves", "/objective"):
        page.goto(f"{served.url}{path}?run=torn&smooth={'9' * 400}&token=-1")
        part(page, "problem").wait_for()
        assert "run.json" in part(page, "problem").inner_text()
    page.goto(served.url)
    assert part(page, "runs").locator("tr", has_text="torn").count() == 1
    shutil.rmtree(served.folder / "torn")


def test_dark_mode_stays_with_the_address(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/curves?run=ppo&theme=light")
    assert "body--dark" not in (page.locator("body").get_attribute("class") or "")
    part(page, "theme").click()
    page.wait_for_url("**theme=dark**")
    page.wait_for_selector("body.body--dark")
    page.get_by_role("link", name="Rollouts", exact=True).click()
    page.wait_for_selector("body.body--dark")


def test_objective_is_typeset_term_by_term(page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/objective?run=ppo")
    terms = part(page, "formula").locator("section")
    expect(terms.first).to_contain_text("Advantage")
    assert terms.locator("math").count() > terms.count() >= 5
    assert "$" not in part(page, "formula").inner_text()


def test_runs_have_a_curve_and_newest_rollouts(page: sync_api.Page, served: Served) -> None:
    page.goto(served.url)
    points = part(page, "runs").locator("tr", has_text="ppo").locator("polyline")
    assert len((points.get_attribute("points") or "").split()) > 1
    page.goto(f"{served.url}/curves?run=ppo")
    page.get_by_role("link", name="newest rollouts").click()
    part(page, "tokens").wait_for()


PAGES = ("curves", "rollouts", "diagnosis", "objective")


def test_pages_name_their_run_and_fit_narrow_screens(page: sync_api.Page, served: Served) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    for path in ("/", *(f"/{name}?run=ppo" for name in PAGES)):
        page.goto(f"{served.url}{path}")
        page.wait_for_selector(".page")
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
        expect(page.get_by_text("ppo", exact=True).first).to_be_visible()
    page.goto(f"{served.url}/diagnosis?run=ppo")
    expect(part(page, "diagnosis")).not_to_contain_text("reading")
    expect(part(page, "diagnosis")).not_to_be_empty()


def test_hostile_texts_are_inert_text(page: sync_api.Page, served: Served) -> None:
    for path in ("/", "/curves", "/objective", "/diagnosis", "/rollouts"):
        page.goto(f"{served.url}{path}?run=hostile")
        page.wait_for_selector(".page")
        page.wait_for_timeout(300)
        assert page.evaluate("window.broken") is None, path
    for at in range(len(hostile.TEXTS)):
        page.goto(f"{served.url}/rollouts?run=hostile&step=1&row={at}&token=0")
        part(page, "tokens").wait_for()
        assert page.evaluate("window.broken") is None
        body = page.locator("body").inner_text()
        assert re.search("[\x1b\x9b\u202e\u2066\u200b]", body) is None
    page.goto(f"{served.url}/rollouts?run=hostile&text=script")
    part(page, "hits").wait_for()
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, .page img").count() == 0


def test_a_line_of_a_megabyte_is_cut(page: sync_api.Page, served: Served) -> None:
    folder = hostile.write(served.folder / "large", ("x" * 1_000_000, "y " * 50_000))
    started = time.monotonic()
    page.goto(f"{served.url}/rollouts?run={folder.path.name}&step=1&row=1")
    part(page, "tokens").wait_for()
    assert part(page, "tokens").locator(".tok").count() == 2_000
    assert len(page.content()) < 3_000_000
    assert time.monotonic() - started < 15, "a page that takes this long is not shown"


@pytest.mark.parametrize("path", ["..%2f..%2fetc%2fpasswd", "/etc/passwd"])
def test_no_other_folder_can_be_opened(path: str, page: sync_api.Page, served: Served) -> None:
    page.goto(f"{served.url}/objective?run={path}")
    expect(part(page, "problem")).to_contain_text("no run")
    answer = page.request.get(f"{served.url}/{path}")
    assert "root:" not in answer.text()
