"""README and docs: size, snippets that run or validate, links that resolve."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import keel
from keel.config.load import load_recipe
from tests.shared import ROOT

README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
MODEL = {"model": {"build": {"hidden_size": 32, "layers": 1, "heads": 2}}}
TASK = {"tasks": [{"name": "addition"}]}
RECIPES = (README, ROOT / "docs/getting-started.md", *sorted((ROOT / "docs/howto").glob("*.md")))


def fences(page: Path | str, language: str) -> list[str]:
    """The code blocks in a language, of a page or of a text."""
    text = page if isinstance(page, str) else page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.M)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_readme_has_at_most_150_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = fences(README, "python")
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert (tmp_path / "runs/tiny-python/metrics.jsonl").is_file()


def test_own_loop_page_runs() -> None:
    page = ROOT / "docs" / "howto" / "own-loop.md"
    space: dict[str, object] = {}
    for block in fences(page, "python"):
        exec(compile(block, str(page), "exec"), space)
    assert 0.0 <= min(space["recent"]) <= 1.0  # type: ignore[call-overload]


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.name)
def test_toml_snippets_are_recipes(page: Path) -> None:
    """A fragment is completed with a model and a task; what it says itself counts."""
    for text in fences(page, "toml"):
        data = tomllib.loads(text)
        rest = {} if "stages" in data else TASK
        whole = {**MODEL, **rest, **data}
        if "name" not in whole["model"] and "build" not in whole["model"]:  # only its lora table
            whole["model"] = {**MODEL["model"], **whole["model"]}
        assert load_recipe(whole).stages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for path, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        if heading:
            assert heading in anchors(target), f"{path}#{heading}"


def test_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: keel\.(\w+)$", page, re.M)
    assert sorted(named) == sorted(set(keel.__all__) - {"__version__"})
