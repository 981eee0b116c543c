"""The loss of an algorithm: what its terms compute, added up.

    loss = −Σ_n w_n·c_n·s(ρ_n, A_n) + β Σ_n w_n·D_n + a·(1/N) Σ_n ½(V_n − R_n)² − b·(1/N) Σ_n H_n

`w` was set once for the whole optimizer batch, so losses of micro-batches, and of ranks, add up.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keel.algorithms.losses import Adaptive
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import CustomSurrogate
from keel.learn.advantages import SURROGATE, call_custom
from keel.learn.batch import A, Actions, Estimates, TrainBatch
from keel.models.head import Scores, place_of_float64, widest
from keel.objective import divergences, ratios, segments
from keel.objective.gae import explained_variance
from keel.types import KeelError


def prepare(
    algorithm: Algorithm,
    actions: A,
    estimates: Estimates,
    max_tokens: int,
    keep: Sequence[int] | None = None,
) -> TrainBatch[A]:
    """An optimizer batch ready for the loss: weights set, advantages whitened where asked for.

    Only the sequences `keep` (all by default) enter the loss. The others count in its normaliser:
    weights are set before they are left out. `max_tokens` is the longest completion, for weights
    that divide by it.
    """
    own, lengths_S = actions.device, actions.lengths_S
    lengths_S = lengths_S.to(place_of_float64(own))
    weight_N = widest(algorithm.weights.value(lengths_S, max_tokens), own)
    token_weight = 1 / _count(actions)
    if keep is not None and len(keep) < actions.sequences:
        index_K = actions.action_index(keep)
        weight_N, estimates = weight_N[index_K], estimates.select(index_K)
        actions = actions.select(keep)
    advantage_N = estimates.advantage_N
    if algorithm.advantage.whitens:
        advantage_N = segments.whiten(advantage_N, estimates.rewarded_N)
    return TrainBatch(
        actions, advantage_N, weight_N, estimates.return_N, token_weight, 1 / _count(actions)
    )


def _count(actions: Actions) -> int:
    return max(sum(actions.lengths), 1)


def adapted_beta(rule: Adaptive, beta: float, kl: float, sequences: int) -> float:
    """β after a step of so large a divergence, by PPO's or Ziegler's rule; as it was if `kl` is
    not finite."""
    if not math.isfinite(kl):
        return beta
    if rule.rule == "ziegler":
        return divergences.adapt_ziegler(
            beta, kl=kl, target=rule.target, horizon=rule.horizon, sequences=sequences
        )
    return divergences.adapt_ppo(beta, kl=kl, target=rule.target)


@torch.no_grad()
def value_metrics(actions: Actions, estimates: Estimates) -> dict[str, float]:
    """The values before the update against the returns; nothing without a value model."""
    value_N, return_N = actions.value_N, estimates.return_N
    if value_N is None or return_N is None:
        return {}
    variance = explained_variance(value_N, return_N)
    return {"value/mean": float(value_N.mean()), "value/explained_variance": variance}


# ---------------------------------------------------------------- the loss


@dataclass(frozen=True, eq=False)
class Loss:
    """A micro-batch's share of the loss, and its share of each metric; both add up.

    `tokens` are values (N,) of the micro-batch's actions: `log_probs` (ℓ_n), `ratios`,
    `divergences` and `entropies`, and the terms of the loss, `loss/policy`, `loss/divergence`,
    `loss/value` and `loss/entropy`, whose sum is `total`. What the algorithm does not have is not
    among them.
    """

    total: Float[Tensor, ""]
    metrics: Mapping[str, Tensor]
    tokens: Mapping[str, Float[Tensor, " N"]]


def loss(algorithm: Algorithm, batch: TrainBatch[Any], scores: Scores, beta: float) -> Loss:
    """The algorithm's loss on an optimizer batch or micro-batch, under the policy's scores."""
    actions: Actions = batch.actions
    lengths_S = actions.lengths_S
    log_prob_N = scores.log_prob_N
    advantage_N, weight_N = batch.advantage_N.to(log_prob_N), batch.weight_N.to(log_prob_N)
    old_N = log_prob_N.detach() if actions.old_log_prob_N is None else actions.old_log_prob_N
    log_ratio_N = algorithm.ratio_kind.log_ratio(log_prob_N, old_N, lengths_S)
    choice = algorithm.surrogate
    if isinstance(choice, CustomSurrogate):
        surrogate_N = _custom_surrogate(
            choice,
            log_prob_N=log_prob_N,
            old_log_prob_N=old_N,
            lengths_S=lengths_S,
            advantage_N=advantage_N,
            log_ratio_N=log_ratio_N,
        )
    else:
        surrogate_N = choice.value(log_ratio_N, advantage_N, lengths_S, log_prob_N)
    if algorithm.correction is not None:
        engine_N = actions.engine_log_prob_N.to(old_N)
        surrogate_N = surrogate_N * algorithm.correction.value(engine_N, old_N, lengths_S)
    terms = {"policy": (-1.0, weight_N * surrogate_N)}
    metrics: dict[str, Tensor] = {}
    divergence = algorithm.loss_divergence
    divergence_N = None
    if divergence is not None and divergence.active:
        divergence_N = divergence.value(
            log_prob_N, old_N, actions.reference_log_prob_N, scores.full_kl_N
        )
        terms["divergence"] = beta, weight_N * divergence_N
    if algorithm.value is not None and batch.return_N is not None:
        value_N, metrics = _value(algorithm, batch, batch.return_N, scores)
        terms["value"] = algorithm.value.coefficient * batch.token_weight, value_N
    if algorithm.entropy > 0:
        assert scores.entropy_N is not None
        terms["entropy"] = -algorithm.entropy * batch.token_weight, scores.entropy_N
    sums = {name: scale * term_N.sum() for name, (scale, term_N) in terms.items()}
    total = reduce(operator.add, sums.values())
    with torch.no_grad():
        watched = _watch(algorithm, batch, scores, log_ratio_N, old_N, divergence_N)
        first = {"loss/policy": sums["policy"].detach()}
        metrics = {**first, **metrics, "loss": total.detach(), **watched}
        tokens = {f"loss/{name}": scale * term_N for name, (scale, term_N) in terms.items()}
        tokens["log_probs"] = log_prob_N.detach()
        if algorithm.ratio != "none":
            tokens["ratios"] = ratios.exponential(log_ratio_N)
        if divergence_N is not None:
            tokens["divergences"] = divergence_N.detach()
        if scores.entropy_N is not None:
            tokens["entropies"] = scores.entropy_N.detach()
    return Loss(total, metrics, tokens)


def _custom_surrogate(choice: CustomSurrogate, **signals: Tensor) -> Tensor:
    value_N = call_custom(SURROGATE, choice, signals)
    if value_N.shape != signals["advantage_N"].shape:
        raise KeelError(
            f"algorithm.surrogate: {choice.function} returned shape {tuple(value_N.shape)}, "
            f"wanted one number a token {tuple(signals['advantage_N'].shape)}"
        )
    return value_N


def _value(
    algorithm: Algorithm, batch: TrainBatch[Any], return_N: Tensor, scores: Scores
) -> tuple[Tensor, dict[str, Tensor]]:
    assert algorithm.value is not None
    assert scores.value_N is not None
    old_N, return_N = batch.actions.value_N, return_N.to(scores.value_N)
    loss_N, clipped_N = algorithm.value.value(scores.value_N, old_N, return_N)
    metrics = {
        "value/loss": batch.metric_weight * loss_N.detach().sum(),
        "value/clip_ratio": batch.metric_weight * clipped_N.to(loss_N).sum(),
    }
    return loss_N, metrics


def _watch(
    algorithm: Algorithm,
    batch: TrainBatch[Any],
    scores: Scores,
    log_ratio_N: Tensor,
    old_N: Tensor,
    divergence_N: Tensor | None,
) -> dict[str, Tensor]:
    """The metrics of a batch, as means over its actions."""
    mean = batch.metric_weight
    out: dict[str, Tensor] = {}
    if scores.entropy_N is not None:
        out["entropy"] = mean * scores.entropy_N.sum()
    if divergence_N is not None:
        out["kl"] = mean * divergence_N.sum()
    if batch.actions.old_log_prob_N is not None or algorithm.ratio != "none":
        out["kl/old"] = mean * divergences.k3(old_N, scores.log_prob_N).sum()
    if algorithm.ratio == "none":
        return out
    ratio_N = ratios.exponential(log_ratio_N)
    low, high = algorithm.surrogate.edges
    below_N = ((ratio_N < low) & (batch.advantage_N < 0)).to(ratio_N)
    above_N = ((ratio_N > high) & (batch.advantage_N > 0)).to(ratio_N)
    out["clip_ratio/low_mean"] = mean * below_N.sum()
    out["clip_ratio/high_mean"] = mean * above_N.sum()
    out["clip_ratio/region_mean"] = mean * (below_N + above_N).sum()
    out["ratio/mean"] = mean * ratio_N.sum()
    return out
