"""How far the labelling of a store is, and how well the annotators do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keel.analysis.statistics import Interval, share_interval
from keel.preferences.annotation.settings import AnnotationSettings
from keel.preferences.store.statistics import label_agreement, labels_by, verdict
from keel.preferences.store.store import PreferenceStore, where


@dataclass(frozen=True, slots=True)
class LabelProgress:
    """Labels made and wanted, and those that one person made, skips included.

    `overlap` labels are wanted of each pair, and of each gold pair one of this person.
    """

    made: int
    wanted: int
    own: int


@dataclass(frozen=True, slots=True)
class AnnotationSummary:
    """Labels made and wanted, gold apart, and how good they are.

    `annotators` is `labels_by` of people, each with `gold`, the share of known labels that they
    found; `gold` is that of all, their labels of one pair taken together as a cluster; `agreement`
    has an entry for each number of labels a pair, as `keel prefs stats`.
    """

    made: int
    wanted: int
    annotators: tuple[Mapping[str, Any], ...]
    gold: Interval
    agreement: tuple[Mapping[str, Any], ...]


def progress(
    store: PreferenceStore, settings: AnnotationSettings, gold: Mapping[str, float], name: str
) -> LabelProgress:
    """Where the work is, for one person. A label of a gold pair counts as any other does."""
    made, wanted = _places(store, settings, gold)
    rows = store.database.rows(
        "SELECT COUNT(*), COUNT(value) FILTER (WHERE pair IN (SELECT value FROM json_each(?)))"
        " FROM labels WHERE source = 'human' AND annotator = ?",
        (json.dumps(list(gold)), name),
    )
    own, of_gold = rows[0]
    return LabelProgress(made + of_gold, wanted + len(gold), own)


def summarise_annotation(
    store: PreferenceStore, settings: AnnotationSettings, gold: Mapping[str, float]
) -> AnnotationSummary:
    """Progress, each annotator's figures, and how far they agree."""
    hits = store.database.rows(
        "SELECT annotator, pair, value FROM labels WHERE source = 'human' AND value IS NOT NULL"
        " AND pair IN (SELECT value FROM json_each(?)) ORDER BY seq",
        (json.dumps(list(gold)),),
    )
    right = [(name, pair, verdict(value) == verdict(gold[pair])) for name, pair, value in hits]
    people = [
        {**row, "gold": share_interval([hit for name, _, hit in right if name == row["annotator"]])}
        for row in labels_by(store, "annotator", "human", settings.round)
    ]
    every = share_interval([hit for *_, hit in right], [pair for _, pair, _ in right])
    agreement = label_agreement(store, "human", settings.round).get("human", ())
    made, wanted = _places(store, settings, gold)
    return AnnotationSummary(made, wanted, tuple(people), every, tuple(agreement))


def _places(
    store: PreferenceStore, settings: AnnotationSettings, gold: Mapping[str, float]
) -> tuple[int, int]:
    """Labels that were made and are wanted, gold apart; more than `overlap` count no further."""
    clause, values = where(**{"p.round": settings.round})
    clause += " AND p.id NOT IN (SELECT value FROM json_each(?))"
    values.append(json.dumps(list(gold)))
    made = store.database.rows(
        "SELECT COALESCE(SUM(MIN(n, ?)), 0) FROM (SELECT COUNT(*) n FROM labels l"
        " JOIN pairs p ON p.id = l.pair WHERE l.source = 'human' AND l.value IS NOT NULL"
        f"{clause} GROUP BY l.pair)",
        (settings.overlap, *values),
    )[0][0]
    pairs = store.database.rows(f"SELECT COUNT(*) FROM pairs p WHERE 1{clause}", values)[0][0]
    return made, pairs * settings.overlap
