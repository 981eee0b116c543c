"""How far the labelling of a store is, and how well the annotators do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keel.analysis.proportions import share_interval
from keel.analysis.statistics import Interval
from keel.preferences.annotation.settings import AnnotationSettings
from keel.preferences.store.statistics import label_agreement, verdict
from keel.preferences.store.store import PreferenceStore


@dataclass(frozen=True, slots=True)
class LabelProgress:
    """Labels made and wanted, and those that one person made, skips included.

    `overlap` labels are wanted of each pair, and of each gold pair one of this person.
    """

    made: int
    wanted: int
    own: int


@dataclass(frozen=True, slots=True)
class AnnotatorSummary:
    """What one person's labels are; `gold` is the share of known labels that they found."""

    annotator: str
    labels: int
    ties: int
    skips: int
    left: int
    sided: int
    seconds: float | None
    cost: float | None
    gold: Interval


@dataclass(frozen=True, slots=True)
class AnnotationSummary:
    """All of it; `agreement` has an entry for each number of labels a pair, as `keel prefs stats`.

    `gold` is of all annotators, their labels of one pair taken together as a cluster.
    """

    made: int
    wanted: int
    annotators: tuple[AnnotatorSummary, ...]
    gold: Interval
    agreement: tuple[Mapping[str, Any], ...]


def progress(
    store: PreferenceStore, settings: AnnotationSettings, gold: Mapping[str, float], name: str
) -> LabelProgress:
    """Where the work is, for one person. A label of a gold pair counts as any other does."""
    made, wanted = _places(store, settings, gold)
    rows = store.database.rows(
        "SELECT COUNT(*), TOTAL(value IS NOT NULL AND pair IN (SELECT value FROM json_each(?)))"
        " FROM labels WHERE source = 'human' AND annotator = ?",
        (json.dumps(list(gold)), name),
    )
    own, of_gold = rows[0]
    return LabelProgress(made + int(of_gold), wanted + len(gold), own)


def summarise_annotation(
    store: PreferenceStore, settings: AnnotationSettings, gold: Mapping[str, float]
) -> AnnotationSummary:
    """Progress, each annotator's figures, and how far they agree."""
    clause, values = _round(settings)
    rows = store.database.rows(
        "SELECT l.annotator, COUNT(*), TOTAL(l.value = 0.5), TOTAL(l.value IS NULL),"
        " TOTAL((l.value > 0.5 AND l.shown_first = 'first')"
        "  OR (l.value < 0.5 AND l.shown_first = 'second')),"
        " TOTAL(l.value <> 0.5 AND l.shown_first IS NOT NULL), AVG(l.seconds), SUM(l.cost)"
        " FROM labels l JOIN pairs p ON p.id = l.pair"
        f" WHERE l.source = 'human'{clause} GROUP BY l.annotator ORDER BY l.annotator",
        values,
    )
    right = _gold_results(store, gold)
    people = []
    for name, labels, ties, skips, left, sided, seconds, cost in rows:
        found = share_interval([hit for _, hit in right.get(name, ())])
        ties, skips, left, sided = map(int, (ties, skips, left, sided))
        people.append(
            AnnotatorSummary(name, labels, ties, skips, left, sided, seconds, cost, found)
        )
    every = [result for results in right.values() for result in results]
    made, wanted = _places(store, settings, gold)
    return AnnotationSummary(
        made,
        wanted,
        tuple(people),
        share_interval([hit for _, hit in every], [pair for pair, _ in every] or None),
        tuple(label_agreement(store, "human", settings.round).get("human", ())),
    )


def _places(
    store: PreferenceStore, settings: AnnotationSettings, gold: Mapping[str, float]
) -> tuple[int, int]:
    """Labels that were made and are wanted, gold apart; more than `overlap` count no further."""
    clause, values = _round(settings)
    clause += " AND p.id NOT IN (SELECT value FROM json_each(?))"
    values.append(json.dumps(list(gold)))
    made = store.database.rows(
        "SELECT TOTAL(MIN(n, ?)) FROM (SELECT COUNT(*) n FROM labels l"
        " JOIN pairs p ON p.id = l.pair WHERE l.source = 'human' AND l.value IS NOT NULL"
        f"{clause} GROUP BY l.pair)",
        (settings.overlap, *values),
    )[0][0]
    pairs = store.database.rows(f"SELECT COUNT(*) FROM pairs p WHERE 1{clause}", values)[0][0]
    return int(made), pairs * settings.overlap


def _gold_results(
    store: PreferenceStore, gold: Mapping[str, float]
) -> dict[str, list[tuple[str, bool]]]:
    """Of each annotator the gold pairs they labelled, and whether as they should; no skips."""
    rows = store.database.rows(
        "SELECT annotator, pair, value FROM labels WHERE source = 'human' AND value IS NOT NULL"
        " AND pair IN (SELECT value FROM json_each(?)) ORDER BY seq",
        (json.dumps(list(gold)),),
    )
    found: dict[str, list[tuple[str, bool]]] = {}
    for name, pair, value in rows:
        found.setdefault(name, []).append((pair, verdict(value) == verdict(gold[pair])))
    return found


def _round(settings: AnnotationSettings) -> tuple[str, list[Any]]:
    return ("", []) if settings.round is None else (" AND p.round = ?", [settings.round])
