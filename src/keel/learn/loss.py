"""The one place that joins a row to the maths, by look-up.

    loss = −Σ_n w_n·c_n·s(ρ_n, A_n) + β Σ_n w_n·D_n + a·(1/N) Σ_n ½(V_n − R_n)² − b·(1/N) Σ_n H_n

`w` was set once for the whole optimizer batch, so losses of micro-batches, and of ranks, add up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.algorithms.spec import GAE, Algorithm, BatchNormalised, ValueBaseline
from keel.config.entry import load_entry
from keel.learn.actions import Actions
from keel.learn.token_budget import out_of_memory
from keel.models.scores import Scores
from keel.objective import (
    correction,
    divergences,
    gae,
    group,
    process,
    ratios,
    segments,
    surrogates,
    value,
    weights,
    whitening,
)
from keel.types import KeelError

Function = Callable[..., Tensor]
A = TypeVar("A", bound=Actions)

ADVANTAGE, SURROGATE = "algorithm.advantage", "algorithm.surrogate"

# ---------------------------------------------------------------- advantages


@dataclass(frozen=True, eq=False)
class Signals:
    """What an advantage may ask for, by name. NaN in `outcome_S` says that no reward spoke.

    `penalty_N` is −β k1 where the divergence is in the reward, else 0; `reward_N` is the penalty
    plus the reward of each step on its last token and the outcome on the last of the sequence, and
    `reward_S` its sum over the sequence. Steps (K) come from process rewards: reward, index among
    the N of the last token, sequence. Rewards are float64.
    """

    outcome_S: Float[Tensor, " S"]
    penalty_N: Float[Tensor, " N"]
    reward_S: Float[Tensor, " S"]
    reward_N: Float[Tensor, " N"]
    lengths_S: Int[Tensor, " S"]
    groups_S: Int[Tensor, " S"]
    value_N: Float[Tensor, " N"] | None = None
    next_value_N: Float[Tensor, " N"] | None = None
    baseline_S: Float[Tensor, " S"] | None = None
    step_reward_K: Float[Tensor, " K"] | None = None
    step_end_K: Int[Tensor, " K"] | None = None
    step_sequence_K: Int[Tensor, " K"] | None = None

    def named(self) -> dict[str, Tensor]:
        """Those that are there."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in every.items() if value is not None}


def _temporal(signals: Signals, gamma: float) -> tuple[Tensor, Tensor]:
    delta_N = _call(gae.td_error, {"gamma": gamma, **signals.named()})
    return delta_N, segments.continues(signals.lengths_S)


def _gae(signals: Signals, choice: Any, lam: float | Tensor | None = None) -> Tensor:
    delta_N, continues_N = _temporal(signals, choice.gamma)
    if lam is None and choice.adaptive_alpha is not None:
        lam_S = gae.adaptive_lambda(signals.lengths_S, alpha=choice.adaptive_alpha)
        lam = segments.spread(lam_S.to(delta_N), signals.lengths_S)
    return gae.gae(delta_N, continues_N, gamma=choice.gamma, lam=choice.lam if lam is None else lam)


def _td(signals: Signals, choice: Any) -> Tensor:
    return _temporal(signals, choice.gamma)[0]


def _n_step(signals: Signals, choice: Any) -> Tensor:
    delta_N, continues_N = _temporal(signals, choice.gamma)
    return gae.n_step(delta_N, continues_N, gamma=choice.gamma, steps=choice.steps)


def _batch_normalised(signals: Signals, choice: Any) -> Tensor:
    # Here the outcome stands alone: the group's baseline is of it, the penalty goes by token.
    own = {**signals.named(), "reward_S": signals.outcome_S}
    return _call(group.baselined_returns, {**choice.model_dump(), **own})


def _by_name(function: Function) -> Callable[[Signals, Any], Tensor]:
    def call(signals: Signals, choice: Any) -> Tensor:
        return _call(function, {**choice.model_dump(), **signals.named()})

    return call


def _custom(signals: Signals, choice: Any) -> Tensor:
    return _users(ADVANTAGE, choice, signals.named())


ADVANTAGES: Final[Mapping[str, Callable[[Signals, Any], Tensor]]] = {
    "gae": _gae,
    "td": _td,
    "n_step": _n_step,
    "monte_carlo": _by_name(gae.monte_carlo),
    "value_baseline": _by_name(gae.value_baseline),
    "batch_normalised": _batch_normalised,
    "group_relative": _by_name(group.group_relative),
    "leave_one_out": _by_name(group.leave_one_out),
    "optimal": _by_name(group.optimal),
    "greedy_baseline": _by_name(group.greedy_baseline),
    "process_group_relative": _by_name(process.process_group_relative),
    "custom": _custom,
}
RATIOS: Final[Mapping[str, Function]] = {
    "none": ratios.none,
    "token": ratios.token,
    "sequence": ratios.sequence,
    "sequence_token": ratios.sequence_token,
    "sequence_product": ratios.sequence_product,
}
SURROGATES: Final[Mapping[str, Function]] = {
    "unclipped": surrogates.unclipped,
    "clip": surrogates.clip,
    "cispo": surrogates.cispo,
    "sapo": surrogates.sapo,
    "geometric": surrogates.geometric,
    "log_prob": surrogates.log_prob,
}
WEIGHTS: Final[Mapping[str, Function]] = {
    "sequence_mean": weights.sequence_mean,
    "token_mean": weights.token_mean,
    "constant": weights.constant,
    "sequence_sum": weights.sequence_sum,
}
DIVERGENCES: Final[Mapping[str, Function]] = {
    "k1": divergences.k1,
    "k2": divergences.k2,
    "k3": divergences.k3,
    "abs": divergences.absolute,
}
CORRECTIONS: Final[Mapping[str, Function]] = {
    "truncate": correction.truncate,
    "mask": correction.mask,
}


