"""Sums, copies and recurrences over ragged sequences, against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import segments
from tests.objective import loops

LENGTHS = st.lists(st.integers(0, 9), min_size=0, max_size=7)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 10_000))
def test_sums_and_copies_are_the_loops(lengths: list[int], seed: int) -> None:
    x_N, x_S = loops.random(sum(lengths), seed), loops.random(len(lengths), seed + 1)
    lengths_S = loops.ints(lengths)
    parts = loops.split(x_N, lengths)
    assert segments.sequence_index(lengths_S).tolist() == [
        i for i, length in enumerate(lengths) for _ in range(length)
    ]
    loops.close(segments.segment_sum(x_N, lengths_S), [sum(p) for p in parts])
    loops.close(segments.segment_mean(x_N, lengths_S), [sum(p) / max(len(p), 1) for p in parts])
    loops.close(
        segments.spread(x_S, lengths_S),
        loops.join([[x] * length for x, length in zip(x_S.tolist(), lengths, strict=True)]),
    )
    loops.close(
        segments.shift(x_N, lengths_S), loops.join([[*p[1:], 0.0][: len(p)] for p in parts])
    )
    loops.close(segments.to_go(x_N, lengths_S), loops.join([loops.to_go(p, 1.0) for p in parts]))
    assert segments.continues(lengths_S).tolist() == loops.join(
        [[True] * (length - 1) + [False] for length in lengths if length]
    )
    loops.close(
        segments.on_last(x_S, lengths_S),
        loops.join(
            [
                [0.0] * (length - 1) + [x]
                for x, length in zip(x_S.tolist(), lengths, strict=True)
                if length
            ]
        ),
    )


@settings(max_examples=40, deadline=None)
@given(
    total=st.integers(0, 70),
    seed=st.integers(0, 10_000),
    horizon=st.one_of(st.none(), st.integers(0, 80)),
)
def test_linear_recurrence_is_the_loop(total: int, seed: int, horizon: int | None) -> None:
    decay_N, input_N = loops.random(total, seed).tanh(), loops.random(total, seed + 1)
    decay_N = torch.where(decay_N.abs() < 0.2, 0.0, decay_N)
    expected = []
    for n in range(total):
        product, x = 1.0, 0.0
        for m in range(n, total if horizon is None else min(total, n + horizon)):
            x += product * float(input_N[m])
            product *= float(decay_N[m])
        expected.append(x)
    loops.close(segments.linear_recurrence(decay_N, input_N, horizon=horizon), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_crosses_a_decay_of_zero(poison: float) -> None:
    decay_N = loops.tensor([0.9, 0.0, 0.9, 0.9])
    input_N = loops.tensor([1.0, 2.0, 3.0, poison])
    out_N = segments.linear_recurrence(decay_N, input_N)
    loops.close(out_N[:2], [1 + 0.9 * 2, 2.0])
    assert not out_N[2:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_is_summed_alike_wherever_it_lies(dtype: torch.dtype) -> None:
    x_N = loops.random(37, 3).to(dtype)
    alone_N = segments.to_go(x_N, loops.ints([37]))
    alone = segments.segment_sum(x_N, loops.ints([37]))
    for before, after in [(1, 0), (5, 64), (200, 3)]:
        rest = [loops.random(before, 4).to(dtype), x_N, loops.random(after, 5).to(dtype)]
        lengths_S = loops.ints([before, 37, after])
        packed_N = segments.to_go(torch.cat(rest), lengths_S)
        assert torch.equal(packed_N[before : before + 37], alone_N)
        assert torch.equal(segments.segment_sum(torch.cat(rest), lengths_S)[1:2], alone)


def test_long_sums_are_exact_in_float32() -> None:
    """A difference of cumulative sums would lose the short sequence after the long one."""
    x_N = torch.cat([torch.full((100_000,), 1e4), torch.tensor([0.1, 0.2])])
    lengths_S = loops.ints([100_000, 2])
    loops.close(segments.to_go(x_N, lengths_S)[-2:], [0.3, 0.2], 1e-7)
    loops.close(segments.segment_sum(x_N, lengths_S)[-1:], [0.3], 1e-7)


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(RuntimeError):
        segments.segment_sum(torch.zeros(5), loops.ints([2, 2]))
    with pytest.raises(RuntimeError):
        segments.shift(torch.zeros(5), loops.ints([2, 2]))
