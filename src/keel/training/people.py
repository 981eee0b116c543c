"""Labels that people give to the pairs of which a reward model is least sure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from keel.config.fields import derive
from keel.config.judging import People, SampledData
from keel.data.preferences import fields
from keel.data.preferences.acquisition import laplace_beliefs, select_pairs
from keel.data.preferences.fields import Fields
from keel.data.preferences.posterior import likeliest_posterior
from keel.data.preferences.schema import Preference
from keel.data.preferences.store.records import (
    CompletionRecord,
    CostKind,
    CostRecord,
    LabelRecord,
    PairRecord,
    PromptRecord,
    Record,
)
from keel.data.preferences.store.store import PreferenceStore
from keel.models.reward import RewardModel
from keel.runs.layout import RunFolder
from keel.training.judged_data import EncodedPair
from keel.training.pair_features import pair_features
from keel.training.sampled_data import write_jsonl
from keel.types import KeelError

SIMULATED = "simulated"
"""The annotator of labels that no person gave."""
Row = dict[str, Any]
Choose = Callable[[Sequence[Row]], list[int]]
"""The pairs of a pool that people label, by their place in it, the first one first."""


def label_pairs(
    folder: RunFolder,
    stage: str,
    round: int,
    choice: SampledData,
    people: People,
    choose: Choose,
    seed: int,
) -> str:
    """Write the train rows of a stage: its pool, with the labels of people for some pairs.

    Every pair and label is in the run's store. Returns a line of what was labelled. Raises
    KeelError while people have not labelled all that are chosen.
    """
    pool = [json.loads(line) for line in folder.pool(stage).read_text("utf-8").splitlines()]
    chosen = choose(pool)
    with PreferenceStore(folder.preferences, create=True) as store:
        forecast: dict[CostKind, float] = {
            "api": len(pool) * choice.price,
            "human": len(chosen) * people.price,
        }
        store.add(
            CostRecord(f"{stage}/{kind}", kind, amount, "dollars", "labels", round, forecast=True)
            for kind, amount in forecast.items()
        )
        pairs = _add_pool(store, pool, chosen, round, choice.price)
        if people.noise is not None:
            rng = np.random.default_rng(derive(seed, "people"))
            values = [(pairs[at], _simulated(pool[at], people.noise, rng)) for at in chosen]
            store.add(
                LabelRecord(pair, value, "human", SIMULATED, round=round, cost=people.price)
                for pair, value in values
            )
        labels = _labels(store, set(pairs))
    missing = sum(pairs[at] not in labels for at in chosen)
    if missing:
        raise KeelError(
            f"stage {stage!r} waits for people: {missing} of {len(chosen)} pairs have no label: "
            f"label them with keel prefs annotate {folder.preferences}, then go on with "
            f"keel train --resume --run {folder.path}"
        )
    rows = [_row(pool[at], labels.get(pairs[at])) for at in range(len(pool))]
    write_jsonl(folder.rows(stage, "train"), rows)
    spent = len(pool) * choice.price, len(chosen) * people.price
    return (
        f"{len(pool)} pairs labelled by the rewards (${spent[0]:,.2f}), {len(chosen)} of them by "
        f"people (${spent[1]:,.2f})"
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
    found = pair_features(model, [rows[at] for at in kept], token_budget).feature_CH
    beliefs = laplace_beliefs(likeliest_posterior(found, np.ones(len(found))), found)
    selected = select_pairs(people.by, people.labels, beliefs, derive(seed, "choice"))
    return [kept[at] for at in selected.index.tolist()]


def _add_pool(
    store: PreferenceStore, pool: Sequence[Row], chosen: Sequence[int], round: int, price: float
) -> list[str]:
    """Add the pairs of a round with the rewards' labels, and let people have the chosen ones first.

    Returns the pairs' ids in the store.
    """
    records: list[Record] = []
    pairs = []
    for row in pool:
        prompt = PromptRecord(row["prompt"])
        better, worse = (
            CompletionRecord(prompt.id, row[side], model="policy", round=round)
            for side in ("chosen", "rejected")
        )
        pair = PairRecord(prompt.id, better.id, worse.id, round)
        label = LabelRecord(pair.id, 1.0, "judge", "rewards", round=round, cost=price)
        records += [prompt, better, worse, pair, label]
        pairs.append(pair.id)
    store.add(records)
    first = {pairs[at]: float(len(chosen) - rank) for rank, at in enumerate(chosen)}
    store.set_priorities(first.items())
    return pairs


def _simulated(row: Row, noise: float, rng: np.random.Generator) -> float:
    """The label of a person who judges as the rewards do without noise, but for a share."""
    right = not row["inverted"]
    return float(right if rng.random() >= noise else not right)


def _labels(store: PreferenceStore, pairs: Collection[str]) -> dict[str, float | None]:
    """The mean label of people for each pair that they saw; None where all skipped it."""
    found: dict[str, list[float]] = {}
    for label in store.labels(source="human"):
        if label.pair in pairs:
            found.setdefault(label.pair, []).extend([] if label.value is None else [label.value])
    return {pair: float(np.mean(values)) if values else None for pair, values in found.items()}


def _row(row: Row, label: float | None) -> Row:
    """A row of the pool as one to learn from; without a person's label the rewards' one holds."""
    plain = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    if label is None:
        return {**plain, "source": "rewards"}
    if label < 0.5:
        plain |= {"chosen": row["rejected"], "rejected": row["chosen"]}
    sure = max(label, 1 - label)
    return {**plain, "source": "people", **({} if sure == 1 else {"probability": sure})}
