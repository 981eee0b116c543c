"""Every case of the outside numbers (TRL 1.16.0, verl 0.9.1), in loss and in gradient.

They come padded, (B, T) with a mask; here they are flattened, and gradients laid back. 1e-8 is
what two programs agree to that put 1e-8 into some of their denominators.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.objective import (
    divergences,
    gae,
    group,
    ratios,
    segments,
    surrogates,
    value,
    weights,
    whitening,
)
from tests.objective import loops
from tests.shared import oracle_cases

TOLERANCE = 1e-8
Case = dict[str, Any]


def _load() -> list[Any]:
    """One parameter a case; where the file is absent one, that skips with the reason."""
    try:
        batches = json.loads(oracle_cases().read_text())
    except pytest.skip.Exception as absent:
        return [pytest.param(None, None, id="absent", marks=pytest.mark.skip(reason=str(absent)))]
    return [
        pytest.param(batch, case, id=_name(batch, case, number))
        for batch in batches
        for number, case in enumerate(batch["cases"])
    ]


def _name(batch: Case, case: Case, number: int) -> str:
    what = case.get("name") or case.get("loss_type") or case.get("estimator") or ""
    return f"seed{batch['seed']}-{number:02d}-{case['source']}-{case['kind']}-{what}"


def flat(batch: Case, padded: Any) -> Tensor:
    """(B, T) under the mask, or one number a sequence, as one number a token."""
    x, mask = loops.tensor(padded), torch.tensor(batch["mask"]).bool()
    return segments.spread(x, loops.ints(batch["lengths"])) if x.dim() == 1 else x[mask]


def check(actual: Tensor, expected: Any) -> None:
    expected = expected if isinstance(expected, Tensor) else loops.tensor(expected)
    torch.testing.assert_close(actual.detach(), expected, atol=TOLERANCE, rtol=0.0)


def outside_is_zero(batch: Case, padded: Any) -> None:
    off = ~torch.tensor(batch["mask"]).bool()
    assert (loops.tensor(padded)[off] == 0).all()


# ---------------- losses of a policy


def trl_surrogate(case: Case, signals: dict[str, Tensor], log_prob_N: Tensor) -> Tensor:
    match case["loss_type"]:
        case "cispo":
            return surrogates.cispo(**signals, log_prob_N=log_prob_N, cap=case["eps_high"])
        case "sapo":
            positive, negative = case["sapo_temperatures"]
            return surrogates.sapo(
                **signals, temperature_positive=positive, temperature_negative=negative
            )
        case "grpo" | "dr_grpo" | "dapo":
            return surrogates.clip(**signals, low=case["eps_low"], high=case["eps_high"])
    raise AssertionError(f"unknown loss type {case['loss_type']!r}")


def verl_surrogate(case: Case, signals: dict[str, Tensor], log_prob_N: Tensor) -> Tensor:
    low, high = case["eps_low"], case["eps_high"]
    match case["name"]:
        case "vanilla":
            return surrogates.clip(**signals, low=low, high=high, dual=case["dual_clip"])
        case "gspo":
            return surrogates.clip(**signals, low=low, high=high)
        case "geo_mean":
            return surrogates.geometric(**signals, low=low, high=high)
        case "cispo":
            return surrogates.cispo(**signals, log_prob_N=log_prob_N, floor=1 - low, cap=1 + high)
        case "sapo":
            return surrogates.sapo(**signals, temperature_positive=1.0, temperature_negative=1.05)
        case "gpg":
            return surrogates.log_prob(**signals)
    raise AssertionError(f"unknown loss {case['name']!r}")


def ratio_of(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if case["source"] == "trl":
        return {"token": ratios.token, "sequence": ratios.sequence}[case["ratio"]]
    return {"gspo": ratios.sequence_token, "gpg": ratios.none}.get(case["name"], ratios.token)


def weights_of(case: Case, lengths_S: Tensor) -> Tensor:
    if case.get("dr_grpo_length"):
        return weights.constant(lengths_S, constant=case["dr_grpo_length"])
    kind = case["aggregate"] if case["source"] == "verl" else case["loss_type"]
    return {
        "grpo": weights.sequence_mean,
        "sapo": weights.sequence_mean,
        "dapo": weights.token_mean,
        "cispo": weights.token_mean,
        "token-mean": weights.token_mean,
        "seq-mean-token-mean": weights.sequence_mean,
        "seq-mean-token-sum": weights.sequence_sum,
    }[kind](lengths_S)


def policy_loss(batch: Case, case: Case) -> None:
    new = loops.tensor(batch["new_logprobs"]).requires_grad_()
    mask, lengths_S = torch.tensor(batch["mask"]).bool(), loops.ints(batch["lengths"])
    log_prob_N = new[mask]
    signals = {
        "log_ratio_N": ratio_of(case)(log_prob_N, flat(batch, batch["old_logprobs"]), lengths_S),
        "advantage_N": flat(batch, case["advantages"]),
        "lengths_S": lengths_S,
    }
    surrogate = trl_surrogate if case["source"] == "trl" else verl_surrogate
    value_N = surrogate(case, signals, log_prob_N)
    if case.get("beta"):
        assert case["kl"] == "k3"
        reference_N = flat(batch, batch["ref_logprobs"])
        value_N = value_N - case["beta"] * divergences.k3(log_prob_N, reference_N)
    loss = -(weights_of(case, lengths_S) * value_N).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    check(loss, case["loss"])
    check(gradient, case["grad"])


# ---------------- advantages, divergences, values


def group_relative(batch: Case, case: Case) -> None:
    out = group.group_relative(
        loops.tensor(case["rewards"]), loops.ints(case["groups"]), scale="std", epsilon=case["eps"]
    )
    check(out, case["advantages"])


def advantage(batch: Case, case: Case) -> None:
    reward_S, ids_S = loops.tensor(case["rewards"]), loops.ints(case["groups"])
    lengths_S = loops.ints(batch["lengths"])
    no_penalty_N = torch.zeros(int(lengths_S.sum()), dtype=torch.float64)
    plus = (reward_S, no_penalty_N, ids_S, lengths_S)
    outside_is_zero(batch, case["advantages"])
    match case["name"]:
        case "grpo":
            out = group.group_relative(reward_S, ids_S, scale="std", epsilon=case["eps"])
        case "rloo":
            out = group.leave_one_out(reward_S, ids_S)
        case "opo":
            out = group.optimal(reward_S, ids_S, lengths_S)
        case "remax":
            out = group.greedy_baseline(reward_S, torch.full_like(reward_S, case["baseline"]))
        case "reinforce_plus_plus":
            out = group.batch_normalised(*plus, gamma=case["gamma"])
        case "reinforce_plus_plus_baseline":
            out = group.batch_normalised(*plus, group_baseline=True)
        case other:
            raise AssertionError(f"unknown advantage {other!r}")
    out_N = segments.spread(out, lengths_S) if out.shape == reward_S.shape else out
    check(out_N, flat(batch, case["advantages"]))


def gae_whitened(batch: Case, case: Case) -> None:
    lengths_S = loops.ints(batch["lengths"])
    reward_N, value_N = flat(batch, case["token_rewards"]), flat(batch, case["values"])
    next_N = segments.shift(value_N, lengths_S)
    delta_N = gae.td_error(reward_N, value_N, next_N, gamma=case["gamma"])
    advantage_N = gae.gae(
        delta_N, segments.continues(lengths_S), gamma=case["gamma"], lam=case["lam"]
    )
    check(gae.returns(advantage_N, value_N), flat(batch, case["returns"]))
    check(whitening.whiten(advantage_N, epsilon=1e-8), flat(batch, case["advantages"]))


def kl(batch: Case, case: Case) -> None:
    estimator = {
        "k1": divergences.k1,
        "k2": divergences.k2,
        "k3": divergences.k3,
        "abs": divergences.absolute,
    }[case["estimator"]]
    out_N = estimator(flat(batch, batch["new_logprobs"]), flat(batch, batch["ref_logprobs"]))
    check(out_N, flat(batch, case["values"]))


def value_loss(batch: Case, case: Case) -> None:
    predicted = loops.tensor(case["predicted"]).requires_grad_()
    lengths_S = loops.ints(batch["lengths"])
    loss_N, clipped_N = value.value_loss(
        predicted[torch.tensor(batch["mask"]).bool()],
        flat(batch, case["old_values"]),
        flat(batch, case["returns"]),
        clip=case["clip"],
    )
    weight_N = weights.token_mean(lengths_S)
    loss = (weight_N * loss_N).sum()
    (gradient,) = torch.autograd.grad(loss, predicted)
    check(loss, case["loss"])
    check((weight_N * clipped_N).sum(), case["clipped_fraction"])
    check(gradient, case["grad"])


KINDS: dict[str, Callable[[Case, Case], None]] = {
    "group_relative": group_relative,
    "policy_loss": policy_loss,
    "gae_whitened": gae_whitened,
    "advantage": advantage,
    "kl": kl,
    "value_loss": value_loss,
}
CASES = _load()


@pytest.mark.parametrize(("batch", "case"), CASES)
def test_oracle(batch: Case, case: Case) -> None:
    KINDS[case["kind"]](batch, case)


def test_no_oracle_kind_is_unknown() -> None:
    batches = json.loads(oracle_cases().read_text())
    found = {(case["kind"], case["source"]) for batch in batches for case in batch["cases"]}
    assert found
    assert {kind for kind, _ in found} <= set(KINDS)
    assert {source for _, source in found} <= {"trl", "verl"}
