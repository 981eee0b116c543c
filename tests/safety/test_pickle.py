"""No pickle is loaded or written: what ruff's banned names (pyproject.toml) do not see."""

from __future__ import annotations

import re

from tests.source_tree import sources

PICKLES = re.compile(
    r"safe_serialization=(?!True\b)|allow_pickle|weights_only|pickle_module|(?:read|to)_pickle"
    r"|_load_from_state|(?:__import__|import_module)\([\"'](?:\w*pickle|dill|joblib|marshal|shelve|dbm)"
)


def test_the_source_pickles_nothing() -> None:
    assert [one.name for one in sources() if PICKLES.search(one.text)] == []


def test_the_law_sees_what_it_forbids() -> None:
    for text in ("f(x, safe_serialization=False)", "__import__('dill')", "d.to_pickle('x')"):
        assert PICKLES.search(text)
