"""Variants of 2026 as TRL 1.16.0 and verl 0.9.1 compute them, reproduced to 1e-8.

verl adds 1e-8 to the count of a mean and to the mean that an effective sample size divides by: its
weights over their mean are compared to 1e-8 of their size, and its sample size with that ε.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms.corrections import MaskWeights, Normalise, Reject, Truncate
from keel.algorithms.group_advantages import (
    BestOfGroup,
    OptimalToken,
    RescaledBaseline,
    SeparatelyNormalised,
)
from keel.algorithms.losses import Divergence
from keel.algorithms.masks import BinaryKL, OffPolicySequences, TopEntropy, TotalVariation
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip, KLCov
from keel.algorithms.weighted import Cispo, Dro, LogProb, Vespo
from keel.learn.advantages import RolloutRewards, estimate
from keel.learn.batch import Batch, Estimates
from keel.learn.loss import corrected, loss, prepare, whole_batch
from keel.models.head import Scores
from keel.objective.corrections import effective_sample_size
from tests.learn.flat import blank
from tests.learn.test_trl_and_verl_numbers import AGGREGATE, algorithm
from tests.shared import shared_path

TOLERANCE = 1e-8  # as in the file
COUNT = 118
LOSS_TYPE = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "vespo": "token_mean",
    "luspo": "sequence_sum",
}


@dataclass(frozen=True)
class Group:
    """One group of cases: a padded batch as a flat one."""

    mask: Tensor
    batch: Batch
    new_N: Tensor
    entropy_N: Tensor

    @classmethod
    def of(cls, data: dict[str, Any]) -> Group:
        mask = torch.tensor(data["mask"]).bool()

        def flat(name: str) -> Tensor:
            return torch.tensor(data[name], dtype=torch.float64)[mask]

        batch = replace(
            blank(data["lengths"], data["groups"]),
            old_log_prob_N=flat("old_logprobs"),
            engine_log_prob_N=flat("sampling_logprobs"),
            reference_log_prob_N=flat("ref_logprobs"),
            old_squares_N=flat("sum_pi_squared"),
        )
        return cls(mask, batch, flat("new_logprobs"), flat("entropies"))

    def flat(self, rows: Any) -> Tensor:
        values = torch.tensor(rows, dtype=torch.float64)
        if values.ndim == 1:
            values = values[:, None]
        return values.expand(self.mask.shape)[self.mask]


def check_policy_loss(case: dict[str, Any], group: Group) -> None:
    chosen = (trl_algorithm if case["source"] == "trl" else verl_algorithm)(case)
    batch, given = group.batch, case.get("importance_sampling_ratio")
    if given is not None:  # TRL takes the weights as they are: an engine that gives them
        assert batch.old_log_prob_N is not None
        weight_N = group.flat(given)
        chosen = chosen.model_copy(update={"corrections": (MaskWeights(floor=1e-8, cap=1e9),)})
        weight_N = weight_N.where(weight_N > 0, 1e-9)
        batch = replace(batch, engine_log_prob_N=batch.old_log_prob_N - weight_N.log())
    # Through the path that training takes, in two micro-batches.
    whole = prepare(chosen, batch, Estimates(group.flat(case["advantages"])), 1)
    if chosen.whole_batch:
        whole = whole_batch(chosen, whole, group.new_N, group.entropy_N)
    leaf, total = group.new_N.clone().requires_grad_(), 0.0
    beta = chosen.divergence.beta if chosen.divergence else 0.0
    for part in (range(3), range(3, 8)):
        index = batch.action_index(part)
        scores = Scores(leaf[index], group.entropy_N[index], None, None)
        out = loss(chosen, whole.select(part), scores, beta)
        out.total.backward()  # type: ignore[no-untyped-call]
        total += float(out.total.detach())
    assert total == pytest.approx(case["loss"], abs=TOLERANCE)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, group.flat(case["grad"]), rtol=0, atol=TOLERANCE)


def trl_algorithm(case: dict[str, Any]) -> Algorithm:
    """TRL's δ clamps the ratio from above for both signs: with ε_high below it, the dual clip."""
    surrogate: Any = Clip(low=case["eps_low"], high=case["eps_high"], dual=case["delta"])
    masks: tuple[Any, ...] = ()
    if case["opsm_threshold"] is not None:
        masks = (OffPolicySequences(bound=case["opsm_threshold"]),)
    if case["top_entropy_quantile"] < 1:
        masks = (TopEntropy(share=case["top_entropy_quantile"]),)
    divergence = None
    if case["beta"]:
        divergence = Divergence(
            beta=case["beta"], unbiased="ratio" if case["unbiased_kl"] else False
        )
    return algorithm(
        ratio=case["ratio"],
        surrogate=Vespo() if case["loss_type"] == "vespo" else surrogate,
        advantage={"kind": "group_relative"},
        weights=Weights(kind=LOSS_TYPE[case["loss_type"]]),  # type: ignore[arg-type]
        masks=masks,
        divergence=divergence,
    )


