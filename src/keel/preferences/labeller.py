"""Labels that people give to the pairs of which a reward model is least sure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.fields import derive
from keel.config.judging import JudgingStage, People, SampledData
from keel.config.repeat import round_of
from keel.data.preferences import fields
from keel.data.preferences.fields import Fields
from keel.data.preferences.schema import Preference
from keel.models.reward import RewardModel
from keel.preferences.acquisition import laplace_beliefs, select_pairs
from keel.preferences.features import pair_features
from keel.preferences.posterior import likeliest_posterior
from keel.preferences.store.pool import prefer_pairs
from keel.preferences.store.records import (
    CompletionRecord,
    CostKind,
    CostRecord,
    LabelRecord,
    PairRecord,
    PromptRecord,
    Record,
)
from keel.preferences.store.store import PreferenceStore
from keel.preferences.word_features import scaled_features
from keel.runs.layout import RunFolder
from keel.training.judged_data import EncodedPair
from keel.training.sampled_data import read_jsonl, write_jsonl
from keel.types import KeelError

SIMULATED = "simulated"
"""The annotator of labels that no person gave."""
Row = dict[str, Any]
Choose = Callable[[Sequence[Row]], list[int]]
"""The pairs of a pool that people label, by their place in it, the first one first."""


@dataclass(frozen=True, slots=True)
class PoolPair:
    """A pair of the pool in the store: its records, and whether `chosen` is its first completion.

    Completions are ordered by id, so that the order says nothing of who is preferred.
    """

    records: tuple[PromptRecord, CompletionRecord, CompletionRecord, PairRecord]
    chosen_first: bool

    @property
    def id(self) -> str:
        return self.records[-1].id

    def judged(self, value: float) -> float:
        """P(the first completion is better), of P(`chosen` is better) or the reverse."""
        return value if self.chosen_first else 1 - value


class PeopleLabeller:
    """`keel.training.labelling.PairLabeller`: labels of people, in the preference store of a run.

    People get the chosen pairs alone; once these are labelled, every pair is in the run's store.
    Pairs that people have labelled in earlier rounds are not chosen again.
    """

    def label(
        self,
        folder: RunFolder,
        stage: JudgingStage,
        *,
        model: RewardModel,
        encode: Callable[[Any], Any],
        limit: int | None,
        seed: int,
    ) -> str:
        choice = stage.sampled
        assert choice is not None
        assert choice.people is not None
        choose = partial(
            choose_pairs, people=choice.people, model=model, encode=encode, limit=limit,
            token_budget=stage.token_budget, seed=seed,
        )  # fmt: skip
        return _label_pairs(folder, stage.name, choice, choice.people, choose, seed)

    def check(self, folder: RunFolder) -> None:
        """Later rounds would choose and pay for other pairs. Labels that were added since are no
        difference."""
        _check_labels(folder)


def _label_pairs(
    folder: RunFolder,
    stage: str,
    choice: SampledData,
    people: People,
    choose: Choose,
    seed: int,
) -> str:
    """Write the train rows; a line on what was labelled."""
    round = round_of(stage)
    pool = read_jsonl(folder.pool(stage))
    pairs = [_in_store(row, round) for row in pool]
    with PreferenceStore(folder.preferences, create=True) as store:
        known = _labels(store)
        chosen = _chosen(folder.chosen(stage), pool, pairs, known, choose)[: people.labels]
        _forecast(store, stage, round, len(pool) * choice.price, len(chosen) * people.price)
        if people.noise is None:
            _ask(store, folder, stage, [pairs[at] for at in chosen], round, choice.price)
        _add(store, pairs, round, choice.price)
        if people.noise is not None:
            rng = np.random.default_rng(derive(seed, "people"))
            values = [pairs[at].judged(_simulated(pool[at], people.noise, rng)) for at in chosen]
            store.add(
                LabelRecord(pairs[at].id, value, "human", SIMULATED, round=round, cost=people.price)
                for at, value in zip(chosen, values, strict=True)
            )
        labels = _labels(store)
        own = {pairs[at].id for at in chosen}
        given = list(store.labels(source="human"))
        costs = [label.cost for label in given if label.pair in own]
    write_jsonl(folder.labels(stage), map(_stated, given))
    rows = [_row(row, pair, labels.get(pair.id)) for row, pair in zip(pool, pairs, strict=True)]
    write_jsonl(folder.rows(stage, "train"), rows)
    labelled = sum(row["source"] == "people" for row in rows)
    spent = math.fsum(cost for cost in costs if cost is not None)
    return (
        f"{len(pool)} pairs labelled by the rewards (${len(pool) * choice.price:,.2f}), "
        f"{labelled} of them by people (${spent:,.2f})"
    )


def _check_labels(folder: RunFolder) -> None:
    """Raise KeelError if the store lacks labels of people that a stage began with."""
    for stage in folder.stages:
        path = folder.labels(stage)
        before = read_jsonl(path) if path.exists() else []
        if not before:
            continue
        found: set[Any] = set()
        if folder.preferences.exists():
            with PreferenceStore(folder.preferences) as store:
                found = {tuple(_stated(label).values()) for label in store.labels(source="human")}
        lost = sum(tuple(label.values()) not in found for label in before)
        if lost:
            raise KeelError(
                f"{folder.preferences}: {lost} of {len(before)} labels that people had given when "
                f"stage {stage!r} began are missing or changed: restore it from a copy"
            )


def _stated(label: LabelRecord) -> Row:
    return {name: getattr(label, name) for name in ("pair", "annotator", "value")}


def _ask(
    store: PreferenceStore,
    folder: RunFolder,
    stage: str,
    chosen: Sequence[PoolPair],
    round: int,
    price: float,
) -> None:
    """Have people label the chosen pairs. Raises KeelError until all are labelled or skipped."""
    _add(store, chosen, round, price)
    labels = _labels(store)
    missing = [pair.id for pair in chosen if pair.id not in labels]
    if missing:
        highest = max((pair.priority for pair in store.pairs()), default=0.0)
        prefer_pairs(store, missing, highest)
        raise KeelError(
            f"stage {stage!r} waits for people: {len(missing)} of {len(chosen)} pairs have no "
            f"label: label them with keel prefs annotate {folder.preferences}"
        )


def _chosen(
    path: Path,
    pool: Sequence[Row],
    pairs: Sequence[PoolPair],
    labelled: Collection[str],
    choose: Choose,
) -> list[int]:
    """The pairs that people label, by their place in the pool; kept in a file, since another
    machine may choose others. Fewer may be wanted later; more are chosen in the next round."""
    if not path.exists():
        first = {pair.id: at for at, pair in reversed(list(enumerate(pairs)))}
        fresh = sorted(at for id, at in first.items() if id not in labelled)
        write_jsonl(path, [{"row": fresh[at]} for at in choose([pool[at] for at in fresh])])
    return [row["row"] for row in read_jsonl(path)]


def _forecast(store: PreferenceStore, stage: str, round: int, api: float, human: float) -> None:
    """What the labels of a round are expected to cost, unless it is there."""
    known = {cost.id for cost in store.costs(forecast=True)}
    amounts: dict[CostKind, float] = {"api": api, "human": human}
    store.add(
        CostRecord(f"{stage}/{kind}", kind, amount, "dollars", "labels", round, forecast=True)
        for kind, amount in amounts.items()
        if f"{stage}/{kind}" not in known
    )


def choose_pairs(
    pool: Sequence[Row],
    *,
    people: People,
    model: RewardModel,
    encode: Callable[[Preference], EncodedPair],
    limit: int | None,
    token_budget: int,
    seed: int,
) -> list[int]:
    """The pairs of the pool that people label, the first one first; none is longer than `limit`.

    The features are the model's before the stage, the posterior of its head is fitted to the
    rewards' labels.
    """
    rows = [encode(fields.pair(Fields(row, f"pair {at}"), str(at))) for at, row in enumerate(pool)]
    kept = [at for at, row in enumerate(rows) if limit is None or row.longest <= limit]
    if not kept:
        return []
    features = pair_features(model, [rows[at] for at in kept], token_budget).feature_CH
    found = scaled_features(features)
    beliefs = laplace_beliefs(likeliest_posterior(found, np.ones(len(found))), found)
    selected = select_pairs(people.by, people.labels, beliefs, derive(seed, "choice"))
    return [kept[at] for at in selected.index.tolist()]


def _in_store(row: Row, round: int) -> PoolPair:
    prompt = PromptRecord(row["prompt"], {k: row[k] for k in ("tools",) if k in row})
    two = [
        CompletionRecord(prompt.id, row[side], model="policy", round=round)
        for side in ("chosen", "rejected")
    ]
    first, second = sorted(two, key=lambda one: one.id)
    pair = PairRecord(prompt.id, first.id, second.id, round)
    return PoolPair((prompt, first, second, pair), first is two[0])


def _add(store: PreferenceStore, pairs: Sequence[PoolPair], round: int, price: float) -> None:
    """Add pairs with the rewards' labels."""
    records: list[Record] = []
    for pair in pairs:
        value = pair.judged(1.0)
        label = LabelRecord(pair.id, value, "judge", "rewards", round=round, cost=price)
        records += [*pair.records, label]
    store.add(records)


def _simulated(row: Row, noise: float, rng: np.random.Generator) -> float:
    """The label of a person who judges as the rewards do without noise, but for a share."""
    right = not row["inverted"]
    return float(right if rng.random() >= noise else not right)


def _labels(store: PreferenceStore) -> dict[str, float | None]:
    """The mean label of people for each pair that they saw; None where all skipped it."""
    found: dict[str, list[float]] = {}
    for label in store.labels(source="human"):
        found.setdefault(label.pair, []).extend([] if label.value is None else [label.value])
    return {pair: float(np.mean(values)) if values else None for pair, values in found.items()}


def _row(row: Row, pair: PoolPair, label: float | None) -> Row:
    """A row of the pool as one to learn from; without a person's label the rewards' one holds."""
    plain: Row = {
        name: row[name] for name in ("prompt", "tools", "chosen", "rejected") if name in row
    }
    if label is None:
        return {**plain, "source": "rewards"}
    better = pair.judged(label)
    if better < 0.5:
        plain |= {"chosen": row["rejected"], "rejected": row["chosen"]}
    sure = max(better, 1 - better)
    return {**plain, "source": "people", **({} if sure == 1 else {"probability": sure})}
