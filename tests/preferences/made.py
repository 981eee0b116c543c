"""Small stores for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.preferences.records import (
    CompletionRecord,
    LabelRecord,
    Lease,
    PairRecord,
    PromptRecord,
    Record,
)
from keel.preferences.store import PreferenceStore


def pair(
    number: int,
    round: int = 0,
    texts: Sequence[str] = ("a", "b"),
    models: Sequence[str] = ("", ""),
    prompt: str = "",
    **columns: str,
) -> list[Record]:
    """The prompt q0, its completions a0 and b0 and their pair p0, or those of another number."""
    head = PromptRecord(prompt or f"prompt {number}", id=f"q{number}")
    answers = [
        CompletionRecord(head.id, text, model, id=f"{side}{number}")
        for side, text, model in zip("ab", texts, models, strict=True)
    ]
    ids = [answer.id for answer in answers]
    return [head, *answers, PairRecord(head.id, *ids, round, columns=columns, id=f"p{number}")]


def made(path: Path, pairs: int = 0) -> PreferenceStore:
    """A store with pairs p0, p1, ..."""
    store = PreferenceStore(path, create=True)
    store.add([record for number in range(pairs) for record in pair(number)])
    return store


def human(pair: str, value: float | None, annotator: str = "ann") -> LabelRecord:
    """A person's label."""
    return LabelRecord(pair, value, "human", annotator)


def leased(store: PreferenceStore, annotator: str, now: float = 0.0, **which: Any) -> Lease:
    """The next pair of a person, who has one."""
    lease = store.lease_next(annotator, now, **which)
    assert lease is not None
    return lease


def taken(store: PreferenceStore) -> bool:
    """Whether each pair's count of filled places is that of its open leases and human labels."""
    return not store.database.rows(
        "SELECT id FROM pairs p WHERE taken <>"
        " (SELECT COUNT(*) FROM leases WHERE pair = p.id AND label IS NULL)"
        " + (SELECT COUNT(value) FROM labels WHERE pair = p.id AND source = 'human')"
    )
