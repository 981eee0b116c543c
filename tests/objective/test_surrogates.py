"""Surrogates: each function against its loop, and its gradient where it may end."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import ratios, surrogates, weighted
from tests.objective import loops


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 2.0),
    dual=st.one_of(st.none(), st.floats(1.1, 4.0)),
)
def test_values_are_the_loops(seed: int, low: float, high: float, dual: float | None) -> None:
    lengths = [3, 1, 5]
    log_ratio_N, advantage_N = loops.random(9, seed), loops.random(9, seed + 1)
    log_prob_N, lengths_S = loops.random(9, seed + 2), loops.ints(lengths)
    arguments = (log_ratio_N, advantage_N, lengths_S)
    rows = list(zip(log_ratio_N.exp().tolist(), advantage_N.tolist(), strict=True))
    loops.close(surrogates.unclipped(*arguments), [r * a for r, a in rows])
    loops.close(weighted.log_prob(*arguments), log_ratio_N * advantage_N)
    loops.close(
        surrogates.clip(*arguments, low=low, high=high, dual=dual),
        [loops.clip(r, a, low, high, dual) for r, a in rows],
    )
    loops.close(
        weighted.cispo(*arguments, log_prob_N=log_prob_N, cap=1 + high, floor=1 - low),
        [
            min(max(r, 1 - low), 1 + high) * a * x
            for (r, a), x in zip(rows, log_prob_N.tolist(), strict=True)
        ],
    )
    loops.close(
        surrogates.sapo(*arguments, temperature_positive=1.3, temperature_negative=2.1),
        [
            4 / t / (1 + math.exp(-t * (r - 1))) * a
            for r, a in rows
            for t in [1.3 if a > 0 else 2.1]
        ],
    )
    advantage_S = loops.random(3, seed + 3)
    out_N = surrogates.geometric(
        log_ratio_N, advantage_S.repeat_interleave(lengths_S), lengths_S, low=low, high=high
    )
    loops.close(
        out_N,
        loops.join(
            [
                [loops.geometric(part, a, low, high)] * len(part)
                for part, a in zip(
                    loops.split(log_ratio_N, lengths), advantage_S.tolist(), strict=True
                )
            ]
        ),
    )


def test_cispo_never_loses_a_gradient() -> None:
    log_ratio_N = loops.tensor([3.0, -3.0]).requires_grad_()
    log_prob_N = loops.tensor([-1.0, -2.0]).requires_grad_()
    weighted.cispo(
        log_ratio_N, loops.tensor([2.0, 2.0]), loops.ints([2]), log_prob_N=log_prob_N, cap=5.0
    ).sum().backward()
    assert log_ratio_N.grad is None
    loops.close(log_prob_N.grad, [10.0, 2 * math.exp(-3)])


EVERY = {
    "ppo": (ratios.token, lambda x: surrogates.clip(**x, low=0.2, high=0.2)),
    "dual": (ratios.token, lambda x: surrogates.clip(**x, low=0.2, high=0.28, dual=3.0)),
    "unclipped": (ratios.token, lambda x: surrogates.unclipped(**x)),
    "gspo": (ratios.sequence, lambda x: surrogates.clip(**x, low=3e-4, high=4e-4)),
    "gspo_token": (ratios.sequence_token, lambda x: surrogates.clip(**x, low=3e-4, high=4e-4)),
    "sapo": (
        ratios.token,
        lambda x: surrogates.sapo(**x, temperature_positive=1.0, temperature_negative=1.05),
    ),
    "gmpo": (ratios.token, lambda x: surrogates.geometric(**x, low=0.4, high=0.4)),
    "reinforce": (ratios.none, lambda x: weighted.log_prob(**x)),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("distance", [0.0, 0.5, -0.5, 50.0, -50.0])
def test_no_advantage_no_gradient_and_always_finite(name: str, distance: float) -> None:
    for dtype in (torch.float32, torch.float64):
        for advantage in (0.0, 1.0, -1.0):
            new_N = torch.full((3,), distance, dtype=dtype, requires_grad=True)
            ratio, surrogate = EVERY[name]
            lengths_S, advantage_N = loops.ints([3]), torch.full((3,), advantage, dtype=dtype)
            log_ratio_N = ratio(new_N, torch.zeros(3, dtype=dtype), lengths_S)
            value_N = surrogate(
                {"log_ratio_N": log_ratio_N, "advantage_N": advantage_N, "lengths_S": lengths_S}
            )
            (gradient_N,) = torch.autograd.grad(value_N.sum(), new_N)
            assert value_N.isfinite().all()
            assert gradient_N.isfinite().all()
            if advantage == 0.0:
                assert gradient_N.tolist() == [0.0] * 3