def advantages(row: Algorithm, signals: Signals) -> Float[Tensor, " N"]:
    """A_n of every completion token, before whitening."""
    advantage = ADVANTAGES[row.advantage.kind](signals, row.advantage)
    if advantage.shape == signals.reward_N.shape:
        return advantage
    if advantage.shape != signals.reward_S.shape:
        raise KeelError(
            f"algorithm.advantage: returned shape {tuple(advantage.shape)}, wanted one number a "
            f"sequence {tuple(signals.reward_S.shape)} or a token {tuple(signals.reward_N.shape)}"
        )
    return segments.spread(advantage, signals.lengths_S)


def returns(row: Algorithm, signals: Signals, advantage_N: Tensor) -> Float[Tensor, " N"] | None:
    """What the value model is regressed on: A + V before whitening, under the critic's own λ.

    Beside one advantage for a whole sequence it is the return to go (λ = 1), whose first one is
    the sequence's reward. A sequence without reward keeps its values.
    """
    if signals.value_N is None:
        return None
    choice = row.advantage
    if isinstance(choice, ValueBaseline):
        return_N = gae.returns_to_go(signals.reward_N, signals.lengths_S, gamma=1.0)
        return torch.where(return_N.isnan(), signals.value_N, return_N)
    if isinstance(choice, GAE) and (choice.critic_lam is not None or choice.adaptive_alpha):
        lam = 1.0 if choice.critic_lam is None else choice.critic_lam
        advantage_N = _gae(signals, choice, lam)
    return advantage_N + signals.value_N


def penalties(row: Algorithm, batch: Actions, beta: float) -> Float[Tensor, " N"]:
    """−β D on every token where the divergence is in the reward, else 0."""
    assert batch.old_log_prob_N is not None or row.reward_divergence is None
    if row.reward_divergence is None or batch.reference_log_prob_N is None:
        return torch.zeros_like(batch.engine_log_prob_N)
    divergence = DIVERGENCES[row.reward_divergence.estimator]
    return -beta * divergence(batch.old_log_prob_N, batch.reference_log_prob_N)


def prepare(row: Algorithm, batch: A, budget: int) -> A:
    """The optimizer batch with its weights set and, where the row asks, advantages whitened."""
    return whitened(row, weighed(row, batch, budget))


def weighed(row: Algorithm, batch: A, budget: int) -> A:
    """The optimizer batch with its weights set, which those that are then selected keep."""
    options = {"lengths_S": batch.lengths_S, "constant": row.weights.constant or budget}
    weight_N = _call(WEIGHTS[row.weights.kind], options)
    return replace(batch, weight_N=weight_N, token_weight=1 / _count(batch))


def whitened(row: Algorithm, batch: A) -> A:
    """The actions that enter the loss, their advantages whitened where the row asks."""
    assert batch.advantage_N is not None
    advantage_N = batch.advantage_N
    if isinstance(row.advantage, BatchNormalised) or row.advantage.whiten:
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
    signals = {
        "log_prob_N": log_prob_N,
        "old_log_prob_N": old_N,
        "lengths_S": batch.lengths_S,
        "advantage_N": advantage_N,
    }
    signals["log_ratio_N"] = _call(RATIOS[row.ratio], signals)
    surrogate_N = _surrogate(row, signals)
    correction_N = _correction(row, batch, old_N)
    if correction_N is not None:
        surrogate_N = surrogate_N * correction_N
    policy = -(weight_N * surrogate_N).sum()
    total, metrics = policy, {"loss/policy": policy.detach()}
    divergence_N = _divergence(row, batch, scores, old_N)
    if divergence_N is not None:
        total = total + beta * (weight_N * divergence_N).sum()
    if row.value is not None and batch.return_N is not None:
        term, value_metrics = _value(row, batch, scores)
        total, metrics = total + term, {**metrics, **value_metrics}
    if row.entropy > 0:
        assert scores.entropy_N is not None
        total = total - row.entropy * batch.token_weight * scores.entropy_N.sum()
    with torch.no_grad():
        watched = _watch(row, batch, scores, signals["log_ratio_N"], old_N, divergence_N)
        metrics = {**metrics, "loss": total.detach(), **watched}
    return Loss(total, metrics)


