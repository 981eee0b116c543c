"""The loss of an algorithm: what its terms compute, added up.

    loss = −Σ_n w_n m_n c_n s(ρ_n, A_n) + β Σ_n w_n D_n + κ Σ_n w_n T_n
           + a/N Σ_n ½(V_n − R_n)² − b/N Σ_n H_n − the auxiliary terms

`w` and `c` were set once for the whole optimizer batch, and so was what masks and surrogates read
of all of it: losses of micro-batches, and of ranks, add up.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from keel.algorithms.corrections import CustomCorrection
from keel.algorithms.losses import Adaptive, AdaptiveEntropy
from keel.algorithms.masks import CustomMask, MaskTerm
from keel.algorithms.signals import LossSignals, Signals
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import CustomSurrogate
from keel.learn.advantages import CORRECTION, MASK, SURROGATE, call_custom
from keel.learn.batch import A, Actions, Batch, Estimates, TrainBatch
from keel.models.head import Scores, place_of_float64, widest
from keel.models.packed import upload
from keel.objective import divergences, ratios, segments
from keel.objective.gae import explained_variance
from keel.types import KeelError

WEIGHTS = "sampling/importance_sampling_ratio"


def prepare(
    algorithm: Algorithm,
    actions: A,
    estimates: Estimates,
    max_tokens: int,
    keep: Sequence[int] | None = None,
    seed: int = 0,
) -> TrainBatch[A]:
    """An optimizer batch ready for the loss: weights set, advantages whitened where asked for,
    corrections made.

    Only the sequences `keep` (all by default) enter the loss. The others count in its normaliser:
    weights are set before they are left out. `max_tokens` is the longest completion, for weights
    that divide by it; `seed` is for what a term draws at random.
    """
    own, lengths_S = actions.device, actions.lengths_S
    lengths_S = lengths_S.to(place_of_float64(own))
    weight_N = widest(algorithm.weights.value(lengths_S, max_tokens), own)
    token_weight = 1 / _count(actions)
    auxiliary_K = _auxiliary_weights(algorithm, actions, estimates.outcome_N)
    if keep is not None and len(keep) < actions.sequences:
        index_K = actions.action_index(keep)
        weight_N, estimates = weight_N[index_K], estimates.select(index_K)
        actions = actions.select(keep)
    advantage_N = estimates.advantage_N
    if algorithm.advantage.whitens:
        advantage_N = segments.whiten(advantage_N, estimates.rewarded_N)
    if estimates.distillation_N is not None:
        advantage_N = advantage_N + estimates.distillation_N
    return TrainBatch(
        actions,
        advantage_N,
        weight_N,
        estimates.return_N,
        token_weight,
        1 / _count(actions),
        outcome_N=estimates.outcome_N,
        correction_N=corrected(algorithm, actions)
        if algorithm.corrections and not actions.lags
        else None,
        auxiliary_K=auxiliary_K,
        seed=seed,
    )


def _auxiliary_weights(
    algorithm: Algorithm, actions: Actions, outcome_N: Tensor | None
) -> Float[Tensor, " K"] | None:
    """Each auxiliary term's coefficient over the number of its tokens; 0 of one whose tokens are
    not there yet."""
    if not algorithm.auxiliary:
        return None
    replies, place = sum(getattr(actions, "extra_lengths", ())), place_of_float64(actions.device)
    counts = [torch.tensor(replies if term.of == "replies" else 0) for term in algorithm.auxiliary]
    for at, term in enumerate(algorithm.auxiliary):
        if term.of == "completions" and outcome_N is not None:  # it is 1 of each of its tokens
            counts[at] = term.value(torch.ones_like(outcome_N), outcome_N).sum()
    count_K = torch.stack([count.to(place, torch.float64) for count in counts])
    weight_K = count_K.new_tensor([term.coefficient for term in algorithm.auxiliary]) / count_K
    return widest(torch.where(count_K > 0, weight_K, 0.0), actions.device)


def demonstrated(
    algorithm: Algorithm, batch: TrainBatch[Batch], shown: Batch, step: int
) -> TrainBatch[Batch]:
    """An optimizer batch with the demonstrations that its step imitates too, as further sequences
    whose tokens are not among the N but the M."""
    term, own, count = algorithm.demonstrations, batch.actions, shown.sequences
    share = 0.0 if term is None else term.share(step)
    if term is None or not share or batch.auxiliary_K is None:
        return batch
    auxiliary_K = batch.auxiliary_K.clone()
    auxiliary_K[algorithm.auxiliary.index(term)] = share / _count(shown)
    replies_M = shown.target_N[:0] if own.extra_target_M is None else own.extra_target_M
    first = max(own.groups, default=-1) + 1
    actions = replace(
        own,
        tokens_T=torch.cat([own.tokens_T, shown.tokens_T]),
        input_lengths=own.input_lengths + shown.input_lengths,
        prompt_lengths=own.prompt_lengths and own.prompt_lengths + shown.prompt_lengths,
        lengths=own.lengths + (0,) * count,
        groups=(*own.groups, *range(first, first + count)),
        versions=own.versions and own.versions + (0,) * count,
        lags=own.lags and own.lags + (0,) * count,
        extra_target_M=torch.cat([replies_M, shown.target_N + len(own.tokens_T)]),
        extra_lengths=(own.extra_lengths or (0,) * own.sequences) + shown.lengths,
        taught=None,  # read before this
        teachers=(),
    )
    return replace(batch, actions=actions, auxiliary_K=auxiliary_K, share=1 - share)


@torch.no_grad()
def corrected(algorithm: Algorithm, actions: Actions) -> Float[Tensor, " N"]:
    """c_n: what each correction makes of the weights of those before it, in their order."""
    signals = Signals(**_known(actions, algorithm.custom))
    weight_N = torch.ones_like(signals.need("old_log_prob_N"))
    for choice in algorithm.corrections:
        if isinstance(choice, CustomCorrection):
            given = {**signals.named(), "weight_N": weight_N}
            weight_N = _per_token(CORRECTION, choice, given, weight_N)
        else:
            weight_N = choice.apply(weight_N, signals)
    return weight_N


@torch.no_grad()
def limited(algorithm: Algorithm, actions: Actions) -> Bool[Tensor, " N"]:
    """The tokens whose weight some correction truncates or sets to 0."""
    signals = Signals(**_known(actions, custom=False))
    cut_N = torch.zeros_like(signals.need("old_log_prob_N"), dtype=torch.bool)
    for choice in algorithm.corrections:
        one_N = choice.limited(signals)
        cut_N = cut_N if one_N is None else cut_N | one_N
    return cut_N


@torch.no_grad()
def whole_batch(
    algorithm: Algorithm, batch: TrainBatch[A], log_prob_N: Tensor, entropy_N: Tensor | None
) -> TrainBatch[A]:
    """An optimizer batch with what its masks and surrogate read of all of it, before it is cut.

    `log_prob_N` and `entropy_N` are the current policy's.
    """
    signals = _signals(algorithm, _with_old(algorithm, batch, log_prob_N), log_prob_N, entropy_N)
    prepared_N = algorithm.surrogate.prepare(signals) if algorithm.surrogate.whole_batch else None
    kept_N = _kept(signals, [mask for mask in algorithm.masks if mask.whole_batch])
    return replace(batch, kept_N=kept_N, prepared_N=prepared_N)


def _kept(signals: LossSignals, masks: Sequence[MaskTerm]) -> Tensor | None:
    """The tokens that all of these masks keep; None where there are none."""
    kept_N = None
    for mask in masks:
        if isinstance(mask, CustomMask):
            one_N = _per_token(MASK, mask, signals.named(), signals.advantage_N) != 0
        else:
            one_N = mask.value(signals)
        kept_N = one_N if kept_N is None else kept_N & one_N
    return kept_N


def _known(actions: Actions, custom: bool) -> dict[str, Any]:
    """What is known of a batch before its update, by the names of `Signals`; with `custom` what
    only a user's own terms read too."""
    old_N = actions.old_log_prob_N
    engine_N = actions.engine_log_prob_N
    return {
        "lengths_S": actions.lengths_S,
        "groups_S": actions.groups_S,
        "engine_log_prob_N": engine_N if old_N is None else engine_N.to(old_N),
        "old_log_prob_N": old_N,
        "reference_log_prob_N": actions.reference_log_prob_N,
        "teacher_log_prob_N": actions.teacher_log_prob_N,
        "old_entropy_N": actions.old_entropy_N,
        "old_squares_N": actions.old_squares_N,
        "value_N": actions.value_N,
        **({"turn_N": actions.turn_N, "version_S": actions.version_S} if custom else {}),
    }


