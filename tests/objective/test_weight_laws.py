"""Weights: MATH's eighth law, and what packing, cutting and permuting may not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.objective import ratios, segments, surrogates, weights
from tests.objective import loops

RAGGED = st.lists(st.integers(1, 9), min_size=1, max_size=8)
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


# ---------------- the order and the cut of a batch, ragged lengths

LENGTHS = [4, 1, 9, 2, 6, 3]


def surrogate_loss(ratio: str, kind: str, rows: list[int], weight_N: Tensor | None = None):  # type: ignore[no-untyped-def]
    """Loss and gradient (in the batch's own order) of some sequences of one fixed batch."""
    total, lengths_S = sum(LENGTHS), loops.ints(LENGTHS)
    new_N, old_N = loops.random(total, 1, 0.3).requires_grad_(), loops.random(total, 2, 0.3)
    advantage_S = loops.random(len(LENGTHS), 3)
    weight_N = KINDS[kind](lengths_S) if weight_N is None else weight_N
    index_N = segments.sequence_index(lengths_S)
    pick_N = torch.cat([torch.where(index_N == i)[0] for i in rows])
    own_S = loops.ints([LENGTHS[i] for i in rows])
    log_ratio_N = getattr(ratios, ratio)(new_N[pick_N], old_N[pick_N], own_S)
    value_N = surrogates.clip(log_ratio_N, advantage_S[index_N[pick_N]], own_S, low=0.2, high=0.28)
    loss = -(weight_N[pick_N] * value_N).sum()
    (gradient_N,) = torch.autograd.grad(loss, new_N)
    return loss.detach(), gradient_N


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token", "sequence_product"])
@pytest.mark.parametrize("kind", KINDS)
def test_permutation_and_cuts_change_nothing(ratio: str, kind: str) -> None:
    loss, gradient_N = surrogate_loss(ratio, kind, list(range(6)))
    for parts in ([[5, 3, 1, 0, 2, 4]], [[0, 2, 4], [1, 5, 3]], [[i] for i in range(6)]):
        shares = [surrogate_loss(ratio, kind, part) for part in parts]
        loops.close(sum(share for share, _ in shares), loss)
        loops.close(sum(g for _, g in shares), gradient_N)


@pytest.mark.parametrize("kind", ["sequence_mean", "token_mean"])
def test_a_mean_per_micro_batch_would_change_the_loss(kind: str) -> None:
    """The twin that is wrong: weights of each micro-batch alone, then the mean of the losses."""
    _, gradient_N = surrogate_loss("token", kind, list(range(6)))
    parts = [[0, 1], [2, 3, 4, 5]]
    twin_N = torch.zeros_like(gradient_N)
    for part in parts:
        own = torch.zeros(sum(LENGTHS), dtype=torch.float64)
        index_N = segments.sequence_index(loops.ints(LENGTHS))
        pick_N = torch.cat([torch.where(index_N == i)[0] for i in part])
        own[pick_N] = KINDS[kind](loops.ints([LENGTHS[i] for i in part])) / len(parts)
        twin_N += surrogate_loss("token", kind, part, own)[1]
    assert (twin_N - gradient_N).abs().max() > 1e-3