def _surrogate(row: Algorithm, signals: Mapping[str, Tensor]) -> Tensor:
    choice = row.surrogate
    if choice.kind == "custom":
        value_N = _users(SURROGATE, choice, signals)
        if value_N.shape != signals["advantage_N"].shape:
            raise KeelError(
                f"algorithm.surrogate: {choice.function} returned shape {tuple(value_N.shape)}, "
                f"wanted one number a token {tuple(signals['advantage_N'].shape)}"
            )
        return value_N
    return _call(SURROGATES[choice.kind], {**choice.model_dump(), **signals})


def _correction(row: Algorithm, batch: Actions, old_N: Tensor) -> Tensor | None:
    if row.correction is None:
        return None
    signals = {
        "old_log_prob_N": old_N,
        "engine_log_prob_N": batch.engine_log_prob_N.to(old_N),
        "lengths_S": batch.lengths_S,
    }
    return _call(CORRECTIONS[row.correction.kind], {**row.correction.model_dump(), **signals})


def _divergence(row: Algorithm, batch: Actions, scores: Scores, old_N: Tensor) -> Tensor | None:
    choice = row.loss_divergence
    if choice is None or (choice.beta == 0 and choice.adaptive is None):
        return None
    if choice.estimator == "full":
        return scores.full_kl_N
    other_N = old_N if choice.to == "old" else batch.reference_log_prob_N
    assert other_N is not None
    new_N = scores.log_prob_N
    if choice.to == "old" and not choice.unbiased:
        # The samples come from the other side of this divergence: KL(old‖π).
        return DIVERGENCES[choice.estimator](other_N, new_N)
    estimate_N = DIVERGENCES[choice.estimator](new_N, other_N)
    return divergences.weighted(estimate_N, new_N, old_N) if choice.unbiased else estimate_N


def _value(row: Algorithm, batch: Actions, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
    assert row.value is not None
    assert scores.value_N is not None
    assert batch.value_N is not None
    assert batch.return_N is not None
    return_N = batch.return_N.to(scores.value_N)
    loss_N, clipped_N = value.value_loss(
        scores.value_N, batch.value_N, return_N, clip=row.value.clip
    )
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
    low, high = _edges(row)
    below_N = ((ratio_N < low) & (batch.advantage_N < 0)).to(ratio_N)
    above_N = ((ratio_N > high) & (batch.advantage_N > 0)).to(ratio_N)
    out["clip_ratio/low_mean"] = mean * below_N.sum()
    out["clip_ratio/high_mean"] = mean * above_N.sum()
    out["clip_ratio/region_mean"] = mean * (below_N + above_N).sum()
    out["ratio/mean"] = mean * ratio_N.sum()
    return out


def _edges(row: Algorithm) -> tuple[float, float]:
    """The ratios outside which the surrogate clips; none where it does not."""
    choice = row.surrogate
    if choice.kind == "clip":
        return 1 - choice.low, 1 + choice.high
    if choice.kind == "cispo":
        return choice.floor, choice.cap
    if choice.kind == "geometric":
        bounds = torch.tensor([-choice.low, choice.high], dtype=torch.float64).exp()
        return float(bounds[0]), float(bounds[1])
    return 0.0, float("inf")


# ---------------------------------------------------------------- calling by name


def reads_steps(row: Algorithm) -> bool:
    """Whether a row's advantage tells rewards of steps from one of the whole answer.

    A function of the user's does where it names `reward_N` or the steps.
    """
    if row.advantage.kind != "custom":
        return row.reads_steps
    names = _parameters(load_entry(row.advantage.function, ADVANTAGE))[0]
    return "reward_N" in names or "step_reward_K" in names


def check_entries(row: Algorithm) -> None:
    """Load the user's own functions that a row names. Raises KeelError where one is not there."""
    for what, choice in ((ADVANTAGE, row.advantage), (SURROGATE, row.surrogate)):
        if choice.kind == "custom":
            load_entry(choice.function, what)


def _users(what: str, choice: Any, signals: Mapping[str, Tensor]) -> Tensor:
    """Call a user's own function; what it raises is named as theirs, but for a lack of memory."""
    function = load_entry(choice.function, what)
    try:
        return _call(function, {**choice.options, **signals})
    except KeelError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise  # a smaller micro-batch may have room
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"{what}: {choice.function} raised {message}") from error


def _call(function: Function, available: Mapping[str, Any]) -> Tensor:
    """Call a function of the maths with those of the available arguments that it names."""
    names, required = _parameters(function)
    missing = [name for name in required if name not in available]
    if missing:
        raise KeelError(
            f"{function.__module__}:{function.__name__} asks for {', '.join(missing)}: "
            f"there are {', '.join(sorted(available))}"
        )
    return function(**{name: available[name] for name in names if name in available})


@lru_cache(maxsize=256)
def _parameters(function: Function) -> tuple[list[str], list[str]]:
    """The names of a function's parameters, and of those without a default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters], [p.name for p in parameters if p.default is p.empty]