def _signals(
    algorithm: Algorithm, batch: TrainBatch[Any], log_prob_N: Tensor, entropy_N: Tensor | None
) -> LossSignals:
    """What the surrogate and the masks read of a batch or micro-batch."""
    actions: Actions = batch.actions
    known = _known(actions, algorithm.custom)
    if actions.old_log_prob_N is None:
        known["old_log_prob_N"] = log_prob_N.detach()
    log_ratio_N = algorithm.ratio_kind.log_ratio(
        log_prob_N, known["old_log_prob_N"], actions.lengths_S
    )
    outcome_N = batch.outcome_N if algorithm.custom or algorithm.surrogate.reads_outcome else None
    return LossSignals(
        **known,
        outcome_S=None if outcome_N is None else actions.of_sequences(outcome_N.to(log_prob_N)),
        log_prob_N=log_prob_N,
        log_ratio_N=log_ratio_N,
        advantage_N=batch.advantage_N.to(log_prob_N),
        entropy_N=entropy_N,
        prepared_N=batch.prepared_N,
        edges=algorithm.surrogate.edges,
        seed=batch.seed,
    )


@torch.no_grad()
def _with_old(algorithm: Algorithm, batch: TrainBatch[A], log_prob_N: Tensor) -> TrainBatch[A]:
    """The batch with ℓ_old and its corrections, where they are made of the current policy's ℓ."""
    actions = batch.actions
    if not actions.lags:
        return batch
    lags_S = upload(actions.lags, actions.device)
    lag_N = lags_S.repeat_interleave(actions.lengths_S, output_size=len(log_prob_N))
    old_N = ratios.log_linear(log_prob_N, actions.engine_log_prob_N, lag_N.to(log_prob_N))
    actions = replace(actions, old_log_prob_N=old_N)
    return replace(batch, actions=actions, correction_N=corrected(algorithm, actions))


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


