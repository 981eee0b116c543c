"""Contradictory algorithms are refused with the reason and a fix."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest
from pydantic import ValidationError

from keel.algorithms import losses, spec, surrogates
from keel.algorithms.spec import Algorithm
from tests.algorithms.samples import BASE

VALUE = {"coefficient": 0.1}
LOSS_TO_OLD = {"to": "old", "where": "loss"}
REWARD = {"to": "reference", "where": "reward"}

# Changes to the valid algorithm, a part of the reason, and a fix.
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"surrogate": {"kind": "log_prob"}}, "has no ratio", {"ratio": "none"}),
    ({"surrogate": {"kind": "online_dpo"}}, '"online_dpo" has no ratio', {"ratio": "none"}),
    ({"ratio": "none"}, "leaves it nothing", {"surrogate": {"kind": "log_prob"}}),
    (
        {"surrogate": {"kind": "geometric"}, "ratio": "sequence"},
        "takes the mean over a sequence itself",
        {"ratio": "token"},
    ),
    (
        {"surrogate": {"kind": "geometric"}, "advantage": {"kind": "process_group_relative"}},
        "is one number a sequence",
        {"advantage": {"kind": "group_relative"}},
    ),
    (
        {"surrogate": {"kind": "cispo"}, "ratio": "sequence_product"},
        "weighs each token's log-probability by its own ratio",
        {"ratio": "sequence_token"},
    ),
    (
        {"ratio": "sequence_product", "weights": {"kind": "sequence_sum"}},
        "count it once for each token",
        {"weights": {"kind": "sequence_mean"}},
    ),
    (
        {"ratio": "sequence", "advantage": {"kind": "gae"}, "value": VALUE},
        "differs from token to token",
        {"ratio": "sequence_token"},
    ),
    (
        {"surrogate": {"kind": "cispo", "floor": 3.0, "cap": 2.0}},
        "surrogate.floor = 3 and surrogate.cap = 2 leave out 1",
        {"surrogate": {"kind": "cispo", "floor": 1.0, "cap": 1.0}},
    ),
    (
        {"corrections": {"kind": "truncate", "cap": 0.5}},
        "corrections.cap = 0.5 cuts every weight",
        {"corrections": {"kind": "truncate", "cap": 1.0}},
    ),
    (
        {"corrections": {"kind": "mask", "floor": 3.0, "cap": 2.0}},
        "corrections.floor = 3 and corrections.cap = 2 leave out 1",
        {"corrections": {"kind": "mask", "floor": 1.0, "cap": 1.0}},
    ),
    (
        {
            "advantage": {"kind": "separately_normalised"},
            "divergence": {**REWARD, "estimator": "k1"},
        },
        "reads each reward for itself: a divergence in the reward would be lost",
        {"divergence": {"to": "reference", "where": "loss", "estimator": "k3"}},
    ),
    (
        {"divergence": {"to": "old", "unbiased": "ratio"}},
        "by the ratio of the surrogate: set unbiased = true",
        {"divergence": {"to": "old", "unbiased": True}},
    ),
    (
        {"corrections": [{"kind": "normalise"}, {"kind": "truncate"}]},
        'corrections.0 = "normalise" divides the weights of what stands before it',
        {"corrections": [{"kind": "truncate"}, {"kind": "normalise"}]},
    ),
    (
        {"corrections": [{"kind": "truncate"}, {"kind": "truncate"}]},
        'corrections.1 = "truncate" is there twice',
        {"corrections": [{"kind": "truncate"}, {"kind": "geometric_mask"}]},
    ),
    (
        {"corrections": [{"kind": "truncate"}, {"kind": "mask"}]},
        'corrections.1 = "mask" would multiply by the importance weight a second time',
        {"corrections": [{"kind": "truncate"}, {"kind": "reject", "over": "token"}]},
    ),
    (
        {"corrections": {"kind": "reject", "statistic": "k3"}},
        "corrections.cap bounds k3, an estimate of a divergence: set it",
        {"corrections": {"kind": "reject", "statistic": "k3", "cap": 0.01}},
    ),
    (
        {"auxiliary": {"kind": "demonstrations", "weighting": "teacher"}},
        'reads the divergence to a teacher: set distillation.place = "loss"',
        {"auxiliary": {"kind": "demonstrations"}},
    ),
    (
        {"auxiliary": [{"kind": "replies"}, {"kind": "replies", "coefficient": 0.2}]},
        'auxiliary.1 = "replies" is there a second time',
        {"auxiliary": [{"kind": "replies"}, {"kind": "positive_nll"}]},
    ),
    (
        {"surrogate": {"kind": "real"}, "weights": {"kind": "token_mean"}},
        "is a loss of a whole group, of which each completion has a share",
        {"weights": {"kind": "sequence_mean"}},
    ),
    (
        {"advantage": {"kind": "mean_relative"}, "divergence": {**REWARD, "estimator": "k1"}},
        "divides by the mean reward: a divergence in the reward makes it negative",
        {"divergence": {"to": "reference", "where": "loss", "estimator": "k3"}},
    ),
    (
        {"corrections": {"kind": "reject", "over": "max"}},
        "corrections: the largest k1 is of the tokens that became less likely alone",
        {"corrections": {"kind": "reject", "over": "max", "statistic": "k2", "cap": 0.5}},
    ),
    (
        {"surrogate": {"kind": "vespo"}, "ratio": "sequence"},
        'surrogate "vespo" reads the ratio of each token: set ratio = "token"',
        {"ratio": "token"},
    ),
    (
        {
            "advantage": {"kind": "zero"},
            "distillation": {"place": "advantage"},
            "weights": {"kind": "constant"},
            "divergence": {**REWARD, "estimator": "k1"},
        },
        "reads no reward: a divergence in it would be lost",
        {"divergence": {"to": "reference", "where": "loss", "estimator": "k3"}},
    ),
    (
        {"distillation": {"place": "advantage"}, "ratio": "sequence"},
        "differs from token to token, and the ratio or the surrogate is one number a sequence",
        {"distillation": {"place": "loss"}},
    ),
    (
        {"advantage": {"kind": "zero"}},
        'advantage "zero" learns nothing, and no other term says what is to be learned',
        {"distillation": {"place": "loss"}},
    ),
    ({"advantage": {"kind": "gae"}}, "reads a value model and none is trained", {"value": VALUE}),
    ({"value": VALUE}, "never reads the value model", {"value": "none"}),
    (
        {"divergence": {"estimator": "k1", "where": "loss"}},
        "gradient of k1 in the loss is zero in expectation",
        {"divergence": {"estimator": "k1", "where": "reward"}},
    ),
    (
        {
            "advantage": {"kind": "process_group_relative"},
            "divergence": {**REWARD, "estimator": "k1"},
        },
        "reads the rewards of steps, not of tokens",
        {"divergence": {"estimator": "k3", "where": "loss"}},
    ),
    (
        {"divergence": {**LOSS_TO_OLD, "adaptive": {"rule": "ziegler"}}},
        "Ziegler's rule follows the divergence to the reference",
        {"divergence": {**LOSS_TO_OLD, "adaptive": {"rule": "ppo"}}},
    ),
    (
        {"divergence": {"adaptive": {"rule": "ppo"}}},
        "PPO's rule follows the divergence to the old policy",
        {"divergence": {"adaptive": {"rule": "ziegler"}}},
    ),
    (
        {"divergence": {"to": "old", "where": "reward", "estimator": "k1"}},
        "that of the sampling policy to itself, zero",
        {"divergence": {"to": "old", "where": "loss", "estimator": "k3"}},
    ),
    (
        {"divergence": {**REWARD, "estimator": "k1", "unbiased": True}},
        "in the reward there is no ratio",
        {"divergence": {**REWARD, "estimator": "k1", "unbiased": False}},
    ),
    (
        {"divergence": {**REWARD, "estimator": "full"}},
        "which a reward does not pass on",
        {"divergence": {**REWARD, "estimator": "k1"}},
    ),
    (
        {"divergence": {**LOSS_TO_OLD, "estimator": "full"}},
        "would keep its logits for every token",
        {"divergence": {**LOSS_TO_OLD, "estimator": "k3"}},
    ),
    (
        {"divergence": {"estimator": "full", "unbiased": True}},
        "there is no sample to weigh",
        {"divergence": {"estimator": "full", "unbiased": False}},
    ),
    (
        {"divergence": {"beta": 0.0, "adaptive": {"rule": "ziegler"}}},
        "0 stays 0",
        {"divergence": {"beta": 0.1, "adaptive": {"rule": "ziegler"}}},
    ),
]


def refusal(algorithm: dict[str, Any]) -> str:
    """The one reason that an invalid algorithm is refused with."""
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate(algorithm)
    [error] = caught.value.errors()
    return error["msg"]


def pattern(reason: ast.expr) -> str:
    """A regular expression for the text of a `yield`: formatted values match anything."""
    parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
    return "".join(
        re.escape(part.value) if isinstance(part, ast.Constant) else ".+"  # type: ignore[arg-type]
        for part in parts
    )


def test_each_reason_in_the_source_has_a_case() -> None:
    modules = (spec, losses, surrogates)
    nodes = [n for m in modules for n in ast.walk(ast.parse(inspect.getsource(m)))]
    patterns = [pattern(n.value) for n in nodes if isinstance(n, ast.Yield) and n.value]
    messages = [refusal({**BASE, **change}) for change, _, _ in CASES]
    assert [p for p in patterns if not any(re.search(p, message) for message in messages)] == []


@pytest.mark.parametrize(("change", "reason", "fix"), CASES, ids=[c[1] for c in CASES])
def test_contradiction_is_refused_and_its_fix_accepted(
    change: dict[str, Any], reason: str, fix: dict[str, Any]
) -> None:
    message = refusal({**BASE, **change})
    assert reason in message
    assert "\n" not in message
    Algorithm.model_validate({**BASE, **change, **fix})


@pytest.mark.parametrize(
    ("table", "bounds"),
    [
        ("surrogate", {"kind": "cispo", "cap": 0.9}),
        ("surrogate", {"kind": "cispo", "floor": 1.1}),
        ("corrections", {"kind": "mask", "cap": 0.9}),
        ("corrections", {"kind": "mask", "floor": 1.1}),
        ("corrections", {"kind": "truncate", "cap": 0.9}),
        ("corrections", {"kind": "geometric_mask", "floor": 1.001}),
        ("corrections", {"kind": "reject", "cap": 0.999}),
        ("corrections", {"kind": "outlier_mask", "cap": 0.5}),
        ("surrogate", {"kind": "clip", "low": 1.1}),
        ("surrogate", {"kind": "clip", "high": -0.1}),
        ("surrogate", {"kind": "clip", "dual": 1.0}),
        ("surrogate", {"kind": "geometric", "low": -0.1}),
        ("surrogate", {"kind": "geometric", "high": -0.1}),
        ("surrogate", {"kind": "sapo", "temperature_positive": 0.0}),
        ("surrogate", {"kind": "sapo", "temperature_negative": 0.0}),
    ],
)
def test_bounds_that_exclude_the_on_policy_ratio_are_refused(
    table: str, bounds: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate({**BASE, table: bounds})
    [error] = caught.value.errors()
    [key] = bounds.keys() - {"kind"}
    assert f"{table}.{key}" in error["msg"] or {table, key} <= set(error["loc"])


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_product", "sequence_token"])
def test_a_value_baseline_is_accepted_with_every_ratio(ratio: str) -> None:
    algorithm = {**BASE, "ratio": ratio, "advantage": {"kind": "value_baseline"}, "value": VALUE}
    assert Algorithm.model_validate(algorithm).needs_value
    with pytest.raises(ValidationError, match="reads a value model and none is trained"):
        Algorithm.model_validate({**algorithm, "value": None})


@pytest.mark.parametrize("kind", ["gae", "td", "n_step", "monte_carlo"])
@pytest.mark.parametrize("ratio", ["sequence", "sequence_product"])
def test_a_sequence_ratio_refuses_per_token_advantages(kind: str, ratio: str) -> None:
    algorithm = {**BASE, "ratio": ratio, "advantage": {"kind": kind}, "value": VALUE}
    with pytest.raises(ValidationError, match="differs from token to token"):
        Algorithm.model_validate(algorithm)


def test_a_return_to_go_is_per_token_only_with_discount_or_per_token_rewards() -> None:
    def algorithm(gamma: float, divergence: object) -> dict[str, Any]:
        advantage = {"kind": "monte_carlo", "baseline": "batch_mean", "gamma": gamma}
        return {**BASE, "ratio": "sequence", "advantage": advantage, "divergence": divergence}

    Algorithm.model_validate(algorithm(1.0, None))
    for per_token in (algorithm(0.9, None), algorithm(1.0, {**REWARD, "estimator": "k1"})):
        with pytest.raises(ValidationError, match="differs from token to token"):
            Algorithm.model_validate(per_token)
