"""Totals of the project, which only go down: `tests/totals.toml` holds the most that each may be.

A change that makes something larger raises its number there, and says why in its message.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SOURCE, sources

TOTALS = tomllib.loads((ROOT / "tests" / "totals.toml").read_text(encoding="utf-8"))
ROOM = 150
"""Lines below its number that a package may be before the number must be lowered."""


def lines(*folders: Path, ending: str = "py") -> int:
    files = (path for folder in folders for path in folder.rglob(f"*.{ending}"))
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def measured() -> dict[str, int]:
    """Lines of Python by package of Keel; files; other totals."""
    found = dict.fromkeys(TOTALS["packages"], 0)
    for source in sources():
        package = source.package or "keel"
        found[package] = found.get(package, 0) + source.text.count("\n")
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in pages())
    return found | {
        "files": len(sources()),
        "C": lines(SOURCE, ending="c") + lines(SOURCE, ending="h"),
        "tests": lines(ROOT / "tests"),
        "studies": lines(ROOT / "studies", ROOT / "benchmarks"),
        "words": words,
    }


def pages() -> list[Path]:
    """The pages of the documentation's site."""
    docs = ROOT / "docs"
    hidden = {docs / "log.md", *(docs / "decisions").glob("*.md")}
    return [path for path in docs.rglob("*.md") if path not in hidden]


LIMITS = TOTALS["packages"] | TOTALS["others"]


def test_every_total_has_a_limit() -> None:
    assert measured().keys() == LIMITS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_total_is_within_its_limit(name: str) -> None:
    assert measured()[name] <= LIMITS[name]


def test_limits_of_packages_follow_their_totals() -> None:
    """A reduction cannot be spent again unseen."""
    found = measured()
    assert {n for n, limit in TOTALS["packages"].items() if found[n] < limit - ROOM} == set()
