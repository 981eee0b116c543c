"""Value loss (MATH's ninth law), entropy, and the correction of an engine's log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from keel.objective import divergences, gae, ratios
from tests.objective import loops


@pytest.mark.parametrize(
    ("v", "old", "target", "loss", "slope", "clipped"),
    [
        # within the band: plain
        (1.1, 1.0, 2.0, 0.5 * 0.9**2, -0.9, False),
        # past the band towards the target: the clipped error is the larger one, no gradient
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0, True),
        (0.5, 1.0, 0.0, 0.5 * 0.8**2, 0.0, True),
        # past the band away from the target: the plain error is the larger one
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5, False),
        (1.5, 1.0, 0.0, 0.5 * 1.5**2, 1.5, False),
        # past the target by far: plain again
        (3.0, 1.0, 1.5, 0.5 * 1.5**2, 1.5, False),
    ],
)
def test_value_loss_table(
    v: float, old: float, target: float, loss: float, slope: float, clipped: bool
) -> None:
    value_N = loops.tensor([v]).requires_grad_()
    loss_N, clipped_N = gae.value_loss(
        value_N, loops.tensor([old]), loops.tensor([target]), clip=0.2
    )
    (slope_N,) = torch.autograd.grad(loss_N.sum(), value_N)
    loops.close(loss_N, [loss])
    loops.close(slope_N, [slope])
    assert clipped_N.tolist() == [clipped]


def test_a_wide_clip_is_half_the_squared_error() -> None:
    value_N, old_N, return_N = loops.random(20, 1), loops.random(20, 2), loops.random(20, 3)
    plain = 0.5 * (value_N - return_N) ** 2
    for clip in (1e6, None):
        loss_N, clipped_N = gae.value_loss(value_N, old_N, return_N, clip=clip)
        loops.close(loss_N, plain)
        assert not clipped_N.any()


def test_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, -1.0]], dtype=torch.float64)
    p = logits[1].softmax(-1).tolist()
    expected = [math.log(4), -sum(x * math.log(x) for x in p)]
    loops.close(divergences.entropy(logits), expected)
    ruled_out = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    out = divergences.entropy(ruled_out)
    (slope,) = torch.autograd.grad(out.sum(), ruled_out)
    loops.close(out, [math.log(2)])
    loops.close(slope, torch.zeros(1, 3))


LENGTHS = [2, 3]
ENGINE = loops.tensor([-1.0, -1.0, -2.0, -2.0, -2.0])
OLD = loops.tensor([-0.9, -3.0, -1.0, -2.0, -2.1])
TOKEN = [math.exp(d) for d in (OLD - ENGINE).tolist()]
WHOLE = [TOKEN[0] * TOKEN[1]] * 2 + [TOKEN[2] * TOKEN[3] * TOKEN[4]] * 3


def test_truncate() -> None:
    lengths_S = loops.ints(LENGTHS)
    token = ratios.truncate(ENGINE, OLD, lengths_S, level="token", cap=2.0)
    loops.close(token, [min(w, 2.0) for w in TOKEN])
    whole = ratios.truncate(ENGINE, OLD, lengths_S, level="sequence", cap=2.0)
    loops.close(whole, [min(w, 2.0) for w in WHOLE])


def test_mask() -> None:
    lengths_S = loops.ints(LENGTHS)
    band = {"floor": 0.5, "cap": 2.0}
    token = ratios.mask(ENGINE, OLD, lengths_S, level="token", **band)
    loops.close(token, [w if 0.5 <= w <= 2 else 0.0 for w in TOKEN])
    assert (token == 0).tolist() == [False, True, True, False, False]
    whole = ratios.mask(ENGINE, OLD, lengths_S, level="sequence", **band)
    loops.close(whole, [w if 0.5 <= w <= 2 else 0.0 for w in WHOLE])
    edge = ratios.mask(
        torch.zeros(2), torch.zeros(2), loops.ints([2]), level="token", floor=1.0, cap=1.0
    )
    assert edge.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_without_mismatch_is_one_and_has_no_gradient(level: str) -> None:
    for dtype in (torch.float32, torch.float64):
        same, lengths_S = loops.random(5, 1).to(dtype), loops.ints(LENGTHS)
        ones = torch.ones(5, dtype=dtype)
        truncated = ratios.truncate(same, same, lengths_S, level=level, cap=2.0)  # type: ignore[arg-type]
        masked = ratios.mask(same, same, lengths_S, level=level, floor=0.5, cap=2.0)  # type: ignore[arg-type]
        assert torch.equal(truncated, ones)
        assert torch.equal(masked, ones)
    old_N = OLD.clone().requires_grad_()
    assert not ratios.truncate(ENGINE, old_N, lengths_S, level=level, cap=2.0).requires_grad  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "wanted"), [([1.0, 2.0, 4.0], 1.0), ([3.0, 3.0, 3.0], 0.0), ([2.0, 1.0, -1.0], -3.0)]
)
def test_explained_variance_is_the_share_of_the_returns_variance(
    values: list[float], wanted: float
) -> None:
    return_N = torch.tensor([3.0, 4.0, 6.0], dtype=torch.float64)
    found = gae.explained_variance(torch.tensor(values, dtype=torch.float64), return_N)
    assert found == pytest.approx(wanted, abs=1e-12)
    assert gae.explained_variance(return_N, torch.ones(3)) == 0.0  # returns that do not vary
