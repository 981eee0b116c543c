"""What holds of every public function: docstring, a test, dtype, gradient, shapes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keel.objective
from keel.objective import (
    auxiliary,
    background,
    baselines,
    contrasts,
    corrections,
    distillation,
    divergences,
    gae,
    group,
    masks,
    preference,
    ratios,
    segments,
    surrogates,
    turns,
    weighted,
    weights,
)
from tests.objective import loops

Function = Callable[..., Any]
MODULES = [
    importlib.import_module(f"keel.objective.{found.name}")
    for found in pkgutil.iter_modules(keel.objective.__path__)
]
PUBLIC = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and function.__module__ == module.__name__
    and not name.startswith("_")
}

# A source is an arXiv number, or an author and a year.
SOURCE = re.compile(r"Source: .*?(arXiv:\d{4}\.\d{4,5}|[A-Z]\w+.*? (19|20)\d\d)", re.DOTALL)
# An equation stands indented on lines of its own and relates two things.
EQUATION = re.compile(r"^ {4,}\S.*(=|←|·).*$", re.MULTILINE)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_an_equation_and_a_source(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name])
    assert doc is not None
    assert EQUATION.search(doc), "no equation"
    assert SOURCE.search(doc), "no source"


def test_every_function_is_referred_to_in_a_test() -> None:
    here = Path(__file__)
    texts = "\n".join(p.read_text() for p in here.parent.glob("test_*.py") if p != here)
    assert [n for n in PUBLIC if not re.search(rf"\b{re.escape(n)}\b", texts)] == []


# ---------------- dtype, gradient, by example

LENGTHS = loops.ints([3, 1, 4])
GROUPS = loops.ints([2, 2, 2])
FLAGS = torch.tensor([True, False, False, True, False, True, False, True])


def n(seed: int, scale: float = 0.5) -> Tensor:
    return loops.random(8, seed, scale)


def s(seed: int) -> Tensor:
    return loops.random(3, seed)


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    return loops.random(rows * columns, seed).reshape(rows, columns)


@dataclass(frozen=True)
class Example:
    """A call: tensors that are differentiated, tensors that are not, options."""

    smooth: Mapping[str, Tensor]
    fixed: Mapping[str, Any]


def example(fixed: Mapping[str, Any] | None = None, **smooth: Tensor) -> Example:
    return Example(smooth, fixed or {})


PAIR = {"log_prob_N": n(1), "other_log_prob_N": n(2)}
TO_OLD = {"log_prob_N": n(1), "old_log_prob_N": n(2)}
RATIO = example({"lengths_S": LENGTHS}, **TO_OLD)
SURROGATE = {"log_ratio_N": n(1), "advantage_N": n(2)}
CONSTANT_A = {"log_ratio_N": n(1), "advantage_N": s(2).repeat_interleave(LENGTHS)}
REWARDS = {"reward_S": s(1)}
PLUS = {"reward_S": s(1), "penalty_N": n(2)}
SCORES = {"chosen_C": n(1), "rejected_C": n(2)}
UNIT = n(5).sigmoid()
TURN = loops.ints([0, 0, 1, 0, 0, 1, 1, 2])
OWN = {"lengths_S": LENGTHS}
CORRECTION = {
    "engine_log_prob_N": n(1),
    "old_log_prob_N": n(2),
    "lengths_S": LENGTHS,
    "level": "sequence",
}
MISMATCH = {name: value for name, value in CORRECTION.items() if name != "level"}
Q = matrix(4, 3, 1)
ENDS = torch.tensor([True, False, False, True])
MEAN, LOG_STD = matrix(8, 2, 1), matrix(1, 2, 2)
# Next states of 4 states and 3 actions; a fifth of the mass is termination.
LEAKY = 0.8 * loops.random(48, 3).reshape(4, 3, 4).softmax(-1)

EXAMPLES: dict[Function, Example] = {
    segments.segment_sum: example(OWN, x_N=n(1)),
    segments.segment_mean: example(OWN, x_N=n(1)),
    segments.spread: example(OWN, x_S=s(1)),
    segments.on_last: example(OWN, x_S=s(1)),
    segments.shift: example(OWN, x_N=n(1)),
    segments.to_go: example(OWN, x_N=n(1)),
    segments.linear_recurrence: example({"horizon": 3}, decay_N=n(1), input_N=n(2)),
    segments.whiten: example({"present_N": FLAGS}, x_N=n(1)),
    gae.td_error: example({"gamma": 0.9}, reward_N=n(1), value_N=n(2), next_value_N=n(3)),
    gae.gae: example({"continues_N": FLAGS, "gamma": 0.9, "lam": 0.8}, td_error_N=n(1)),
    gae.n_step: example({"continues_N": FLAGS, "gamma": 0.9, "steps": 3}, td_error_N=n(1)),
    gae.returns: example(advantage_N=n(1), value_N=n(2)),
    gae.returns_to_go: example({**OWN, "gamma": 0.9}, reward_N=n(1)),
    gae.monte_carlo: example(
        {**OWN, "gamma": 0.9}, reward_N=n(1), value_N=n(2), next_value_N=n(3)),
    gae.value_baseline: example(OWN, reward_S=s(1), value_N=n(2)),
    group.group_relative: example(
        {"groups_S": GROUPS, "scale": "std", "epsilon": 1e-4}, **REWARDS),
    group.leave_one_out: example({"groups_S": GROUPS}, **REWARDS),
    group.optimal: example({"groups_S": GROUPS, **OWN}, **REWARDS),
    group.group_mean_baseline: example({"groups_S": GROUPS}, **REWARDS),
    baselines.greedy_baseline: example(reward_S=s(1), baseline_S=s(2)),
    baselines.role_relative: example(
        {"role_S": loops.ints([1, 0, 1]), "decay": 0.9}, reward_S=s(1), baseline_R=s(2)[:2]),
    turns.group_in_group: example(
        {"turn_N": TURN, "anchor_N": loops.ints([0, 0, 1, 0, 2, 1, 1, 0]), "groups_S": GROUPS,
         **OWN, "omega": 0.7, "gamma": 0.9, "scale": "std", "epsilon": 1e-4}, reward_N=n(1)),
    turns.turn_relative: example(
        {"turn_N": TURN, "groups_S": GROUPS, **OWN, "outcome_weight": 0.7, "epsilon": 1e-4},
        reward_N=n(1)),
    turns.turn_gae: example(
        {"turn_N": TURN, **OWN, "gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.6},
        reward_N=n(1), value_N=n(2), next_value_N=n(3)),
    baselines.baselined_returns: example(
        {"groups_S": GROUPS, **OWN, "gamma": 0.9, "group_baseline": True}, **PLUS),
    group.process_group_relative: example(
        {"step_end_K": loops.ints([0, 2, 3, 6]), "step_sequence_K": loops.ints([0, 0, 1, 2]),
         "groups_S": GROUPS, **OWN, "epsilon": 1e-4},
        step_reward_K=loops.random(4, 1)),
    preference.bradley_terry: example({"probability_C": UNIT, "margin_C": n(3).abs()}, **SCORES),
    preference.centering: example(**SCORES),
    preference.label_cross_entropy: example({"label_S": UNIT}, logit_S=n(1)),
    preference.dpo: example({"probability_C": UNIT, "beta": 0.3, "smoothing": 0.1}, gap_C=n(1)),
    preference.ipo: example({"probability_C": UNIT, "beta": 0.3}, gap_C=n(1)),
    preference.hinge: example({"probability_C": UNIT, "beta": 0.3}, gap_C=n(1)),
    preference.robust: example({"probability_C": UNIT, "beta": 0.3, "smoothing": 0.1}, gap_C=n(1)),
    preference.simpo: example({"probability_C": UNIT, "beta": 2.0, "margin": 0.5}, gap_C=n(1)),
    preference.log_odds: example(log_prob_S=-n(1).abs() - 0.1),
    preference.orpo: example({"probability_C": UNIT, "beta": 0.3}, gap_C=n(1)),
    preference.chosen_nll: example({"share_S": UNIT, "tokens": 7.0}, log_prob_S=n(1)),
    # It has no gradient by design: a weight of the answers alone.
    preference.reference_point: example({"log_ratio_S": n(1).abs()}),
    preference.kto: example(
        {"label_S": UNIT, "point": torch.tensor(0.2, dtype=torch.float64), "beta": 0.3,
         "desirable_weight": 1.3, "undesirable_weight": 0.8}, log_ratio_S=n(1)),
    ratios.exponential: example(log_ratio_N=n(1)),
    corrections.effective_sample_size: example(weight_N=n(1).exp()),
    corrections.chi_squared: example(weight_N=n(1).exp()),
    corrections.perplexity_ratio: example(OWN, engine_log_prob_N=n(1), old_log_prob_N=n(2)),
    ratios.log_linear: example(
        {"log_prob_N": n(1), "engine_log_prob_N": n(2), "lag_N": TURN.double()}),
    ratios.none: RATIO,
    ratios.token: RATIO,
    ratios.sequence: RATIO,
    # Its gradient is by design not that of its value: left out of the gradient check.
    ratios.sequence_token: RATIO,
    ratios.sequence_product: RATIO,
    surrogates.unclipped: example(OWN, **SURROGATE),
    surrogates.clip: example({**OWN, "low": 0.2, "high": 0.28, "dual": 3.0}, **SURROGATE),
    weighted.cispo: example(
        {"log_ratio_N": n(1), **OWN, "cap": 1.3, "floor": 0.8}, advantage_N=n(2), log_prob_N=n(3)),
    surrogates.sapo: example(
        {**OWN, "temperature_positive": 1.0, "temperature_negative": 1.05}, **SURROGATE),
    surrogates.geometric: example({**OWN, "low": 0.2, "high": 0.3}, **CONSTANT_A),
    weighted.log_prob: example(OWN, **SURROGATE),
    divergences.k1: example(**PAIR),
    divergences.k2: example(**PAIR),
    divergences.k3: example(**PAIR),
    divergences.absolute: example(**PAIR),
    divergences.full: example(logits_NV=matrix(8, 5, 1), reference_logits_NV=matrix(8, 5, 2)),
    divergences.relative_entropy: example(
        log_prob_NV=matrix(8, 5, 1).log_softmax(-1), other_NV=matrix(8, 5, 2).log_softmax(-1)),
    distillation.teacher_log_ratio: example(
        {**OWN, "gamma": 0.9}, old_log_prob_N=n(1), teacher_log_prob_N=n(2)),
    distillation.prefix_weighted: example({**OWN, "gain": 0.5}, advantage_N=n(1)),
    distillation.jensen_shannon: example(
        {"mix": 0.3, "top_k": 3}, log_prob_NV=matrix(8, 5, 1).log_softmax(-1),
        teacher_NV=matrix(8, 5, 2).log_softmax(-1)),
    divergences.weighted: example(divergence_N=n(3), **TO_OLD),
    divergences.old_to_policy: example(**TO_OLD),
    divergences.policy_to_old: example(**TO_OLD),
    gae.value_loss: example({"clip": 0.2}, value_N=n(1), old_value_N=n(2), return_N=n(3)),
    divergences.entropy: example(logits_NV=matrix(8, 5, 1)),
    corrections.weight: example(CORRECTION),
    corrections.truncate: example({**CORRECTION, "cap": 1.2}),
    corrections.mask: example({**CORRECTION, "floor": 0.8, "cap": 1.2}),
    corrections.geometric_mask: example({**MISMATCH, "floor": 0.8, "cap": 1.2}),
    corrections.outlier_mask: example({**MISMATCH, "floor": 0.5, "cap": 2.0}),
    corrections.reject: example({**MISMATCH, "statistic": "k3", "over": "max", "cap": 0.3}),
    corrections.normalise: example({**OWN, "level": "sequence"}, weight_N=n(1).exp()),
    auxiliary.of_right: example({"threshold": 0.1}, log_prob_N=n(1), outcome_N=n(2)),
    auxiliary.uncertain: example({"log_prob_M": -n(1).abs()}),
    masks.top_entropy: example({"entropy_N": n(1), "share": 0.4}),
    masks.off_policy_sequences: example(
        {"log_prob_N": n(1), "engine_log_prob_N": n(2), "advantage_N": n(3), **OWN, "bound": 0.1}),
    masks.second_moment: example({**TO_OLD, "bound": 0.2}),
    masks.total_variation: example(
        {"log_prob_N": -n(1).abs(), "old_log_prob_N": -n(2).abs(), "advantage_N": n(3),
         "low": 0.1, "high": 0.2}),
    masks.binary_kl: example(
        {"log_prob_N": -n(1).abs(), "old_log_prob_N": -n(2).abs(), "advantage_N": n(3),
         "low": 0.01, "high": 0.02}),
    masks.covariance: example({"log_prob_N": n(1)}, advantage_N=n(2)),
    masks.clip_cov: example(
        {"log_prob_N": n(1), "advantage_N": n(2), "clipped_N": FLAGS, "share": 0.2, "floor": -1.0,
         "cap": 1.0, "seed": 3}),
    masks.highest: example({"x_N": n(1), "share": 0.3}),
    masks.quantile: example({"share": 0.3}, x_N=n(1)),
    group.mean_relative: example({"groups_S": GROUPS, "epsilon": 1e-4}, reward_S=s(1).abs()),
    group.best_of_group: example(
        {"groups_S": GROUPS, "scale": "std", "epsilon": 1e-6}, **REWARDS),
    group.rescaled_baseline: example({"groups_S": GROUPS}, **REWARDS),
    group.separately_normalised: example(
        {"rewards": [s(1), s(2)], "groups_S": GROUPS, "weights": [1.0, 0.5], "epsilon": 1e-4}),
    baselines.optimal_token: example(
        {"groups_S": GROUPS, **OWN}, reward_N=n(1), old_log_prob_N=-n(2).abs(),
        old_squares_N=1 + UNIT),  # so that no weight is near 0
    weighted.vespo: example(
        {"log_ratio_N": n(1), **OWN, "power_positive": 2.0, "rate_positive": 3.0,
         "power_negative": 3.0, "rate_negative": 2.0}, advantage_N=n(2), log_prob_N=n(3)),
    surrogates.fipo: example(
        {"log_ratio_N": n(1), **OWN, "low": 0.2, "high": 0.28, "half_life": 4.0, "floor": 0.9,
         "cap": 1.2}, advantage_N=n(2)),
    weighted.topr: example(
        {"log_ratio_N": n(1), **OWN, "outcome_S": s(4), "threshold": 0.0}, advantage_N=n(2),
        log_prob_N=n(3)),
    contrasts.real_shares: example(
        {"log_ratio_N": n(1), **OWN, "outcome_S": s(4), "groups_S": GROUPS, "threshold": 0.0,
         "temperature": 0.5}),
    # The gradient is that of its value only at what was prepared: left out of the gradient check.
    contrasts.real: example(
        {**OWN, "prepared_N": matrix(8, 2, 4), "advantage_N": n(2), "log_ratio_N": n(1)}),
    contrasts.online_dpo_shares: example(
        {"log_prob_N": n(1), "reference_log_prob_N": n(2), **OWN, "outcome_S": s(4),
         "groups_S": GROUPS, "beta": 0.3}),
    contrasts.online_dpo: example(
        {**OWN, "prepared_N": matrix(8, 2, 4), "advantage_N": n(2), "log_ratio_N": n(1)}),
    weighted.dro: example({**OWN, "beta": 0.3}, log_prob_N=n(3), **SURROGATE),
    surrogates.kimi: example({"log_ratio_N": n(1), **OWN, "tau": 0.2}, advantage_N=n(2)),
    surrogates.kl_cov: example(
        {**OWN, "prepared_N": FLAGS.double(), "coefficient": 0.7}, **SURROGATE),
    background.state_value: example(probability_BA=matrix(4, 3, 2), q_BA=Q),
    background.epsilon_greedy: example({"q_BA": Q, "epsilon": 0.1}),
    background.td_target: example(
        {"reward_B": Q[:, 0], "next_q_BA": Q, "terminated_B": ENDS, "gamma": 0.9}),
    background.double_td_target: example(
        {"reward_B": Q[:, 0], "next_online_q_BA": Q, "next_target_q_BA": -Q,
         "terminated_B": ENDS, "gamma": 0.9}),
    background.n_step_target: example(
        {"reward_BK": Q, "terminated_BK": Q > 1, "next_value_B": Q[:, 1], "gamma": 0.9,
         "steps_B": loops.ints([3, 1, 2, 3])}),
    background.q_error: example(
        {"action_B": loops.ints([0, 2, 1, 0]), "target_B": Q[:, 1]}, q_BA=Q),
    background.squared_loss: example(error_B=n(1)),
    background.huber: example({"threshold": 0.3}, error_B=n(1)),
    background.target_update: example({"target": n(1), "online": n(2), "rate": 0.3}),
    divergences.gaussian_log_prob: example(
        mean_ND=MEAN, log_std_ND=LOG_STD, action_ND=matrix(8, 2, 3)
    ),
    divergences.gaussian_entropy: example(log_std_ND=LOG_STD),
    divergences.gaussian_kl: example(
        mean_ND=MEAN, log_std_ND=LOG_STD, reference_mean_ND=matrix(8, 2, 3),
        reference_log_std_ND=-LOG_STD),
    background.bellman_optimal: example({"gamma": 0.9}, q_XA=Q, reward_XA=-Q, transition_XAY=LEAKY),
    background.value_iteration: example({"gamma": 0.5}, reward_XA=Q, transition_XAY=LEAKY),
    background.policy_values: example(
        {"gamma": 0.9}, probability_XA=Q.softmax(-1), reward_XA=Q, transition_XAY=LEAKY),
}  # fmt: skip
# Of lengths alone, of floats alone.
OTHERS: set[Function] = {
    segments.sequence_index, segments.continues, gae.adaptive_lambda, weights.sequence_mean,
    weights.token_mean, weights.constant, weights.sequence_sum, divergences.adapt_ppo,
    divergences.adapt_ziegler, divergences.adapt_entropy, gae.explained_variance,
    turns.turn_lengths,
}  # fmt: skip
NAMED = {name: EXAMPLES[f] for name, f in PUBLIC.items() if f in EXAMPLES}


def cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, list):
        return [cast(one, dtype) for one in x]
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def run(name: str, dtype: torch.dtype) -> Tensor:
    call = NAMED[name]
    out = PUBLIC[name](**{k: cast(v, dtype) for k, v in {**call.smooth, **call.fixed}.items()})
    return out[0] if isinstance(out, tuple) else out


def test_every_function_has_an_example() -> None:
    assert set(PUBLIC.values()) == set(EXAMPLES) | OTHERS


@pytest.mark.parametrize("name", NAMED)
def test_dtype_and_arguments_are_kept_and_float32_agrees(name: str) -> None:
    arguments = {**NAMED[name].smooth, **NAMED[name].fixed}
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    single, double = run(name, torch.float32), run(name, torch.float64)
    assert all(torch.equal(before[k], arguments[k]) for k in before)
    if double.dtype == torch.bool:
        assert torch.equal(single, double)
        return
    assert single.dtype == torch.float32
    assert double.dtype == torch.float64
    # Some ten float32 operations on numbers of order 1.
    torch.testing.assert_close(single.double(), double, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    "name", [k for k, e in NAMED.items() if e.smooth and k != "ratios.sequence_token"]
)
def test_gradient(name: str) -> None:
    call = NAMED[name]
    inputs = [x.clone().requires_grad_() for x in call.smooth.values()]

    def function(*tensors: Tensor) -> Tensor:
        out = PUBLIC[name](**dict(zip(call.smooth, tensors, strict=True)), **call.fixed)
        return out[0] if isinstance(out, tuple) else out

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize(
    "name",
    [
        k
        for k, e in NAMED.items()
        if sum(isinstance(v, Tensor) and v.shape == (8,) for v in e.smooth.values()) > 1
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    call = NAMED[name]
    arguments = {**call.smooth, **call.fixed}
    short = next(k for k, v in call.smooth.items() if v.shape == (8,))
    with pytest.raises(Exception, match=PUBLIC[name].__name__):
        PUBLIC[name](**{**arguments, short: arguments[short][:1]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_come_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    for function in (weights.sequence_mean, weights.token_mean, weights.sequence_sum):
        assert function(LENGTHS, dtype=dtype).dtype == dtype
    assert weights.constant(LENGTHS, constant=3, dtype=dtype).dtype == dtype
    assert gae.adaptive_lambda(LENGTHS, alpha=0.05, dtype=dtype).dtype == dtype
