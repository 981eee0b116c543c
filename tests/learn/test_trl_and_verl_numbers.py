"""Losses, gradients and advantages recorded from TRL 1.16.0 and verl 0.9.1, reproduced to 1e-8."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms.advantages import GAE, CustomAdvantage
from keel.algorithms.group_advantages import (
    BatchNormalised,
    GreedyBaseline,
    GroupRelative,
    LeaveOneOut,
    Optimal,
)
from keel.algorithms.losses import Divergence, ValueLoss
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip, Geometric, Sapo
from keel.algorithms.weighted import Cispo, LogProb
from keel.learn.advantages import RolloutRewards, estimate
from keel.learn.batch import Estimates
from keel.learn.loss import loss, prepare
from keel.models.head import Scores
from tests.learn.flat import blank
from tests.shared import oracle_cases

TOLERANCE = 1e-8  # as in the file: verl adds 1e-8 to some denominators

COUNT = 92
PER_TOKEN = CustomAdvantage(function="builtins:sum", per_token=True)
AGGREGATE = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
}
LOSS_TYPE = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant",
}


def load() -> list[dict[str, Any]]:
    return json.loads(oracle_cases().read_text())  # type: ignore[no-any-return]


class Group:
    """One group of cases: a padded batch, and its way to the flat one and back."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.mask = torch.tensor(data["mask"]).bool()
        self.batch = replace(
            blank(data["lengths"], data["groups"]),
            old_log_prob_N=self.flat(data["old_logprobs"]),
            engine_log_prob_N=self.flat(data["old_logprobs"]),
            reference_log_prob_N=self.flat(data["ref_logprobs"]),
        )
        self.new_N = self.flat(data["new_logprobs"])

    def flat(self, rows: Any) -> Tensor:
        values = torch.tensor(rows, dtype=torch.float64)
        if values.ndim == 1:
            values = values[:, None].expand(self.mask.shape)
        return values[self.mask]

    def rewards(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)


def algorithm(**choices: Any) -> Algorithm:
    given = {"advantage": PER_TOKEN, "ratio": "token", "surrogate": Clip()} | choices
    given.setdefault("weights", Weights(kind="token_mean"))
    return Algorithm(**given)


def check_policy_loss(case: dict[str, Any], group: Group) -> None:
    chosen, budget = (trl_algorithm if case["source"] == "trl" else verl_algorithm)(case)
    estimates = Estimates(group.flat(case["advantages"]))
    leaf = group.new_N.clone().requires_grad_()
    whole = prepare(chosen, group.batch, estimates, budget)
    beta = chosen.divergence.beta if chosen.divergence else 0.0
    out = loss(chosen, whole, Scores(leaf, None, None, None), beta)
    (grad,) = torch.autograd.grad(out.total, leaf)
    assert out.total.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    torch.testing.assert_close(grad, group.flat(case["grad"]), rtol=0, atol=TOLERANCE)


def trl_algorithm(case: dict[str, Any]) -> tuple[Algorithm, int]:
    surrogate: Any = Clip(low=case["eps_low"], high=case["eps_high"])
    if case["loss_type"] == "cispo":
        surrogate = Cispo(cap=case["eps_high"])
    if case["loss_type"] == "sapo":
        positive, negative = case["sapo_temperatures"]
        surrogate = Sapo(temperature_positive=positive, temperature_negative=negative)
    divergence = Divergence(beta=case["beta"], estimator=case["kl"]) if case["beta"] else None
    chosen = algorithm(
        advantage=GroupRelative(),
        ratio=case["ratio"],
        surrogate=surrogate,
        weights=Weights(kind=LOSS_TYPE[case["loss_type"]]),
        divergence=divergence,
    )
    return chosen, case["dr_grpo_length"] or 1


def verl_algorithm(case: dict[str, Any]) -> tuple[Algorithm, int]:
    low, high, name = case["eps_low"], case["eps_high"], case["name"]
    surrogate: Any = {
        "vanilla": Clip(low=low, high=high, dual=case["dual_clip"]),
        "gspo": Clip(low=low, high=high),
        "geo_mean": Geometric(low=low, high=high),
        "cispo": Cispo(cap=1 + high, floor=1 - low),
        "sapo": Sapo(),
        "gpg": LogProb(),
    }[name]
    sequence = name in ("gspo", "geo_mean")
    chosen = algorithm(
        advantage=GroupRelative() if sequence else PER_TOKEN,
        ratio={"gspo": "sequence", "gpg": "none"}.get(name, "token"),
        surrogate=surrogate,
        weights=Weights(kind=AGGREGATE[case["aggregate"]]),
    )
    return chosen, 1