def with_bonus(algorithm: Algorithm, now: Sequence[float]) -> Algorithm:
    """The algorithm with the coefficient of an adaptive entropy bonus as a number.

    `now` is what `adapted_bonus` made of the update before: the coefficient, and the entropy.
    """
    rule = algorithm.entropy
    if not isinstance(rule, AdaptiveEntropy):
        return algorithm
    coefficient, entropy = now or (rule.coefficient, rule.target)
    return algorithm.model_copy(update={"entropy": coefficient if entropy <= rule.target else 0.0})


def adapted_bonus(algorithm: Algorithm, now: Sequence[float], entropy: float) -> Sequence[float]:
    """The same after an update of this entropy; nothing of a bonus that is not adaptive."""
    rule = algorithm.entropy
    if not isinstance(rule, AdaptiveEntropy):
        return ()
    coefficient = divergences.adapt_entropy(
        now[0] if now else rule.coefficient,
        entropy,
        target=rule.target,
        delta=rule.delta,
        maximum=rule.maximum,
    )
    return coefficient, entropy


@torch.no_grad()
def value_metrics(actions: Actions, estimates: Estimates) -> dict[str, float]:
    """The values before the update against the returns; nothing without a value model."""
    value_N, return_N = actions.value_N, estimates.return_N
    if value_N is None or return_N is None:
        return {}
    variance = explained_variance(value_N, return_N)
    return {"value/mean": float(value_N.mean()), "value/explained_variance": variance}


# ---------------------------------------------------------------- the loss

Terms = dict[str, tuple[float | Tensor, Tensor]]
"""Terms by name: what the sum over their tokens is multiplied with, and their values."""


@dataclass(frozen=True, eq=False)
class Loss:
    """A micro-batch's share of the loss, and its share of each metric; both add up.

    `tokens` are values (N,) of the micro-batch's actions: `log_probs` (ℓ_n), `ratios`,
    `divergences` and `entropies`, and the terms of the loss, `loss/policy`, `loss/divergence`,
    `loss/distillation`, `loss/value` and `loss/entropy`, and those auxiliary ones that are of
    completions. Their sum is `total`, less what is of other tokens. What the algorithm does not
    have is not among them.
    """

    total: Float[Tensor, ""]
    metrics: Mapping[str, Tensor]
    tokens: Mapping[str, Float[Tensor, " N"]]