def verl_algorithm(case: dict[str, Any]) -> Algorithm:
    bounds = {"low": case["eps_low"], "high": case["eps_high"]}
    name, masks = case["name"], ()
    surrogate: Any = Cispo(cap=case["clip_ratio_c"])
    if name.startswith("dppo"):
        masks = ((TotalVariation if name == "dppo_tv" else BinaryKL)(**bounds),)  # type: ignore[assignment]
    elif name == "kl_cov":
        surrogate = KLCov(share=case["kl_cov_ratio"], coefficient=case["ppo_kl_coef"])
    else:
        surrogate = Dro(beta=case["dro_beta"]) if name == "dro" else LogProb()
    return algorithm(
        ratio="none" if name == "gpg" else "token",
        surrogate=surrogate,
        masks=masks,
        weights=Weights(kind=AGGREGATE[case["aggregate"]]),  # type: ignore[arg-type]
    )


def check_advantage(case: dict[str, Any], group: Group) -> None:
    name, batch = case["name"], group.batch
    choice: Any = {
        "grpo_passk": lambda: BestOfGroup(
            scale="std" if case["std"] else "none", epsilon=case["eps"]
        ),
        "gpg": RescaledBaseline,
        "gdpo": lambda: SeparatelyNormalised(epsilon=case["eps"]),
        "optimal_token_baseline": lambda: OptimalToken(
            zero_tail=case["handle_zero_tail"], epsilon=case["eps"]
        ),
    }[name]()
    chosen, beta = algorithm(advantage=choice), 0.0
    judged = RolloutRewards(torch.zeros(batch.sequences, dtype=torch.float64))
    if name == "gdpo":
        columns = [torch.tensor(row, dtype=torch.float64) for row in case["rewards"]]
        judged = replace(
            judged,
            components=dict(zip("ab", columns, strict=True)),
            component_weights=dict(zip("ab", case["weights"], strict=True)),
        )
    elif name == "optimal_token_baseline":  # rewards of tokens: each a step that ends with it
        judged = replace(
            judged,
            step_reward_K=group.flat(case["token_rewards"]),
            step_end_K=torch.cat([torch.arange(n) for n in batch.lengths]),
            step_sequence_K=torch.arange(8).repeat_interleave(batch.lengths_S),
        )
    else:
        judged = replace(judged, reward_S=torch.tensor(case["rewards"], dtype=torch.float64))
    made = prepare(chosen, batch, estimate(chosen, batch, judged, beta), 1)
    expected = group.flat(case["advantages"])
    torch.testing.assert_close(made.advantage_N, expected, rtol=0, atol=TOLERANCE)


def check_rejection(case: dict[str, Any], group: Group) -> None:
    """Several options must all hold."""
    terms = []
    options = case["option"].split(",")
    for option, bounds in zip(options, str(case["threshold"]).split(","), strict=True):
        *over, statistic = option.removeprefix("seq_").split("_")
        *floor, cap = map(float, bounds.split("_"))
        terms.append(
            Reject(statistic=statistic, over=over[0], cap=cap, floor=floor[0] if floor else 0.0)  # type: ignore[arg-type]
        )
    kept_N = corrected(algorithm(corrections=tuple(terms)), group.batch)
    assert torch.equal(kept_N, group.flat(case["mask"]))


def check_correction_weights(case: dict[str, Any], group: Group) -> None:
    level, bounds = case["level"], str(case["threshold"]).split("_")
    *floor, cap = map(float, bounds)
    first: Any = Truncate(level=level, cap=cap)
    if floor:
        first = MaskWeights(level=level, floor=floor[0], cap=cap)
    weight_N = corrected(algorithm(corrections=(first,)), group.batch)
    mean = weight_N.mean()
    ess = effective_sample_size(weight_N) * ((mean + 1e-8) / mean) ** 2
    assert float(ess) == pytest.approx(case["ess"], abs=TOLERANCE)
    if case["batch_normalised"]:
        both = (first, Normalise(level=level))
        weight_N = corrected(algorithm(corrections=both), group.batch)
    expected = group.flat(case["weights"])
    torch.testing.assert_close(weight_N, expected, rtol=TOLERANCE, atol=TOLERANCE)


CHECKS = {
    "policy_loss": check_policy_loss,
    "advantage": check_advantage,
    "rejection": check_rejection,
    "correction_weights": check_correction_weights,
}


def test_every_recorded_variant_is_reproduced() -> None:
    """All cases of the file; a failure names the case."""
    seen = 0
    data = json.loads(shared_path("oracles/variants.json").read_text())
    for number, one in enumerate(data):
        group = Group.of(one)
        for index, case in enumerate(one["cases"]):
            try:
                CHECKS[case["kind"]](case, group)
            except AssertionError as error:
                words = {k: v for k, v in case.items() if isinstance(v, str | float | int)}
                raise AssertionError(f"group {number}, case {index}: {words}") from error
            seen += 1
    assert seen == COUNT
