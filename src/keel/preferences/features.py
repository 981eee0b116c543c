"""What selecting pairs needs from an outcome reward model: last-layer features and scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from keel.config.model import Model
from keel.data.judged_rows import Preference
from keel.models.reward import RewardModel, load_reward_model, pack_answers
from keel.training.evaluation import judged_source
from keel.training.export import reward_model_of
from keel.training.judging.data import EncodedPair, encoder, sizes_of

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
