"""Weights for an engine whose log-probabilities are not the trainer's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import corrections
from tests.objective import loops

LENGTHS = [2, 3]
ENGINE = loops.tensor([-1.0, -1.0, -2.0, -2.0, -2.0])
OLD = loops.tensor([-0.9, -3.0, -1.0, -2.0, -2.1])
TOKEN = [math.exp(d) for d in (OLD - ENGINE).tolist()]
WHOLE = [TOKEN[0] * TOKEN[1]] * 2 + [TOKEN[2] * TOKEN[3] * TOKEN[4]] * 3


def test_effective_sample_size_is_the_share_of_equal_weights() -> None:
    """k of N tokens with all the weight are worth k/N; equal weights of any size are worth all."""
    share = corrections.effective_sample_size(loops.tensor([1.0, 1.0] + [1e-9] * 6))
    loops.close(share, 0.25, 1e-7)
    loops.close(corrections.effective_sample_size(loops.tensor([3.0] * 5)), 1.0)
    log_N = loops.random(7, 3)
    rho = [math.exp(x) for x in log_N.tolist()]
    wanted = sum(rho) ** 2 / (7 * sum(x * x for x in rho))
    assert wanted < 0.95
    loops.close(corrections.effective_sample_size(log_N.exp()), wanted)


def test_distances_of_engine_and_trainer_are_the_loops() -> None:
    rho = loops.tensor(TOKEN)
    loops.close(corrections.chi_squared(rho), sum(w * w for w in TOKEN) / 5 - 1)
    loops.close(corrections.chi_squared(torch.ones(3)), 0.0)
    gaps = loops.split(ENGINE - OLD, LENGTHS)
    wanted = sum(math.exp(sum(g) / len(g)) for g in gaps) / 2
    found = corrections.perplexity_ratio(ENGINE, OLD, loops.ints(LENGTHS))
    loops.close(found, wanted)


def test_truncate() -> None:
    lengths_S = loops.ints(LENGTHS)
    token = corrections.truncate(ENGINE, OLD, lengths_S, level="token", cap=2.0)
    loops.close(token, [min(w, 2.0) for w in TOKEN])
    whole = corrections.truncate(ENGINE, OLD, lengths_S, level="sequence", cap=2.0)
    loops.close(whole, [min(w, 2.0) for w in WHOLE])


def test_mask() -> None:
    lengths_S = loops.ints(LENGTHS)
    band = {"floor": 0.5, "cap": 2.0}
    token = corrections.mask(ENGINE, OLD, lengths_S, level="token", **band)
    loops.close(token, [w if 0.5 <= w <= 2 else 0.0 for w in TOKEN])
    assert (token == 0).tolist() == [False, True, True, False, False]
    whole = corrections.mask(ENGINE, OLD, lengths_S, level="sequence", **band)
    loops.close(whole, [w if 0.5 <= w <= 2 else 0.0 for w in WHOLE])
    edge = corrections.mask(
        torch.zeros(2), torch.zeros(2), loops.ints([2]), level="token", floor=1.0, cap=1.0
    )
    assert edge.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_without_mismatch_is_one_and_has_no_gradient(level: str) -> None:
    for dtype in (torch.float32, torch.float64):
        same, lengths_S = loops.random(5, 1).to(dtype), loops.ints(LENGTHS)
        ones = torch.ones(5, dtype=dtype)
        truncated = corrections.truncate(same, same, lengths_S, level=level, cap=2.0)  # type: ignore[arg-type]
        masked = corrections.mask(same, same, lengths_S, level=level, floor=0.5, cap=2.0)  # type: ignore[arg-type]
        assert torch.equal(truncated, ones)
        assert torch.equal(masked, ones)
    old_N = OLD.clone().requires_grad_()
    assert not corrections.truncate(ENGINE, old_N, lengths_S, level=level, cap=2.0).requires_grad  # type: ignore[arg-type]


# ---------------- masks and statistics, against loops

RAGGED = st.lists(st.integers(1, 9), min_size=1, max_size=6)
STATISTICS = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}
OVER = {"sum": sum, "mean": lambda k: sum(k) / len(k), "max": max}


def kept(values: list[float], statistic: str, floor: float, cap: float) -> list[bool]:
    if statistic == "k1":
        return [floor <= math.exp(v) <= cap for v in values]
    return [v <= cap for v in values]


@settings(max_examples=20, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 1000))
def test_masks_are_the_loops(lengths: list[int], seed: int) -> None:
    engine_N = loops.random(sum(lengths), seed)
    old_N = engine_N + loops.random(sum(lengths), seed + 1, 0.3)
    lengths_S = loops.ints(lengths)
    parts = loops.split(old_N - engine_N, lengths)
    for statistic, k in STATISTICS.items():
        for over in ("token", *OVER):
            bounds: Any = {"statistic": statistic, "over": over, "floor": 0.9, "cap": 1.1}
            if statistic != "k1":
                bounds["cap"] = 0.04
            found = corrections.reject(engine_N, old_N, lengths_S, **bounds)
            values = loops.join(
                [[k(x) for x in p] if over == "token" else [OVER[over]([k(x) for x in p])] * len(p)
                 for p in parts]
            )  # fmt: skip
            assert found.tolist() == kept(values, statistic, bounds["floor"], bounds["cap"])
    means = loops.join([[math.exp(sum(p) / len(p))] * len(p) for p in parts])
    geometric = corrections.geometric_mask(engine_N, old_N, lengths_S, floor=0.9, cap=1.1)
    assert geometric.tolist() == [0.9 <= m <= 1.1 for m in means]
    outliers = corrections.outlier_mask(engine_N, old_N, lengths_S, floor=0.7, cap=1.5)
    inside = [[all(0.7 <= math.exp(x) <= 1.5 for x in p)] * len(p) for p in parts]
    assert outliers.tolist() == [x for part in inside for x in part]


def test_normalised_weights_have_mean_one() -> None:
    """Over tokens, or over sequences, each of which counts once whatever its length."""
    lengths_S, weight_N = loops.ints([1, 3]), loops.tensor([2.0, 1.0, 0.0, 2.0])
    token = corrections.normalise(weight_N, lengths_S, level="token")
    loops.close(token, [w / 1.25 for w in (2.0, 1.0, 0.0, 2.0)])
    whole = corrections.normalise(weight_N, lengths_S, level="sequence")
    loops.close(whole, [w / 1.5 for w in (2.0, 1.0, 0.0, 2.0)])
    nothing = corrections.normalise(torch.zeros(4), lengths_S, level="token")
    assert nothing.tolist() == [0.0] * 4


def test_weight_is_bounded_and_has_no_gradient() -> None:
    old_N = loops.tensor([50.0, -1.0]).requires_grad_()
    found = corrections.weight(loops.tensor([0.0, -1.0]), old_N, loops.ints([2]), level="token")
    loops.close(found, [math.exp(20), 1.0])
    assert not found.requires_grad
