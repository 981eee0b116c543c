"""The extras: their table, and the one command that adds them."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from keel.platform import extras
from keel.platform.extras import EXTRAS, install_command, versions
from tests.shared import ROOT

OURS = {"all", "dev", "docs"}
"""Extras that are lists of others, or for work on Keel itself."""


def test_table_has_the_extras_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = project["optional-dependencies"]
    assert EXTRAS.keys() == stated.keys() - OURS
    for name, (packages, _) in EXTRAS.items():
        wanted = " ".join(stated[name])
        for inner in re.findall(r"keel-rl\[([\w,]+)\]", wanted):
            wanted += " ".join(text for other in inner.split(",") for text in stated[other])
        # pygame-ce comes by an extra of gymnasium.
        assert [p for p in packages if p not in wanted and p != "pygame-ce"] == []
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == EXTRAS.keys()


def test_missing_packages_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "odd", (("numpy", "no-such-package"), ""))
    found = versions("odd")
    assert found["numpy"]
    assert found["no-such-package"] is None


def test_command_names_the_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shlex.split(install_command("lora", "view"))[2:] == ["-e", f"{ROOT}[lora,view]"]
    tree = tmp_path / "it's here"
    (tree / "src" / "keel").mkdir(parents=True)
    (tree / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "SOURCE", tree)
    assert shlex.split(install_command("ray")) == ["pip", "install", "-e", f"{tree}[ray]"]
    monkeypatch.setattr(extras, "SOURCE", tmp_path)
    assert install_command("ray") == "pip install 'keel-rl[ray]'"


def test_messages_and_pages_use_that_command() -> None:
    """There is no package of that name on an index."""
    pattern = re.compile(r"pip install[^\n]*keel-rl")
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [path.name for path in files if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == ["extras.py"]
