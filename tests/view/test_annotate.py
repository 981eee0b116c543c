"""The pages of `keel prefs annotate` in headless Chromium, over a real server and store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from keel.preferences.store import PreferenceStore
from tests.shared import needs_chromium
from tests.view import hostile
from tests.view.annotating import MODEL, Annotator, Server, pair
from tests.view.chromium import NAMELESS, WAIT, sync_api, tab

expect = sync_api.expect
pytestmark = [needs_chromium, pytest.mark.slow]
RUBRIC = "# What is better\n\n- `<b>true</b>` before fluent\n\n![](http://x/y) <script>"
ARABIC = "عاصمة فرنسا هي باريس.\nThe Louvre is there."
CHINESE = "\u3000\u3000太阳光由各种颜色的光组成。"
PERSIAN = "می\u200cشود"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Sixty pairs, each for one person, with a rubric and a wage."""
    folder = tmp_path_factory.mktemp("annotate")
    (folder / "rubric.md").write_text(RUBRIC, encoding="utf-8")
    with PreferenceStore(folder / "a.db", create=True) as store:
        store.add(record for number in range(60) for record in pair(number))
    options = ("--rubric", str(folder / "rubric.md"), "--wage", "36")
    with Server(folder / "a.db", *options) as started:
        yield started


@pytest.fixture
def store(server: Server) -> Iterator[PreferenceStore]:
    with PreferenceStore(server.store) as opened:
        yield opened


Open = Callable[..., Annotator]


@pytest.fixture
def annotator(browser: sync_api.Browser) -> Iterator[Open]:
    """Opens tabs, which may reach their server alone, and must log no error."""
    with ExitStack() as tabs:

        def start(server: Server, name: str, width: int = 1280, height: int = 800) -> Annotator:
            page = tabs.enter_context(tab(browser, server.url, width, height))
            return Annotator(page, server.url, name)

        yield start


def show_first(store: PreferenceStore, number: int, *texts: str, prompt: str = "") -> None:
    """Add a pair that the next annotator gets."""
    store.add(pair(number, texts, prompt))
    store.set_priorities([(f"p{number}", 100.0)])


def test_keys_label_a_pair(server: Server, store: PreferenceStore, annotator: Open) -> None:
    ann = annotator(server, "ann")
    firsts, asked = [], []
    for key in ("1", "ArrowLeft", "2", "ArrowRight", "t", "s"):
        firsts.append(float(ann.part("left").inner_text() == "alpha"))
        asked.append(ann.press(key))
    expect(ann.part("status")).to_have_text("Saved: skipped")
    expect(ann.part("progress")).to_contain_text("yours: 6")
    labels = list(store.labels(annotator="ann"))
    assert [f"question {label.pair[1:]}" for label in labels] == asked
    wanted = [firsts[0], firsts[1], 1 - firsts[2], 1 - firsts[3], 0.5, None]
    assert [label.value for label in labels] == wanted
    assert all(label.seconds and 0.3 < label.seconds < 60 for label in labels[1:])
    for label, first in zip(labels, firsts, strict=True):
        assert label.shown_first == ("first" if first else "second")
        assert label.rubric.startswith("rubric.md sha256:")
        assert label.cost == pytest.approx((label.seconds or 0) * 36 / 3600)


