"""Labels that people give to the pairs of which a reward model is least sure, by its features."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keel.config.fields import derive
from keel.config.judging import JudgingStage, People
from keel.config.load import round_of
from keel.config.model import Model
from keel.data import judged_rows
from keel.data.judged_rows import Fields, Preference
from keel.models.reward import RewardModel, load_reward_model, pack_answers
from keel.platform.files import read_jsonl, write_jsonl
from keel.preferences.files import Attribution, answer_records, compared
from keel.preferences.pool import prefer_pairs
from keel.preferences.records import CostKind, CostRecord, LabelRecord, Record
from keel.preferences.selection import (
    laplace_beliefs,
    likeliest_posterior,
    scaled_features,
    select_pairs,
)
from keel.preferences.store import PreferenceStore
from keel.runs.layout import RunFolder
from keel.training.evaluation import judged_source
from keel.training.export import reward_model_of
from keel.training.judged_data import EncodedPair, encoder, sizes_of
from keel.types import KeelError

Array = npt.NDArray[np.float32]
CHUNK = 1_000
"""Pairs that are held as tokens at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class PairFeatures:
    """Of each pair: the hidden state of `chosen` less that of `rejected`, and both scores.

    The head w gives the reward difference `score_C2[:, 0] - score_C2[:, 1]` as w · φ.
    """

    feature_CH: Array
    score_C2: Array


@torch.no_grad()
def pair_features(
    model: RewardModel, rows: Sequence[EncodedPair], token_budget: int
) -> PairFeatures:
    """The features and scores of pairs, packed, at most `token_budget` tokens in a pass."""
    features, scores = [torch.zeros(0, model.head.in_features)], [torch.zeros(0, 2)]
    spans = sizes_of(rows, model.device).spans(token_budget) if rows else []
    for span in spans:
        answers = [answer for row in rows[span] for answer in (row.chosen, row.rejected)]
        states_KH = model.states(pack_answers(answers, model.device)).float()
        features.append((states_KH[0::2] - states_KH[1::2]).cpu())
        scores.append(model.read_out(states_KH).reshape(-1, 2).cpu())
    return PairFeatures(torch.cat(features).numpy(), torch.cat(scores).numpy())


def text_features(
    model: Path | str,
    pairs: Iterable[Preference],
    stage: str | None = None,
    token_budget: int = 16_384,
) -> Array:
    """The features (C, H) of pairs of texts; NaN if an answer is longer than the context.

    `model` is an outcome reward model's folder or hub name, or a run, of which `stage` names the
    stage that made it. Raises KeelError if it is not a valid one.
    """
    name, made_by = reward_model_of(model, stage)
    made = judged_source(model, made_by)
    loaded = load_reward_model(Model(name=name), "outcome")
    encode = encoder("pairs", loaded.reader(made is not None and made.raw))
    found = [np.zeros((0, loaded.head.in_features), dtype=np.float32)]
    rest = iter(pairs)
    while some := [encode(pair) for pair in islice(rest, CHUNK)]:
        fits = np.array([row.longest <= (loaded.context or row.longest) for row in some])
        part = np.full((len(some), loaded.head.in_features), np.nan, dtype=np.float32)
        kept = [row for row, fit in zip(some, fits, strict=True) if fit]
        part[fits] = pair_features(loaded, kept, token_budget).feature_CH
        found.append(part)
    return np.concatenate(found)


def head_weights(model: RewardModel) -> Array:
    """The weights (H,) of an outcome model's head, the mean that `laplace_posterior` takes."""
    weights: Array = model.head.weight[0].detach().float().cpu().numpy()
    return weights


# ---------------------------------------------------------------- labels

SIMULATED = "simulated"
"""The annotator of labels that no person gave."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PoolPair:
    """A pair of the pool: its records, and the rewards' label, by which `chosen` is better."""

    row: Row
    records: tuple[Record, ...]
    label: LabelRecord

    @property
    def id(self) -> str:
        return self.label.pair

    def judged(self, value: float) -> float:
        """P(the first completion is better), of P(`chosen` is better) or the reverse."""
        return value if self.label.value == 1 else 1 - value


