"""`keel report`: one file, inert, with the run's numbers."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from keel.runs.layout import RunFolder
from keel.runs.writer import Recorder
from keel.types import KeelError
from keel.view.formulas import font_face
from keel.view.report import write_report
from tests.training.small import run
from tests.view.hostile import ANSI, MARKUP, RECIPE, row, write


class Elements(HTMLParser):
    """The elements of a page and what their attributes lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.handlers: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        for name, value in attrs:
            self.handlers += [name] if name.startswith("on") else []
            links = name in ("src", "href", "xlink:href", "action") and not (
                value or ""
            ).startswith("#")
            self.links += [value or ""] if links else []


def elements(path: Path) -> Elements:
    found = Elements()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def test_report_is_one_file_without_scripts_or_requests(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "steps=2", "evaluation.prompts=4")
    path = write_report(folder.path)
    found = elements(path)
    assert path == folder.path / "report.html"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not found.names & {"script", "iframe", "link", "object", "img"}
    assert (found.handlers, found.links) == ([], [])
    text = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert text.count("<svg") >= 6
    assert "<math" in text
    assert "font-src data:" in text
    assert "data:font/woff2" in text
    first = path.read_bytes()
    assert write_report(folder.path).read_bytes() == first, "not a function of the run"


def test_hostile_texts_are_inert_in_the_report(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    path = write_report(folder.path)
    text = path.read_text(encoding="utf-8").replace(font_face(), "")
    found = elements(path)
    assert "script" not in found.names
    assert "img" not in found.names
    assert found.handlers == []
    assert "&lt;script&gt;" in text
    assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|(?<![\d.])49(?![\d.])", text)
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", text
    )
    assert r"\x1b[31mred" in text
    assert MARKUP not in text
    assert ANSI not in text


def test_metrics_of_any_name_are_plotted(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RECIPE)
    names = ("$\\frac{", "_hidden", "<b>bold</b>", 'quoted " name', "game/wins", "game/losses")
    with Recorder(folder) as recorder:
        for step in (1, 2):
            recorder.metrics(0, step, {name: float(step) for name in names})
    text = write_report(folder.path).read_text(encoding="utf-8")
    assert (
        text.count(
            "Recorded by a reward function with log_metric, or by a callback with control.log."
        )
        == 5
    )
    assert "<b>bold" not in text
    for title in ("$\\frac{", "_hidden", "&lt;b&gt;bold&lt;/b&gt;", "quoted &#34; name", "game"):
        assert f"<h3>{title}</h3>" in text


def test_large_groups_show_their_best_and_worst(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RECIPE.format(name="large"))
    with Recorder(folder) as recorder:
        recorder.metrics(0, 1, {"reward": 0.5})
        rows = [row(f"answer{at}", reward=at / 20, prompt="same") for at in range(20)]
        recorder.rollouts(0, 1, rows)
    text = write_report(folder.path).read_text(encoding="utf-8")
    shown = [at for at in range(20) if f"> answer{at}<" in text]
    assert shown == [0, 1, 2, 3, 16, 17, 18, 19]
    assert "12 others are left out" in text


def test_report_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="is not a run folder"):
        write_report(tmp_path)
    folder = write(tmp_path / "run")
    with pytest.raises(KeelError, match="is not a run folder"):
        write_report(tmp_path)  # the one in it is not meant
    with pytest.raises(KeelError, match=r"give a name that ends in \.html"):
        write_report(folder.path, tmp_path / "x.png")


def test_damaged_rollouts_are_left_out_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    folder.rollouts(0, 4).write_bytes(b"PAR1 no table")
    text = write_report(folder.path).read_text(encoding="utf-8")
    assert text.count("rollouts/step-000004.parquet is damaged and left out") == 1
    assert "Rollouts of rl step 3" in text
    for step in (1, 2, 3):
        folder.rollouts(0, step).write_bytes(b"")
    text = write_report(folder.path).read_text(encoding="utf-8")
    assert text.count("is damaged and left out") == 4
    assert "Rollouts of" not in text


def test_a_judges_words_stand_beside_the_scores(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RECIPE.format(name="judged"))
    components = {"judge": 0.25, "outcome": -1.5}
    extras = {"judge_reason": "too <b>brief</b>", "judge_unparsed": ""}
    with Recorder(folder) as recorder:
        recorder.metrics(0, 1, {"reward": 0.5})
        recorder.rollouts(0, 1, [row("answer", components=components, extras=extras)])
    text = write_report(folder.path).read_text(encoding="utf-8")
    said = re.search(r"<dl.*?</dl>", text, re.DOTALL)
    assert said is not None
    assert re.findall("<dt>(.*?)</dt>", said[0]) == ["judge: 0.25", "outcome: -1.5"]
    assert "reason: too &lt;b&gt;brief" in said[0]
    assert "unparsed" not in said[0]


def test_pictures_of_a_reward_model_are_in_the_report(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    folder.pictures.mkdir()
    for name in ("rl-accuracy-by-length.png", "other-margins.png"):
        (folder.pictures / name).write_bytes(b"\x89PNG of " + name.encode())
    path = write_report(folder.path)
    assert "accuracy by length" in path.read_text(encoding="utf-8")
    images = [link for link in elements(path).links if link]
    assert len(images) == 1
    assert base64.b64decode(images[0].split(",")[1]) == b"\x89PNG of rl-accuracy-by-length.png"
