"""ℓ_old between the policy and the one that sampled, by how far that is behind."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from keel.algorithms.corrections import Truncate
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from tests.learn.flat import Sample, gradient, per_sequence, sample

LENGTHS = (3, 1, 4, 2)
LAGS = (0, 1, 2, 3)
CAP = 1.05
GRPO = PRESETS["grpo"].algorithm.model_copy(
    update={"divergence": None, "corrections": (Truncate(cap=CAP),)}
)


def made(lags: tuple[int, ...]) -> Sample:
    own = per_sequence(sample(LENGTHS, (0, 0, 1, 1), 8, shift=1.0))
    return replace(own, batch=replace(own.batch, old_log_prob_N=None, lags=lags))


def by_loops(one: Sample) -> tuple[float, list[float]]:
    """Loss and its gradient in the log-probs, from numbers."""
    at, total, grads = 0, 0.0, []
    for length, lag in zip(LENGTHS, one.batch.lags, strict=True):
        alpha = 1 / max(lag, 1)
        for _ in range(length):
            now, engine = one.log_prob_N[at].item(), one.batch.engine_log_prob_N[at].item()
            gain = one.estimates.advantage_N[at].item()
            old = alpha * engine + (1 - alpha) * now
            ratio, weight = math.exp(now - old), min(math.exp(old - engine), CAP)
            whole, cut = ratio * gain, min(max(ratio, 0.8), 1.2) * gain
            share = weight / (len(LENGTHS) * length)
            total -= share * min(whole, cut)
            grads.append(-share * whole if whole <= cut else 0.0)
            at += 1
    return total, grads


def test_loss_and_gradient_are_those_of_loops() -> None:
    one = made(LAGS)
    total, grads = by_loops(one)
    for parts in ([[0, 1, 2, 3]], [[2, 0], [3], [1]]):
        found, gradient_N = gradient(GRPO, one, parts)
        assert found.item() == pytest.approx(total, abs=1e-14)
        assert gradient_N[: sum(LENGTHS)].tolist() == pytest.approx(grads, abs=1e-14)
    assert 0.0 in grads  # a token is clipped


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "gmpo"])
def test_at_most_one_update_behind_is_the_engines_bitwise(name: str) -> None:
    own = PRESETS[name].algorithm.model_copy(update={"divergence": None})
    weighed: Algorithm = own.model_copy(update={"corrections": (Truncate(),)})
    one = made((1, 0, 1, 0))
    batch = replace(one.batch, old_log_prob_N=one.batch.engine_log_prob_N, lags=())
    found = gradient(weighed, one, [[0, 1, 2, 3]])
    for value, expected in zip(found, gradient(own, replace(one, batch=batch), [[0, 1, 2, 3]]),
                               strict=True):  # fmt: skip
        assert torch.equal(value, expected)