def check_advantage(case: dict[str, Any], group: Group) -> None:
    choice: Any = {
        "grpo": lambda: GroupRelative(epsilon=case["eps"]),
        "rloo": LeaveOneOut,
        "opo": Optimal,
        "reinforce_plus_plus": lambda: BatchNormalised(gamma=case["gamma"]),
        "reinforce_plus_plus_baseline": lambda: BatchNormalised(group_baseline=True),
        "remax": GreedyBaseline,
    }[case.get("name", "grpo")]()
    baseline = None
    if "baseline" in case:
        baseline = torch.full((group.batch.sequences,), case["baseline"], dtype=torch.float64)
    judged = RolloutRewards(group.rewards(case["rewards"]), baseline)
    chosen = algorithm(advantage=choice)
    made = prepare(chosen, group.batch, estimate(chosen, group.batch, judged, 0.0), 1)
    expected = group.flat(case["advantages"])
    torch.testing.assert_close(made.advantage_N, expected, rtol=0, atol=TOLERANCE)


def check_gae(case: dict[str, Any], group: Group) -> None:
    """The case has a reward on every token: its outcome is added through the penalty."""
    choice = GAE(gamma=case["gamma"], lam=case["lam"], whiten=True)
    reward_N = group.flat(case["token_rewards"])
    zeros = torch.zeros_like(reward_N)
    chosen = algorithm(
        advantage=choice,
        value=ValueLoss(),
        divergence=Divergence(where="reward", estimator="k1", beta=1.0),
    )
    batch = replace(
        group.batch,
        old_log_prob_N=-reward_N,  # −β k1 = −(ℓ_old − 0): the token's reward
        reference_log_prob_N=zeros,
        value_N=group.flat(case["values"]),
    )
    silent = RolloutRewards(torch.zeros(batch.sequences, dtype=torch.float64))
    made = prepare(chosen, batch, estimate(chosen, batch, silent, 1.0), 1)
    pairs = ((made.advantage_N, case["advantages"]), (made.return_N, case["returns"]))
    for found, expected in pairs:
        torch.testing.assert_close(found, group.flat(expected), rtol=0, atol=TOLERANCE)


def check_kl(case: dict[str, Any], group: Group) -> None:
    reference_N = group.batch.reference_log_prob_N
    assert reference_N is not None
    found = Divergence(estimator=case["estimator"]).estimate(group.new_N, reference_N)
    torch.testing.assert_close(found, group.flat(case["values"]), rtol=0, atol=TOLERANCE)


def check_value_loss(case: dict[str, Any], group: Group) -> None:
    chosen = algorithm(advantage=GAE(), value=ValueLoss(coefficient=1.0, clip=case["clip"]))
    batch = replace(group.batch, value_N=group.flat(case["old_values"]))
    estimates = Estimates(torch.zeros_like(group.new_N), group.flat(case["returns"]))
    leaf = group.flat(case["predicted"]).requires_grad_()
    whole = prepare(chosen, batch, estimates, 1)
    out = loss(chosen, whole, Scores(group.new_N, None, leaf, None), 0.0)
    (grad,) = torch.autograd.grad(out.total, leaf)
    assert out.total.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    assert float(out.metrics["value/clip_ratio"]) == pytest.approx(
        case["clipped_fraction"], abs=TOLERANCE
    )
    torch.testing.assert_close(grad, group.flat(case["grad"]), rtol=0, atol=TOLERANCE)


CHECKS = {
    "group_relative": check_advantage,
    "policy_loss": check_policy_loss,
    "gae_whitened": check_gae,
    "advantage": check_advantage,
    "kl": check_kl,
    "value_loss": check_value_loss,
}


def test_every_recorded_case_is_reproduced() -> None:
    """All cases of the file; a failure names the case."""
    seen: dict[str, int] = {}
    for number, data in enumerate(load()):
        group = Group(data)
        for index, case in enumerate(data["cases"]):
            try:
                CHECKS[case["kind"]](case, group)
            except AssertionError as error:
                words = {k: v for k, v in case.items() if isinstance(v, str | float | int)}
                raise AssertionError(f"group {number}, case {index}: {words}") from error
            seen[case["kind"]] = seen.get(case["kind"], 0) + 1
    assert sum(seen.values()) == sum(len(data["cases"]) for data in load()) > 0
    if "KEEL_ORACLES" not in os.environ:
        assert set(seen) == set(CHECKS)
        assert sum(seen.values()) == COUNT
