"""A store's pairs as a pool from which the next ones to label are chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import Array
from keel.data.judged_rows import Preference
from keel.preferences.annotation import gold_labels
from keel.preferences.records import Source
from keel.preferences.selection import (
    HeldOutCheck,
    Method,
    held_out_check,
    hints,
    pool_beliefs,
    scaled_features,
    select_pairs,
)
from keel.preferences.store import PreferenceStore
from keel.types import KeelError

Mask = npt.NDArray[np.bool_]
Features = Callable[[Iterable[Preference]], npt.NDArray[np.floating[Any]]]
"""The features (C, H) of pairs of texts; NaN for a pair that does not fit the model."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelPool:
    """Every pair of a store, in the order of adding.

    `label_C` is the mean of people's labels, of the others' if people gave none; NaN if no one
    did. `people_C` says whether people have labelled the pair. Skips count for nothing.
    """

    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    rounds: npt.NDArray[np.int64]
    label_C: Array
    people_C: Mask


@dataclass(frozen=True, slots=True)
class SelectionPlan:
    """How to choose `count` pairs `by` a method, of which only "random" needs no features.

    Only pairs of a `round` are chosen, only labels of `sources` teach; None: all. `pool` pairs at
    random are chosen among, and as many learned from (None: all).
    """

    by: Method = "random"
    count: int = 100
    round: int | None = None
    sources: Collection[Source] | None = None
    pool: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SelectedBatch:
    """The chosen pairs, a row each, the first to be labelled first; and what is known of them.

    `labelled` pairs teach, `unlabelled` ones were chosen among; `long` do not fit the model.
    """

    labelled: int
    unlabelled: int
    method: Method
    rows: list[dict[str, Any]]
    long: int = 0
    check: HeldOutCheck | None = None
    hints: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        check = self.check
        report = {} if check is None else check.report.as_dict()
        return {
            "labelled": self.labelled,
            "unlabelled": self.unlabelled,
            "left_out_long": self.long,
            "by": self.method,
            "held_out": check and {"learned": check.learned, "n": check.held_out, **report},
            "hints": list(self.hints),
            "chosen": self.rows,
        }


def select_batch(
    store: PreferenceStore, plan: SelectionPlan, features: Features | None = None
) -> SelectedBatch:
    """Choose the pairs to label next, and put them first in people's queue.

    Without features the choice is random. Raises KeelError if there is no pair to choose.
    """
    pool = read_pool(store, plan.sources)
    candidates, labelled = _places(store, pool, plan)
    if features is None:
        order = np.random.default_rng(plan.seed).permutation(candidates)[: plan.count]
        chosen = [{"pair": pool.ids[place]} for place in order]
        batch = SelectedBatch(len(labelled), len(candidates), "random", chosen)
    else:
        batch = _by_features(store, pool, plan, features, candidates, labelled)
    priorities = prefer_pairs(store, [row["pair"] for row in batch.rows])
    rows = [{**row, "priority": priorities[row["pair"]]} for row in batch.rows]
    return replace(batch, rows=rows)


def _by_features(
    store: PreferenceStore,
    pool: LabelPool,
    plan: SelectionPlan,
    features: Features,
    candidates: Sequence[int],
    labelled: Sequence[int],
) -> SelectedBatch:
    places = sorted({*candidates, *labelled})
    found = features(read_texts(store, [pool.ids[place] for place in places]))
    fits: Mask = np.asarray(~np.isnan(found).any(axis=1))
    feature_CH = scaled_features(found[fits])
    kept = [place for place, fit in zip(places, fits, strict=True) if fit]
    at = {place: row for row, place in enumerate(kept)}
    candidates, labelled = ([p for p in some if p in at] for some in (candidates, labelled))
    if not candidates:
        raise KeelError(f"{store.path}: no pair fits the model's context: name another model")
    known = feature_CH[[at[p] for p in labelled]], pool.label_C[labelled]
    pool_CH = feature_CH[[at[p] for p in candidates]]
    check = held_out_check(*known, [pool.prompts[p] for p in labelled], plan.seed)
    beliefs = pool_beliefs(*known, pool_CH, plan.seed)
    picked = select_pairs(plan.by, plan.count, beliefs, plan.seed)
    deviation_C = np.sqrt(beliefs.variance_C)
    rows = [
        {
            "pair": pool.ids[candidates[place]],
            "probability": float(beliefs.uncertainty.probability_C[place]),
            "deviation": float(deviation_C[place]),
            "score": float(score),
        }
        for place, score in zip(picked.index.tolist(), picked.score, strict=True)
    ]
    advice = tuple(hints(len(labelled), check))
    long = int((~fits).sum())
    return SelectedBatch(len(labelled), len(candidates), plan.by, rows, long, check, advice)


def _places(
    store: PreferenceStore, pool: LabelPool, plan: SelectionPlan
) -> tuple[list[int], list[int]]:
    """The pairs to choose among, and those to learn from. Gold pairs have a known label."""
    gold = gold_labels(store)
    asked = np.array([id not in gold for id in pool.ids], dtype=bool)
    if plan.round is not None:
        asked &= pool.rounds == plan.round
    if not asked.any():
        which = "" if plan.round is None else f" of round {plan.round}"
        raise KeelError(f"{store.path}: there is no pair{which}: add pairs first")
    found = [np.flatnonzero(asked & ~pool.people_C), np.flatnonzero(~np.isnan(pool.label_C))]
    if not found[0].size:
        raise KeelError(f"{store.path}: people have labelled every pair: add pairs first")
    if plan.pool is not None:
        found = [
            np.sort(np.random.default_rng([plan.seed, n]).permutation(part)[: plan.pool])
            for n, part in enumerate(found)
        ]
    return found[0].tolist(), found[1].tolist()


def read_pool(store: PreferenceStore, sources: Collection[Source] | None = None) -> LabelPool:
    """The pairs and what is known of them; only labels of `sources` make `label_C`."""
    counts = "l.source IN (SELECT value FROM json_each(?))" if sources is not None else "1"
    rows = store.database.rows(
        "SELECT p.id, p.prompt, p.round, COUNT(l.value) FILTER (WHERE human),"
        f" COALESCE(AVG(l.value) FILTER (WHERE human AND {counts}),"
        f" AVG(l.value) FILTER (WHERE {counts}))"
        " FROM pairs p LEFT JOIN (SELECT *, source = 'human' AS human FROM labels) l"
        " ON l.pair = p.id GROUP BY p.seq ORDER BY p.seq",
        () if sources is None else (json.dumps(list(sources)),) * 2,
    )
    return LabelPool(
        tuple(row[0] for row in rows),
        tuple(row[1] for row in rows),
        np.array([row[2] for row in rows], dtype=np.int64),
        np.array([row[4] for row in rows], dtype=np.float64),
        np.array([row[3] > 0 for row in rows], dtype=bool),
    )


def read_texts(store: PreferenceStore, ids: Sequence[str]) -> Iterator[Preference]:
    """The texts of pairs (by id), in this order, the first completion as `chosen`."""
    for id in ids:
        found = store.judged_pair(id)
        texts = found.first.text, found.second.text
        yield Preference(id, found.prompt.content, *texts, tools=found.prompt.tools)


def prefer_pairs(store: PreferenceStore, ids: Sequence[str]) -> dict[str, float]:
    """Put pairs before all others, in this order; their new priorities."""
    highest = store.database.rows("SELECT COALESCE(MAX(priority), 0) FROM pairs")[0][0]
    top = max(highest, 0.0) + len(ids)
    priorities = {id: top - place for place, id in enumerate(ids)}
    store.set_priorities(priorities.items())
    return priorities