def loss(algorithm: Algorithm, batch: TrainBatch[Any], scores: Scores, beta: float) -> Loss:
    """The algorithm's loss on an optimizer batch or micro-batch, under the policy's scores."""
    log_prob_N = scores.log_prob_N
    batch = _with_old(algorithm, batch, log_prob_N)
    actions: Actions = batch.actions
    weight_N = batch.weight_N.to(log_prob_N)
    signals = _signals(algorithm, batch, log_prob_N, scores.entropy_N)
    log_ratio_N, old_N = signals.log_ratio_N, signals.old_log_prob_N
    choice = algorithm.surrogate
    if isinstance(choice, CustomSurrogate):
        surrogate_N = _per_token(SURROGATE, choice, signals.named(), signals.advantage_N)
    else:
        surrogate_N = choice.value(signals)
    with torch.no_grad():
        kept_N = _kept(signals, [mask for mask in algorithm.masks if not mask.whole_batch])
        if batch.kept_N is not None:
            kept_N = batch.kept_N if kept_N is None else kept_N & batch.kept_N
    if kept_N is not None:  # not a product: a token left out may have an infinite surrogate
        surrogate_N = torch.where(kept_N, surrogate_N, torch.zeros_like(surrogate_N))
    if batch.correction_N is not None:
        surrogate_N = surrogate_N * batch.correction_N
    terms: Terms = {"policy": (-1.0, weight_N * surrogate_N)}
    metrics: dict[str, Tensor] = {}
    divergence = algorithm.loss_divergence
    divergence_N = None
    if divergence is not None and divergence.active:
        divergence_N = divergence.value(
            log_prob_N, old_N, actions.reference_log_prob_N, scores.full_kl_N, log_ratio_N
        )
        terms["divergence"] = beta, weight_N * divergence_N
    if algorithm.loss_distillation is not None:
        assert scores.distillation_N is not None
        scale = algorithm.loss_distillation.coefficient
        terms["distillation"] = scale, weight_N * scores.distillation_N
    if algorithm.value is not None and batch.return_N is not None:
        value_N, metrics = _value(algorithm, batch, batch.return_N, scores)
        terms["value"] = algorithm.value.coefficient * batch.token_weight, value_N
    if algorithm.bonus > 0:
        assert scores.entropy_N is not None
        terms["entropy"] = -algorithm.bonus * batch.token_weight, scores.entropy_N
    auxiliary, of_others = _auxiliary(algorithm, batch, scores)
    terms = {name: (batch.share * scale, x) for name, (scale, x) in terms.items()} | auxiliary
    every = {**terms, **of_others}
    sums = {name: scale * term.sum() for name, (scale, term) in every.items()}
    total = reduce(operator.add, sums.values())
    with torch.no_grad():
        watched = _watch(algorithm, batch, scores, signals, divergence_N)
        if kept_N is not None:
            watched["mask_ratio/mean"] = batch.metric_weight * (~kept_N).to(log_prob_N).sum()
        shown = ("policy", *auxiliary, *of_others)
        first = {f"loss/{name}": sums[name].detach() for name in shown}
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


def _auxiliary(algorithm: Algorithm, batch: TrainBatch[Any], scores: Scores) -> tuple[Terms, Terms]:
    """The auxiliary terms that are of completions, and those that are of other tokens."""
    own: Terms = {}
    others: Terms = {}
    for at, term in enumerate(algorithm.auxiliary):
        if not term.active or batch.auxiliary_K is None:
            continue
        imitates = term.of == "demonstrations"
        scale = batch.auxiliary_K[at].to(scores.log_prob_N) * -(1.0 if imitates else batch.share)
        if term.of == "completions":
            if batch.outcome_N is not None:
                own[term.kind] = scale, term.value(scores.log_prob_N, batch.outcome_N)
        elif scores.extra_log_prob_M is not None:
            taught_M, teacher = scores.extra_distillation_M, algorithm.loss_distillation
            if taught_M is not None and teacher is not None:
                taught_M = teacher.coefficient * taught_M
            value_M = term.value(scores.extra_log_prob_M, taught=taught_M)
            mine_M = batch.actions.imitated_M == imitates
            others[term.kind] = scale, torch.where(mine_M, value_M, 0.0)
    return own, others


def _per_token(
    what: str,
    choice: CustomSurrogate | CustomCorrection | CustomMask,
    signals: Mapping[str, Any],
    like_N: Tensor,
) -> Tensor:
    """What a user's function gives: one number for each token."""
    value_N = call_custom(what, choice, signals)
    if value_N.shape != like_N.shape:
        raise KeelError(
            f"{what}: {choice.function} returned shape {tuple(value_N.shape)}, wanted one number "
            f"a token {tuple(like_N.shape)}"
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
    signals: LossSignals,
    divergence_N: Tensor | None,
) -> dict[str, Tensor]:
    """The metrics of a batch, as means over its actions."""
    mean = batch.metric_weight
    out: dict[str, Tensor] = {}
    if scores.entropy_N is not None:
        out["entropy"] = mean * scores.entropy_N.sum()
    if divergence_N is not None:
        out["kl"] = mean * divergence_N.sum()
    if scores.distillation_N is not None:
        out["teacher/divergence"] = mean * scores.distillation_N.sum()
    if batch.actions.lags and batch.correction_N is not None:
        weight_N, cut_N = batch.correction_N, limited(algorithm, batch.actions)
        values = {"clipped": cut_N, "masked": weight_N == 0, "mean": weight_N}
        out |= {f"{WEIGHTS}/{name}": mean * one_N.sum() for name, one_N in values.items()}
    if batch.actions.old_log_prob_N is not None or algorithm.ratio != "none":
        out["kl/old"] = mean * divergences.k3(signals.old_log_prob_N, scores.log_prob_N).sum()
    if algorithm.ratio == "none":
        return out
    ratio_N = ratios.exponential(signals.log_ratio_N)
    below_N, above_N = (side_N.to(ratio_N) for side_N in signals.clipped)
    out["clip_ratio/low_mean"] = mean * below_N.sum()
    out["clip_ratio/high_mean"] = mean * above_N.sum()
    out["clip_ratio/region_mean"] = mean * (below_N + above_N).sum()
    out["ratio/mean"] = mean * ratio_N.sum()
    return out