def test_keys_of_other_scripts_and_capitals_count(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    ann = annotator(server, "scripts")
    ann.press("T")
    ann.ready()
    before = ann.question
    key = {"key": "ف", "code": "KeyT", "bubbles": True}
    ann.page.evaluate("(key) => document.dispatchEvent(new KeyboardEvent('keydown', key))", key)
    expect(ann.part("prompt")).not_to_have_text(before)
    assert [label.value for label in store.labels(annotator="scripts")] == [0.5, 0.5]


def test_keys_count_after_a_click_without_modifier(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    ann = annotator(server, "clicks")
    ann.ready()
    first = ann.question
    ann.part("do-tie").click()
    expect(ann.part("prompt")).not_to_have_text(first)
    ann.see()
    ann.ready()
    ann.part("do-font").click()
    second = ann.question
    ann.page.keyboard.press("Control+1")
    ann.page.keyboard.press("Alt+2")
    ann.page.wait_for_timeout(300)
    assert ann.question == second
    ann.press("2")
    assert len(list(store.labels(annotator="clicks"))) == 2


def test_two_presses_label_one_pair(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    ann = annotator(server, "double")
    labelled = [ann.press("1", "1", "1") for _ in range(3)]
    ann.page.wait_for_timeout(500)
    pairs = [label.pair for label in store.labels(annotator="double")]
    assert [f"question {pair[1:]}" for pair in pairs] == labelled


PRESS_ON_CHANGE = """(key) => {
    const pair = document.querySelector('[data-testid=pair]');
    const press = () => document.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
    const before = pair.innerText;
    new MutationObserver((_, observer) => {
        if (pair.innerText.includes('question') && pair.innerText !== before) {
            observer.disconnect();
            press();
        }
    }).observe(pair, {childList: true, subtree: true});
    press();
}"""


def test_second_press_on_the_next_pair_is_ignored(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    """A key comes as soon as the next pair is there; on a busy machine some may come late."""
    counts: list[int] = []
    while 1 not in counts:
        attempt = len(counts)
        assert attempt < 4
        ann = annotator(server, f"bounce{attempt}")
        ann.ready()
        before = ann.question
        ann.page.evaluate(PRESS_ON_CHANGE, "1")
        expect(ann.part("prompt")).not_to_have_text(before)
        ann.page.wait_for_timeout(300)
        counts.append(len(list(store.labels(annotator=ann.name))))


def test_undo_and_note(server: Server, store: PreferenceStore, annotator: Open) -> None:
    ann = annotator(server, "undo")
    ann.ready()
    ann.page.keyboard.press("u")
    expect(ann.part("status")).to_have_text("There is no label to undo")
    ann.see()
    ann.ready()
    ann.page.keyboard.press("n")
    expect(ann.part("note-box")).to_be_focused()
    ann.page.keyboard.type("1 and 2 <i>test</i>")  # keys in a field are text
    ann.page.keyboard.press("Enter")
    expect(ann.part("note")).to_have_text("Note: 1 and 2 <i>test</i>")
    assert list(store.labels(annotator="undo")) == []
    ann.page.reload()
    ann.see()
    expect(ann.part("note")).to_have_text("Note: 1 and 2 <i>test</i>")
    first = ann.press("1")
    (label,) = store.labels(annotator="undo")
    assert label.note == "1 and 2 <i>test</i>"
    assert ann.part("note").count() == 0
    second = ann.question
    assert ann.press("u") == second
    assert ann.question == first
    assert list(store.labels(annotator="undo")) == []
    expect(ann.part("note")).to_have_text("Note: 1 and 2 <i>test</i>")
    ann.press("t")
    assert ann.question == second
    assert [label.value for label in store.labels(annotator="undo")] == [0.5]


def write_note(ann: Annotator, text: str) -> None:
    """Open the note of the pair, and add to it."""
    ann.ready()
    ann.page.keyboard.press("n")
    expect(ann.part("note-box")).to_be_focused()
    ann.page.keyboard.press("End")
    ann.page.keyboard.type(text)


def test_keys_wait_while_a_note_is_written(server: Server, annotator: Open) -> None:
    ann = annotator(server, "writing")
    write_note(ann, "half a thought")
    address = ann.page.url
    keep = ann.page.get_by_role("button", name="Keep")
    for leave in (
        lambda: ann.page.keyboard.press("Tab"),
        lambda: ann.page.locator(".q-card", has=keep).click(position={"x": 5, "y": 5}),
    ):
        ann.part("note-box").focus()
        leave()
        expect(ann.part("note-box")).not_to_be_focused()
        for key in ("m", "?", "d"):
            ann.page.keyboard.press(key)
    keep.click()  # the server takes it after the keys
    expect(ann.part("note")).to_have_text("Note: half a thought")
    expect(ann.part("rubric")).to_be_hidden()
    assert ann.page.url == address


def test_help_shows_rubric_set_and_keys_wait(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    ann = annotator(server, "help")
    ann.ready()
    before = ann.question
    ann.page.keyboard.press("?")
    expect(ann.part("rubric")).to_be_visible()
    expect(ann.part("rubric").locator("h1")).to_have_text("What is better")
    expect(ann.part("rubric").locator("li")).to_have_text("<b>true</b> before fluent")
    expect(ann.part("rubric").locator("li code")).to_have_text("<b>true</b>")
    expect(ann.part("rubric").locator("img, script, b")).to_have_count(0)
    expect(ann.part("rubric")).to_contain_text("<script>")
    ann.page.keyboard.press("1")
    ann.page.wait_for_timeout(400)
    assert ann.question == before
    ann.page.keyboard.press("Escape")
    expect(ann.part("rubric")).to_be_hidden()
    ann.press("1")
    assert len(list(store.labels(annotator="help"))) == 1


def test_models_and_columns_are_nowhere_in_the_page(server: Server, annotator: Open) -> None:
    ann = annotator(server, "blind")
    for _ in range(3):
        assert MODEL not in ann.page.content()
        assert "alpha" in ann.page.content()
        ann.press("t")
    assert MODEL not in ann.page.request.get(f"{server.url}/?annotator=blind").text()
    assert MODEL not in ann.page.request.get(f"{server.url}/summary").text()


def test_name_is_asked_for(server: Server, browser: sync_api.Browser) -> None:
    page = browser.new_page()
    page.goto(server.url)
    page.locator("[data-testid=name]").fill("   ")
    page.keyboard.press("Enter")
    expect(page.locator("[data-testid=problem]")).to_contain_text("the name is empty")
    page.locator("[data-testid=name]").fill("Ann & Bob")
    page.keyboard.press("Enter")
    page.locator("[data-testid=prompt]").wait_for()
    assert page.url.endswith("/?annotator=Ann+%26+Bob")
    page.goto(f"{server.url}/?annotator={'x' * 70}")
    expect(page.locator("[data-testid=problem]")).to_contain_text("70 characters")
    page.close()


@pytest.mark.parametrize("at", range(len(hostile.TEXTS)))
def test_hostile_texts_are_inert_text(
    at: int, server: Server, store: PreferenceStore, annotator: Open
) -> None:
    text = hostile.TEXTS[at]
    show_first(store, 100 + at, text, f"other {text}", prompt=text)
    ann = annotator(server, f"hostile{at}")
    ann.page.wait_for_timeout(300)
    assert ann.page.evaluate("window.broken") is None
    body = ann.page.locator("body").inner_text()
    assert re.search("[\x1b\x9b\x07\u202e\u2066\u200b\u200d\ufeff]", body) is None
    assert ann.page.locator("main img, main script, main svg.broken").count() == 0
    if "\u202e" in text:
        assert "\\u202e\\u2066\\u200b\\u200d\\ufeff" in ann.part("prompt").inner_text()
    if text in (hostile.MARKUP, "{{ 7 * 7 }} ${7*7} :options"):
        assert ann.part("prompt").inner_text() == text


def test_scripts_keep_their_direction_blanks_and_joiners(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    show_first(store, 200, ARABIC, f"{CHINESE}\r\n{PERSIAN}", prompt=PERSIAN)
    ann = annotator(server, "scripts2")
    texts = {ann.part(side).inner_text() for side in ("left", "right")}
    assert texts == {ARABIC, f"{CHINESE}\n{PERSIAN}"}
    assert ann.question == PERSIAN
    side = next(s for s in ("left", "right") if ann.part(s).inner_text() == ARABIC)
    block = ann.part(side).locator("div")
    assert block.evaluate("e => getComputedStyle(e).direction") == "rtl"
    assert block.evaluate("e => getComputedStyle(e).unicodeBidi") == "plaintext"


def test_code_keeps_its_blanks_and_is_monospace(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    code = "See:\n\n```python\nif x:\n\treturn  1\n```\n\nDone."
    show_first(store, 201, code, "\n".join(f"line {n}" for n in range(300)))
    ann = annotator(server, "code")
    side = next(s for s in ("left", "right") if "See" in ann.part(s).inner_text())
    block = ann.part(side).locator(".code")
    assert block.text_content() == "```python\nif x:\n\treturn  1\n```"
    font = "e => getComputedStyle(e).fontFamily"
    assert "mono" in block.evaluate(font)
    words = ann.part(side)
    assert "mono" not in words.evaluate(font)
    ann.page.keyboard.press("m")
    ann.page.wait_for_url("**font=mono**")
    assert "mono" in words.evaluate(font)
    # Both long and short answers stay in view, with the buttons below.
    boxes = [ann.part(name).bounding_box() for name in ("left", "right", "do-left", "do-right")]
    assert all(box is not None and box["y"] + box["height"] <= 800 for box in boxes)
    assert len({(box["y"], box["height"]) for box in boxes[:2] if box}) == 1
    longer = ann.part("right" if side == "left" else "left")
    assert longer.evaluate("e => e.scrollHeight > e.clientHeight")


def test_narrow_screen_shows_both_answers(
    server: Server, store: PreferenceStore, annotator: Open
) -> None:
    show_first(store, 202, "word " * 2_000, "x" * 5_000, prompt="long " * 500)
    ann = annotator(server, "narrow", 400, 800)
    ann.page.wait_for_timeout(300)
    assert ann.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert ann.page.evaluate("document.documentElement.scrollHeight") <= 800
    for name in ("prompt", "left", "right", "do-left", "do-tie", "do-right", "do-skip", "do-undo"):
        box = ann.part(name).bounding_box()
        assert box is not None, name
        assert box["x"] >= 0, name
        if name != "prompt":
            assert box["x"] + box["width"] <= 400, name
            assert box["y"] + box["height"] <= 800, name
        if name in ("left", "right"):
            assert box["height"] > 120, name
    for path, shown in (("/summary", "[data-testid=summary] .panel"), ("/", "[data-testid=name]")):
        ann.page.goto(f"{server.url}{path}")
        ann.page.locator(shown).first.wait_for()
        assert ann.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_controls_have_names_and_texts_take_the_focus(server: Server, annotator: Open) -> None:
    ann = annotator(server, "names")
    assert ann.page.evaluate(NAMELESS) == []
    for name in ("prompt", "left", "right"):
        ann.part(name).focus()
        assert ann.page.evaluate("document.activeElement.dataset.testid") == name


# ---------------------------------------------------------------- several people, gold


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Four pairs for two people each, and two pairs with a known label, which come first."""
    folder = tmp_path_factory.mktemp("pool")
    rows = [{"prompt": f"known {n}", "chosen": "yes", "rejected": "no"} for n in range(2)]
    (folder / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with PreferenceStore(folder / "a.db", create=True) as store:
        store.add(record for number in range(4) for record in pair(number))
    gold = ("--gold", str(folder / "gold.jsonl"), "--gold-rate", "1")
    with Server(folder / "a.db", "--overlap", "2", *gold) as started:
        yield started


def test_overlap_gold_and_agreement_are_summarised_live(
    pool: Server, annotator: Open, browser: sync_api.Browser
) -> None:
    summary = browser.new_page()
    summary.goto(f"{pool.url}/summary")
    gold = summary.locator("[data-testid=gold]")
    expect(gold).to_contain_text("no label of gold yet")
    seen: dict[str, list[str]] = {}
    for name in ("ann", "bob"):
        person = annotator(pool, name)
        seen[name] = []
        while person.question:
            assert "gold" not in person.page.content().lower()
            known = person.question.startswith("known")
            wanted = ("yes" if name == "ann" else "no") if known else "alpha"
            left = person.part("left").inner_text() == wanted
            seen[name].append(person.press("1" if left else "2"))
        expect(person.part("finished")).to_be_visible()
    questions = {f"question {n}" for n in range(4)}
    known = {"known 0", "known 1"}
    assert set(seen["ann"]) == set(seen["bob"]) == questions | known
    assert [len(asked) for asked in seen.values()] == [6, 6]
    # Ann found both known labels, Bob none; they agree on the four others.
    expect(gold).to_contain_text("50 %", timeout=WAIT)
    expect(gold).to_contain_text("of 4")
    rows = summary.locator("[data-testid=annotators] tbody tr")
    expect(rows.nth(0)).to_contain_text("100 %")
    expect(rows.nth(1)).to_contain_text("0 %")
    expect(summary.locator("[data-testid=agreement]")).to_contain_text("0.67")
    expect(summary.locator("[data-testid=agreement]")).to_contain_text("6 pairs")
    expect(summary.locator("[data-testid=kappa]")).to_contain_text("[")
    summary.close()
    with PreferenceStore(pool.store) as opened:
        labels = list(opened.labels(source="human"))
    assert len({(label.pair, label.annotator) for label in labels}) == len(labels) == 12


def test_pairs_that_come_later_are_looked_for(pool: Server, annotator: Open) -> None:
    late = annotator(pool, "latecomer")
    while late.question:
        late.press("t")
    with PreferenceStore(pool.store) as opened:
        opened.add(pair(50))
    late.ready()
    late.page.keyboard.press("Enter")
    expect(late.part("prompt")).to_have_text("question 50")


# ---------------------------------------------------------------- who may ask


def test_other_hosts_need_the_token(tmp_path: Path, browser: sync_api.Browser) -> None:
    with PreferenceStore(tmp_path / "a.db", create=True) as store:
        store.add(pair(0))
    token = "a-token-of-the-environment"
    with Server(tmp_path / "a.db", "--host", "0.0.0.0", token=token) as served:
        assert [url.endswith("?token=$KEEL_TOKEN") for url in served.printed] == [True, True]
        context = browser.new_context()
        page = context.new_page()
        for path in ("/", "/?annotator=ann", "/summary", "/?token=wrong"):
            answer = page.goto(f"{served.url}{path}")
            assert answer is not None
            assert answer.status == 403
            assert "alpha" not in page.content()
        page.goto(f"{served.url}/?token={token}")
        page.locator("[data-testid=name]").fill("ann")
        page.keyboard.press("Enter")
        page.locator("[data-testid=prompt]").wait_for()
        assert "token" not in page.url
        context.close()
