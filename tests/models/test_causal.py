"""Compiled attention against a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keel.kernels import causal as kernel
from keel.models import causal
from keel.models.attention import Rules
from keel.models.layout import PackedLayout
from tests.engines.test_decoding import poison
from tests.models.test_attention import LAYOUTS, each_by_hand

LONG = {
    # Beyond the queries (64) and keys (256) that are taken at a time, and not by whole panels.
    "longer than a block": ([290, 70, 1], []),
    "a long prompt": ([270, 3, 66, 1], [-1, 0, 0, 0]),
}
SHAPES = {"grouped": (4, 2, 32), "apart": (2, 2, 64), "one key head": (3, 1, 96)}


def leaves(tokens: int, shape: tuple[int, int, int], seed: int = 0) -> list[Tensor]:
    heads, shared, width = shape
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, count, width, generator=generator).requires_grad_()
        for count in (heads, shared, shared)
    ]


def by_loop(lengths: list[int], follows: list[int], heads: list[Tensor], rules: Rules) -> Tensor:
    return each_by_hand(lengths, follows, tuple(x.transpose(0, 1)[None] for x in heads), rules)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)
def test_forward_and_backward_equal_a_loop(
    made: tuple[list[int], list[int]],
    shape: tuple[int, int, int],
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison(monkeypatch)
    compare(made, shape, window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("made", LONG.values(), ids=LONG)
def test_blocks_join(made: tuple[list[int], list[int]], window: int | None) -> None:
    compare(made, SHAPES["grouped"], window)


def compare(
    made: tuple[list[int], list[int]], shape: tuple[int, int, int], window: int | None
) -> None:
    lengths, follows = made
    given, rules = leaves(sum(lengths), shape), Rules(0.3, window)
    assert causal.applies(*given, rules)
    out = PackedLayout(lengths, follows).attend_tokens(*given, rules)
    exact = [x.detach().double().requires_grad_() for x in given]
    want = by_loop(lengths, follows, exact, rules)
    # float32 sums of some hundred terms of size 1.
    torch.testing.assert_close(out.double(), want, rtol=0, atol=4e-6)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((out * weight).sum(), given)
    wanted = torch.autograd.grad((want * weight).sum(), exact)
    for grad, other in zip(grads, wanted, strict=True):
        # Where a token sees itself alone, it is what is left of numbers of size 10 and more.
        atol = 1e-5 * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(grad.double(), other, rtol=0, atol=atol)


def test_threads_change_no_bit() -> None:
    lengths, follows = LONG["a long prompt"]
    given = leaves(sum(lengths), SHAPES["grouped"])
    found: list[tuple[Tensor, ...]] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = PackedLayout(lengths, follows).attend_tokens(*given, Rules(0.3))
            found.append((out.detach(), *torch.autograd.grad(out.square().sum(), given)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_heads_need_not_lie_in_a_row() -> None:
    """As transformers hands them over: heads first, tokens inside."""
    lengths, rules = [5, 7], Rules(0.3)
    given = leaves(12, SHAPES["grouped"])
    moved = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]
    assert not moved[0].is_contiguous()
    one, other = (PackedLayout(lengths).attend_tokens(*x, rules) for x in (given, moved))
    assert torch.equal(one, other)
    seed = torch.ones_like(one).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(*(torch.autograd.grad(x, given[0], seed)[0] for x in (one, other)))


@pytest.mark.parametrize("view", ["query", "key", "value", "all"])
def test_queries_keys_and_values_may_be_parts_of_one_tensor(view: str) -> None:
    given = leaves(24, SHAPES["grouped"])
    parts = torch.cat([x.detach() for x in given], 1).split_with_sizes([4, 2, 2], 1)
    names = ("query", "key", "value")
    strided = [
        (part if view in ("all", name) else part.contiguous()).detach().requires_grad_()
        for name, part in zip(names, parts, strict=True)
    ]
    outs, slopes = [], []
    for x in (given, strided):
        outs.append(PackedLayout([17, 7], [-1, 0]).attend_tokens(*x, Rules(0.3)))
        slopes.append(torch.autograd.grad(outs[-1].square().sum(), x))
    assert torch.equal(*outs)
    assert all(map(torch.equal, *slopes))


def test_no_more_room_is_used_than_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    behind: list[Tensor] = []

    def guarded(query: Tensor, plan: kernel.Plan) -> Tensor:
        size = plan.room(query.shape[-1])
        whole = torch.full((size + 4096,), 7.5)
        behind.append(whole[size:])
        return whole[:size].view(1, size)

    monkeypatch.setattr(kernel, "_room", guarded)
    given = leaves(2 * 577, (1, 1, 32))
    out = PackedLayout([577, 577], [-1, 0]).attend_tokens(*given, Rules(0.3))
    torch.autograd.grad(out.sum(), given)
    assert len(behind) == 2
    assert all((numbers == 7.5).all() for numbers in behind)


def test_a_weight_that_is_next_to_nothing_is_not_rounded_up() -> None:
    query, key, value = (torch.zeros(2, 1, 32) for _ in range(3))
    query[:, 0, 0], key[0, 0, 0], value[0] = 1, -95.0, 1e38
    out = PackedLayout([2]).attend_tokens(query, key, value, Rules(1.0))
    want = torch.tensor(-95.0).double().exp() * 1e38
    # e^-95 is subnormal in float32, of which 11 bits are left.
    torch.testing.assert_close(out[1, 0, 0].double(), want, rtol=1e-3, atol=0)


def test_what_is_no_number_stays_none() -> None:
    for bad in (float("nan"), float("inf")):
        given = [x.detach() for x in leaves(9, SHAPES["grouped"])]
        given[1][3] = bad
        out = PackedLayout([9]).attend_tokens(*given, Rules(0.3))
        assert out[:3].isfinite().all()
        assert not out[3:].isfinite().any(dim=-1).any()


@pytest.mark.parametrize(
    ("dtype", "width", "rules"),
    [
        (torch.float64, 32, {}),
        (torch.bfloat16, 32, {}),
        (torch.float32, 48, {}),
        (torch.float32, 32, {"softcap": 2.0}),
        (torch.float32, 32, {"sinks": torch.zeros(4)}),
    ],
)
def test_the_rest_goes_elsewhere(dtype: torch.dtype, width: int, rules: dict[str, Any]) -> None:
    given = [x.to(dtype) for x in leaves(4, (4, 2, width))]
    assert not causal.applies(*given, Rules(0.3, **rules))


def test_values_of_another_width_go_elsewhere() -> None:
    query, key, value = leaves(4, (4, 2, 32))
    assert not causal.applies(query, key, torch.cat([value, value], -1), Rules(0.3))


def test_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [x.detach() for x in leaves(9, SHAPES["grouped"])]
    quick = PackedLayout([4, 5]).attend_tokens(*given, Rules(0.3))
    monkeypatch.setattr(kernel, "library", lambda: None)
    other = PackedLayout([4, 5]).attend_tokens(*given, Rules(0.3))
    torch.testing.assert_close(quick, other, rtol=0, atol=2e-6)
