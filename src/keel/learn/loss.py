"""The loss of an algorithm: what its terms compute, added up.

    loss = −Σ_n w_n·c_n·s(ρ_n, A_n) + β Σ_n w_n·D_n + a·(1/N) Σ_n ½(V_n − R_n)² − b·(1/N) Σ_n H_n

`w` was set once for the whole optimizer batch, so losses of micro-batches, and of ranks, add up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from keel.algorithms.spec import Algorithm, CustomAdvantage, CustomSurrogate
from keel.config.entry import load_entry
from keel.learn.actions import Actions
from keel.learn.token_budget import out_of_memory
from keel.models.head import Scores
from keel.objective import divergences, ratios, segments, whitening
from keel.objective.signals import Signals
from keel.types import KeelError

A = TypeVar("A", bound=Actions)

ADVANTAGE, SURROGATE = "algorithm.advantage", "algorithm.surrogate"

# ---------------------------------------------------------------- advantages


def advantages(row: Algorithm, signals: Signals) -> Float[Tensor, " N"]:
    """A_n of every completion token, before whitening."""
    choice = row.advantage
    if isinstance(choice, CustomAdvantage):
        advantage = _users(ADVANTAGE, choice, signals.named())
    else:
        advantage = choice.value(signals)
    if advantage.shape == signals.reward_N.shape:
        return advantage
    if advantage.shape != signals.reward_S.shape:
        raise KeelError(
            f"algorithm.advantage: returned shape {tuple(advantage.shape)}, wanted one number a "
            f"sequence {tuple(signals.reward_S.shape)} or a token {tuple(signals.reward_N.shape)}"
        )
    return segments.spread(advantage, signals.lengths_S)


def returns(row: Algorithm, signals: Signals, advantage_N: Tensor) -> Float[Tensor, " N"] | None:
    """What the value model is regressed on, of the advantages before whitening; None without one.

    A + V, by the critic's own λ where it has one; the return to go where the advantage is one
    number a sequence.
    """
    if signals.value_N is None:
        return None
    return row.advantage.returns(signals, advantage_N)


def penalties(row: Algorithm, batch: Actions, beta: float) -> Float[Tensor, " N"]:
    """−β D on every token where the divergence is in the reward, else 0."""
    if row.reward_divergence is None or batch.reference_log_prob_N is None:
        return torch.zeros_like(batch.engine_log_prob_N)
    assert batch.old_log_prob_N is not None
    estimate = row.reward_divergence.estimate
    return -beta * estimate(batch.old_log_prob_N, batch.reference_log_prob_N)


def prepare(row: Algorithm, batch: A, budget: int) -> A:
    """The optimizer batch with its weights set and, where the row asks, advantages whitened."""
    return whitened(row, weighed(row, batch, budget))


def weighed(row: Algorithm, batch: A, budget: int) -> A:
    """The optimizer batch with its weights set, which those that are then selected keep."""
    weight_N = row.weights.value(batch.lengths_S, budget)
    return replace(batch, weight_N=weight_N, token_weight=1 / _count(batch))


def whitened(row: Algorithm, batch: A) -> A:
    """The actions that enter the loss, their advantages whitened where the row asks."""
    assert batch.advantage_N is not None
    advantage_N = batch.advantage_N
    if row.advantage.whitens:
        advantage_N = whitening.whiten(advantage_N, batch.present_N)
    return replace(batch, advantage_N=advantage_N, metric_weight=1 / _count(batch))


def _count(batch: Actions) -> int:
    return max(sum(batch.lengths), 1)


# ---------------------------------------------------------------- the loss


@dataclass(frozen=True, eq=False)
class Loss:
    """A micro-batch's share of the loss, and its share of each metric; both add up."""

    total: Float[Tensor, ""]
    metrics: Mapping[str, Tensor]


def loss(row: Algorithm, batch: Actions, scores: Scores, beta: float) -> Loss:
    """The row's loss on a prepared (micro-)batch under the policy's current scores."""
    assert batch.advantage_N is not None
    assert batch.weight_N is not None
    log_prob_N = scores.log_prob_N
    advantage_N, weight_N = batch.advantage_N.to(log_prob_N), batch.weight_N.to(log_prob_N)
    old_N = log_prob_N.detach() if batch.old_log_prob_N is None else batch.old_log_prob_N
    log_ratio_N = row.ratio_kind.log_ratio(log_prob_N, old_N, batch.lengths_S)
    choice = row.surrogate
    if isinstance(choice, CustomSurrogate):
        surrogate_N = _custom_surrogate(
            choice,
            log_prob_N=log_prob_N,
            old_log_prob_N=old_N,
            lengths_S=batch.lengths_S,
            advantage_N=advantage_N,
            log_ratio_N=log_ratio_N,
        )
    else:
        surrogate_N = choice.value(log_ratio_N, advantage_N, batch.lengths_S, log_prob_N)
    if row.correction is not None:
        engine_N = batch.engine_log_prob_N.to(old_N)
        surrogate_N = surrogate_N * row.correction.value(engine_N, old_N, batch.lengths_S)
    policy = -(weight_N * surrogate_N).sum()
    total, metrics = policy, {"loss/policy": policy.detach()}
    divergence = row.loss_divergence
    divergence_N = None
    if divergence is not None and divergence.active:
        divergence_N = divergence.value(
            log_prob_N, old_N, batch.reference_log_prob_N, scores.full_kl_N
        )
        total = total + beta * (weight_N * divergence_N).sum()
    if row.value is not None and batch.return_N is not None:
        term, value_metrics = _value(row, batch, scores)
        total, metrics = total + term, {**metrics, **value_metrics}
    if row.entropy > 0:
        assert scores.entropy_N is not None
        total = total - row.entropy * batch.token_weight * scores.entropy_N.sum()
    with torch.no_grad():
        watched = _watch(row, batch, scores, log_ratio_N, old_N, divergence_N)
        metrics = {**metrics, "loss": total.detach(), **watched}
    return Loss(total, metrics)


