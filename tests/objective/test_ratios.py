"""Importance ratios: MATH's sixth law, and which ratio passes which gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import ratios, surrogates, weights
from tests.objective import loops

RAGGED = st.lists(st.integers(1, 9), min_size=1, max_size=6)
EVERY = (ratios.token, ratios.sequence, ratios.sequence_token, ratios.sequence_product)


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


def test_the_unclipped_gradient_of_the_sequence_ratio() -> None:
    lengths = [3, 1, 5]
    new_N, old_N = loops.random(9, 1, 0.3).requires_grad_(), loops.random(9, 2, 0.3)
    lengths_S, advantage_S = loops.ints(lengths), loops.tensor([1.0, -0.5, 2.0])
    advantage_N = advantage_S.repeat_interleave(lengths_S)
    log_ratio_N = ratios.sequence(new_N, old_N, lengths_S)
    value_N = surrogates.unclipped(log_ratio_N, advantage_N, lengths_S)
    (weights.sequence_mean(lengths_S) * value_N).sum().backward()
    expected = []
    for part, advantage in zip(
        loops.split(new_N.detach() - old_N, lengths), advantage_S.tolist(), strict=True
    ):
        ratio = math.exp(sum(part) / len(part))
        expected += [advantage * ratio / (3 * len(part))] * len(part)
    loops.close(new_N.grad, expected)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", EVERY)
def test_on_policy_the_ratio_is_one_bitwise(ratio: object, dtype: torch.dtype) -> None:
    new_N = (loops.random(11, 1) * 5).to(dtype).requires_grad_()
    log_ratio_N = ratio(new_N, new_N.detach(), loops.ints([3, 1, 7]))  # type: ignore[operator]
    assert torch.equal(ratios.exponential(log_ratio_N), torch.ones(11, dtype=dtype))


def test_only_the_exponential_is_clamped() -> None:
    log_ratio_N = loops.tensor([50.0, -50.0, 20.0, 1.0])
    loops.close(
        ratios.exponential(log_ratio_N), [math.exp(20), math.exp(-20), math.exp(20), math.e], 1e-10
    )
    # A mean over ±50 is 0; had the terms been clamped first, −50 and 30 would not give −10.
    pair = ratios.sequence(loops.tensor([-50.0, 30.0]), loops.tensor([0.0, 0.0]), loops.ints([2]))
    loops.close(pair, [-10.0, -10.0])
