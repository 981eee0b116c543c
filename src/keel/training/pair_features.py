"""What selecting pairs needs from an outcome reward model: last-layer features and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from keel.models.reward import RewardModel, pack_answers
from keel.training.judged_data import EncodedPair, sizes_of

Array = npt.NDArray[np.float32]


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


def head_weights(model: RewardModel) -> Array:
    """The weights (H,) of an outcome model's head, the mean that `laplace_posterior` takes."""
    weights: Array = model.head.weight[0].detach().float().cpu().numpy()
    return weights