def _custom_surrogate(choice: CustomSurrogate, **signals: Tensor) -> Tensor:
    value_N = _users(SURROGATE, choice, signals)
    if value_N.shape != signals["advantage_N"].shape:
        raise KeelError(
            f"algorithm.surrogate: {choice.function} returned shape {tuple(value_N.shape)}, "
            f"wanted one number a token {tuple(signals['advantage_N'].shape)}"
        )
    return value_N


def _value(row: Algorithm, batch: Actions, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
    assert row.value is not None
    assert scores.value_N is not None
    assert batch.value_N is not None
    assert batch.return_N is not None
    return_N = batch.return_N.to(scores.value_N)
    loss_N, clipped_N = row.value.value(scores.value_N, batch.value_N, return_N)
    metrics = {
        "value/loss": batch.metric_weight * loss_N.detach().sum(),
        "value/clip_ratio": batch.metric_weight * clipped_N.to(loss_N).sum(),
    }
    return row.value.coefficient * batch.token_weight * loss_N.sum(), metrics


def _watch(
    row: Algorithm,
    batch: Actions,
    scores: Scores,
    log_ratio_N: Tensor,
    old_N: Tensor,
    divergence_N: Tensor | None,
) -> dict[str, Tensor]:
    """Token means of what a run should be watched by."""
    assert batch.advantage_N is not None
    mean = batch.metric_weight
    out: dict[str, Tensor] = {}
    if scores.entropy_N is not None:
        out["entropy"] = mean * scores.entropy_N.sum()
    if divergence_N is not None:
        out["kl"] = mean * divergence_N.sum()
    if batch.old_log_prob_N is not None or row.ratio != "none":
        out["kl/old"] = mean * divergences.k3(old_N, scores.log_prob_N).sum()
    if row.ratio == "none":
        return out
    ratio_N = ratios.exponential(log_ratio_N)
    low, high = row.surrogate.edges
    below_N = ((ratio_N < low) & (batch.advantage_N < 0)).to(ratio_N)
    above_N = ((ratio_N > high) & (batch.advantage_N > 0)).to(ratio_N)
    out["clip_ratio/low_mean"] = mean * below_N.sum()
    out["clip_ratio/high_mean"] = mean * above_N.sum()
    out["clip_ratio/region_mean"] = mean * (below_N + above_N).sum()
    out["ratio/mean"] = mean * ratio_N.sum()
    return out


# ---------------------------------------------------------------- the user's own functions


def reads_steps(row: Algorithm) -> bool:
    """Whether an algorithm's advantage uses where rewards of steps are given.

    A function of the user's does where it names `reward_N` or the steps.
    """
    if not isinstance(row.advantage, CustomAdvantage):
        return row.reads_steps
    names = inspect.signature(load_entry(row.advantage.function, ADVANTAGE)).parameters
    return "reward_N" in names or "step_reward_K" in names


def check_entries(row: Algorithm) -> None:
    """Load the user's own functions that a row names. Raises KeelError where one is not there."""
    if isinstance(row.advantage, CustomAdvantage):
        load_entry(row.advantage.function, ADVANTAGE)
    if isinstance(row.surrogate, CustomSurrogate):
        load_entry(row.surrogate.function, SURROGATE)


def _users(
    what: str, choice: CustomAdvantage | CustomSurrogate, signals: Mapping[str, Tensor]
) -> Tensor:
    """Call a user's function with its options and with those of the signals that it names.

    Raises KeelError for a parameter that is neither, and for whatever the function raises but a
    lack of memory, for which a smaller micro-batch may help.
    """
    function: Callable[..., Tensor] = load_entry(choice.function, what)
    available = {**choice.options, **signals}
    try:
        parameters = inspect.signature(function).parameters
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in available]
        if missing:
            raise KeelError(
                f"{function.__module__}:{function.__name__} asks for {', '.join(missing)}: "
                f"there are {', '.join(sorted(available))}"
            )
        return function(**{name: available[name] for name in parameters if name in available})
    except KeelError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"{what}: {choice.function} raised {message}") from error
