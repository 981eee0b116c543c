"""Pairs with a known label, which show how well a person judges.

A gold pair is one with a label of source "rule" by the annotator "gold".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from keel.preferences.annotation.settings import digest
from keel.preferences.store.formats import Attribution
from keel.preferences.store.imports import import_file
from keel.preferences.store.records import Source
from keel.preferences.store.store import PreferenceStore
from keel.types import KeelError

SOURCE: Source = "rule"
ANNOTATOR = "gold"


def add_gold(store: PreferenceStore, path: Path, round: int) -> int:
    """Add rows of prompt/chosen/rejected (JSONL or Parquet) as gold pairs; how many there are.

    Raises KeelError, with nothing added, if the file or a row of it cannot be read.
    """
    if not path.is_file():
        raise KeelError(f"--gold {path}: there is no such file: fix the path")
    return import_file(store, "trl", path, Attribution(SOURCE, ANNOTATOR, round), "stop").rows


def gold_labels(store: PreferenceStore) -> dict[str, float]:
    """The known label of each gold pair (by id); of several the last."""
    sql = "SELECT pair, value FROM labels WHERE source = ? AND annotator = ? AND value IS NOT NULL"
    return dict(store.database.rows(f"{sql} ORDER BY seq", (SOURCE, ANNOTATOR)))


def gold_order(gold: Mapping[str, float], seed: int, annotator: str) -> list[str]:
    """The gold pairs in the order in which a person gets them."""
    return sorted(gold, key=lambda pair: digest("gold", seed, annotator, pair))
