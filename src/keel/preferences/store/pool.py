"""A store's pairs as a pool to choose from: labels, texts, how often a judge agrees with people."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.proportions import share_interval
from keel.analysis.statistics import Array, Interval
from keel.data.preferences.schema import Preference
from keel.preferences.store.records import Source
from keel.preferences.store.store import PAGE, PreferenceStore

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LabelPool:
    """Every pair of a store, in the order of adding.

    `label_C` is the mean of people's labels, of the others' where people gave none; NaN where no
    one did. `people_C` and `judge_C` say whether people and a judge have labelled the pair. Skips
    count for nothing. `priority` is the highest of all pairs.
    """

    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    rounds: npt.NDArray[np.int64]
    label_C: Array
    people_C: Mask
    judge_C: Mask
    priority: float


def read_pool(store: PreferenceStore, sources: Collection[Source] | None = None) -> LabelPool:
    """The pairs and what is known of them; only labels of `sources` make `label_C`."""
    pairs = store.database.rows("SELECT id, prompt, round, priority FROM pairs ORDER BY seq")
    ids = tuple(row[0] for row in pairs)
    at = {id: number for number, id in enumerate(ids)}
    label, people, judge = np.full(len(ids), np.nan), *np.zeros((2, len(ids)), dtype=bool)
    other: dict[int, list[float]] = {}
    for id, source, mean in _means(store):
        number = at[id]
        people[number] |= source == "human"
        judge[number] |= source == "judge"
        if sources is not None and source not in sources:
            continue
        if source == "human":
            label[number] = mean
        else:
            other.setdefault(number, []).append(mean)
    for number, means in other.items():
        if math.isnan(label[number]):
            label[number] = math.fsum(means) / len(means)
    return LabelPool(
        ids,
        tuple(row[1] for row in pairs),
        np.array([row[2] for row in pairs], dtype=np.int64),
        label,
        people,
        judge,
        max((row[3] for row in pairs), default=0.0),
    )


def judge_agreement(store: PreferenceStore) -> Interval:
    """How often the judge's mean label is on the side of people's, over pairs that both decided.

    Ties are left out. The interval is clustered by prompt.
    """
    means: dict[str, dict[str, float]] = {}
    for id, source, mean in _means(store):
        if mean != 0.5:
            means.setdefault(id, {})[source] = mean
    both = {id: found for id, found in means.items() if {"human", "judge"} <= found.keys()}
    prompts = dict(store.database.rows("SELECT id, prompt FROM pairs")) if both else {}
    right = [(found["human"] > 0.5) == (found["judge"] > 0.5) for found in both.values()]
    return share_interval(right, [prompts[id] for id in both])


def read_texts(store: PreferenceStore, ids: Sequence[str]) -> Iterator[Preference]:
    """The texts of pairs (by id), in this order, the first completion as `chosen`."""
    sql = (
        "SELECT p.id, q.content, q.columns, a.text, b.text FROM json_each(?) j"
        " JOIN pairs p ON p.id = j.value JOIN prompts q ON q.id = p.prompt"
        ' JOIN completions a ON a.id = p."first"'
        " JOIN completions b ON b.id = p.second ORDER BY j.key"
    )
    for start in range(0, len(ids), PAGE):
        for id, content, columns, first, second in store.database.rows(
            sql, (json.dumps(ids[start : start + PAGE]),)
        ):
            tools = tuple(json.loads(columns).get("tools", ()))
            yield Preference(id, json.loads(content), first, second, tools=tools)


def prefer_pairs(store: PreferenceStore, ids: Iterable[str], highest: float) -> dict[str, float]:
    """Put pairs before all others, in this order; their new priorities."""
    wanted = list(ids)
    top = max(highest, 0.0) + len(wanted)
    priorities = {id: top - place for place, id in enumerate(wanted)}
    store.set_priorities(priorities.items())
    return priorities


def _means(store: PreferenceStore) -> list[tuple[Any, ...]]:
    """(pair, source, mean value) over the labels that are no skip."""
    return store.database.rows(
        "SELECT pair, source, AVG(value) FROM labels WHERE value IS NOT NULL GROUP BY pair, source"
    )
