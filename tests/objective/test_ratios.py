"""Importance ratios (which passes which gradient) and weights of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.objective import ratios, surrogates, weights
from tests.objective import loops

RAGGED = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 1000))
def test_values_are_the_loops(lengths: list[int], seed: int) -> None:
    new_N, old_N = loops.random(sum(lengths), seed), loops.random(sum(lengths), seed + 1)
    lengths_S = loops.ints(lengths)
    parts = loops.split(new_N - old_N, lengths)
    mean = loops.join([[sum(p) / len(p)] * len(p) for p in parts])
    loops.close(ratios.token(new_N, old_N, lengths_S), loops.join(parts))
    loops.close(ratios.sequence(new_N, old_N, lengths_S), mean)
    loops.close(ratios.sequence_token(new_N, old_N, lengths_S), mean)
    product = loops.join([[sum(p)] * len(p) for p in parts])
    loops.close(ratios.sequence_product(new_N, old_N, lengths_S), product)
    assert ratios.none(new_N, old_N, lengths_S) is new_N


def test_log_linear_lies_between_the_policies() -> None:
    now_N, engine_N = loops.random(5, 1).requires_grad_(), loops.random(5, 2)
    lag_N = loops.tensor([0.0, 1.0, 2.0, 3.0, 7.0])
    old_N = ratios.log_linear(now_N, engine_N, lag_N)
    assert not old_N.requires_grad
    shares = [1.0, 1.0, 1 / 2, 1 / 3, 1 / 7]
    pairs = zip(now_N.tolist(), engine_N.tolist(), shares, strict=True)
    loops.close(old_N, [(1 - share) * now + share * engine for now, engine, share in pairs])
    assert old_N[:2].tolist() == engine_N[:2].tolist()


def gradient(ratio: object, advantage_N: torch.Tensor) -> torch.Tensor:
    new_N, old_N = loops.random(9, 3, 0.3).requires_grad_(), loops.random(9, 4, 0.3)
    lengths_S = loops.ints([4, 5])
    log_ratio_N = ratio(new_N, old_N, lengths_S)  # type: ignore[operator]
    value_N = surrogates.unclipped(log_ratio_N, advantage_N, lengths_S)
    (weights.sequence_mean(lengths_S) * value_N).sum().backward()
    return new_N.grad


def test_sequence_token_equals_sequence_only_for_constant_advantages() -> None:
    constant_N = loops.tensor([2.0] * 4 + [-1.0] * 5)
    loops.close(gradient(ratios.sequence_token, constant_N), gradient(ratios.sequence, constant_N))
    varied_N = loops.random(9, 5)
    difference = gradient(ratios.sequence_token, varied_N) - gradient(ratios.sequence, varied_N)
    assert difference.abs().max() > 1e-3


def test_only_the_exponential_is_clamped() -> None:
    log_ratio_N = loops.tensor([50.0, -50.0, 20.0, 1.0])
    loops.close(
        ratios.exponential(log_ratio_N), [math.exp(20), math.exp(-20), math.exp(20), math.e], 1e-10
    )
    # A mean over ±50 is 0; had the terms been clamped first, −50 and 30 would not give −10.
    pair = ratios.sequence(loops.tensor([-50.0, 30.0]), loops.tensor([0.0, 0.0]), loops.ints([2]))
    loops.close(pair, [-10.0, -10.0])


# ---------------- weights

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sequence_mean": weights.sequence_mean,
    "token_mean": weights.token_mean,
    "constant": lambda lengths_S: weights.constant(lengths_S, constant=16),
    "sequence_sum": weights.sequence_sum,
}


@settings(max_examples=20, deadline=None)
@given(lengths=RAGGED)
def test_weights_are_the_loops_and_sum_to_what_they_say(lengths: list[int]) -> None:
    lengths_S, size, total = loops.ints(lengths), len(lengths), sum(lengths)
    each = {
        "sequence_mean": [1 / (size * n) for n in lengths],
        "token_mean": [1 / total] * size,
        "constant": [1 / (size * 16)] * size,
        "sequence_sum": [1 / size] * size,
    }
    sums = {
        "sequence_mean": 1.0,
        "token_mean": 1.0,
        "constant": total / (size * 16),
        "sequence_sum": total / size,
    }
    for kind, function in KINDS.items():
        weight_N = function(lengths_S)
        loops.close(
            weight_N, loops.join([[w] * n for w, n in zip(each[kind], lengths, strict=True)])
        )
        loops.close(weight_N.sum(), torch.tensor(sums[kind], dtype=torch.float64))


def test_no_sequences_and_empty_sequences() -> None:
    assert all(function(loops.ints([])).shape == (0,) for function in KINDS.values())
    assert all(function(loops.ints([0, 2])).isfinite().all() for function in KINDS.values())
    loops.close(weights.sequence_mean(loops.ints([0, 2])), [0.25, 0.25])