class PeopleLabeller:
    """`keel.training.setup.PairLabeller`: labels of people, in the preference store of a run.

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
        """`PairLabeller.label`."""
        assert stage.sampled is not None
        assert stage.sampled.people is not None
        name, price, people = stage.name, stage.sampled.price, stage.sampled.people
        round = round_of(name)
        pairs = [_pool_pair(row, round, price) for row in _rows(folder.pool(name))]
        with PreferenceStore(folder.preferences, create=True) as store:
            path = folder.chosen(name)
            if not path.exists():
                # Kept in a file, since another machine may choose others. Fewer may be wanted
                # later; more are chosen in the next round.
                fresh = _unlabelled(pairs, _people_labels(store))
                encoded = [
                    encode(judged_rows.pair(Fields(pairs[at].row, "pool"), "")) for at in fresh
                ]
                found = _choose(
                    encoded, people, model, limit=limit, token_budget=stage.initial_token_budget,
                    seed=derive(seed, "choice"),
                )  # fmt: skip
                write_jsonl(path, [{"row": fresh[at]} for at in found])
            chosen = [pairs[row["row"]] for row in _rows(path)][: people.labels]
            spending: dict[CostKind, float] = {
                "api": len(pairs) * price,
                "human": len(chosen) * people.price,
            }
            store.add_forecast(
                CostRecord(f"{name}/{kind}", kind, dollars, "dollars", "labels", round, True)
                for kind, dollars in spending.items()
            )
            if people.noise is None:
                _ask(store, folder, name, chosen)
            store.add(record for pair in pairs for record in (*pair.records, pair.label))
            if people.noise is not None:
                store.add(_simulated(chosen, people, round, derive(seed, "people")))
            labels, given = _people_labels(store), list(store.labels(source="human"))
        own = {pair.id for pair in chosen}
        spent = math.fsum(label.cost or 0.0 for label in given if label.pair in own)
        write_jsonl(folder.labels(name), map(_stated, given))
        rows = [_train_row(pair, labels.get(pair.id)) for pair in pairs]
        write_jsonl(folder.rows(name, "train"), rows)
        labelled = sum(row["source"] == "people" for row in rows)
        return (
            f"{len(pairs)} pairs labelled by the rewards (${len(pairs) * price:,.2f}), "
            f"{labelled} of them by people (${spent:,.2f})"
        )

    def check(self, folder: RunFolder) -> None:
        """`PairLabeller.check`: later rounds would choose and pay for other pairs.

        Labels that were added since make no difference.
        """
        for stage in folder.stages:
            path = folder.labels(stage)
            before = _rows(path)
            found: set[Any] = set()
            if before and folder.preferences.exists():
                with PreferenceStore(folder.preferences) as store:
                    labels = store.labels(source="human")
                    found = {tuple(_stated(label).values()) for label in labels}
            lost = sum(tuple(label.values()) not in found for label in before)
            if lost:
                raise KeelError(
                    f"{folder.preferences}: {lost} of {len(before)} labels that people had given "
                    f"when stage {stage!r} began are missing or changed: restore it from a copy"
                )


def _rows(path: Path) -> list[Row]:
    """The rows of a file that `write_jsonl` wrote; none if there is none."""
    return [row for _, _, row in read_jsonl(path)]


def _choose(
    rows: Sequence[EncodedPair],
    people: People,
    model: RewardModel,
    *,
    limit: int | None,
    token_budget: int,
    seed: int,
) -> list[int]:
    """The places of the pairs that people label, the first one first; none is above `limit`.

    The features are the model's before the stage, the posterior of its head is fitted to the
    rewards' labels.
    """
    kept = [at for at, row in enumerate(rows) if limit is None or row.longest <= limit]
    if not kept:
        return []
    features = pair_features(model, [rows[at] for at in kept], token_budget).feature_CH
    found = scaled_features(features)
    beliefs = laplace_beliefs(likeliest_posterior(found, np.ones(len(found))), found)
    selected = select_pairs(people.by, people.labels, beliefs, seed)
    return [kept[at] for at in selected.index.tolist()]


def _pool_pair(row: Row, round: int, price: float) -> PoolPair:
    by = Attribution("judge", "rewards", round, keep_empty=True)
    texts, names = (row["chosen"], row["rejected"]), ("policy", "policy")
    answers = answer_records(Fields(row, "pool"), by, row["prompt"], texts, names)
    *records, label = compared(*answers, 1.0, by)
    assert isinstance(label, LabelRecord)
    return PoolPair(row, tuple(records), replace(label, cost=price))


def _unlabelled(pairs: Sequence[PoolPair], labelled: Collection[str]) -> list[int]:
    """The places of the pairs that people have not seen, of equal ones the first."""
    first = {pair.id: at for at, pair in reversed(list(enumerate(pairs)))}
    return sorted(at for id, at in first.items() if id not in labelled)


def _ask(store: PreferenceStore, folder: RunFolder, stage: str, chosen: Sequence[PoolPair]) -> None:
    """Have people label the chosen pairs. Raises KeelError until all are labelled or skipped."""
    store.add(record for pair in chosen for record in (*pair.records, pair.label))
    labels = _people_labels(store)
    missing = [pair.id for pair in chosen if pair.id not in labels]
    if missing:
        prefer_pairs(store, missing)
        raise KeelError(
            f"stage {stage!r} waits for people: {len(missing)} of {len(chosen)} pairs have no "
            f"label: label them with keel prefs annotate {folder.preferences}"
        )


def _simulated(
    chosen: Sequence[PoolPair], people: People, round: int, seed: int
) -> list[LabelRecord]:
    """Labels of a person who judges as the rewards do without noise, but for a share."""
    rng = np.random.default_rng(seed)
    assert people.noise is not None
    found = []
    for pair in chosen:
        right = not pair.row["inverted"]
        value = pair.judged(float(right if rng.random() >= people.noise else not right))
        label = LabelRecord(pair.id, value, "human", SIMULATED, round=round, cost=people.price)
        found.append(label)
    return found


def _people_labels(store: PreferenceStore) -> dict[str, float | None]:
    """The mean label of people for each pair that they saw; None if all skipped it."""
    sql = "SELECT pair, AVG(value) FROM labels WHERE source = 'human' GROUP BY pair"
    return dict(store.database.rows(sql))


def _stated(label: LabelRecord) -> Row:
    return {name: getattr(label, name) for name in ("pair", "annotator", "value")}


def _train_row(pair: PoolPair, label: float | None) -> Row:
    """A row of the pool as one to learn from; without a person's label the rewards' one holds."""
    row = pair.row
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
