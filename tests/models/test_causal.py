"""Compiled attention against a loop in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.models.attention import PackedLayout, Rules
from keel.models.kernels import causal
from tests.engines.test_decoding import poison
from tests.models.test_attention import LAYOUTS, each_by_hand

LONG = {
    # Beyond the queries (64) and keys (256) that are taken at a time, and not by whole panels.
    "longer than a block": ([290, 70, 1], []),
    "a long prompt": ([270, 3, 66, 1], [-1, 0, 0, 0]),
}
SHAPES = {
    "grouped": (4, 2, 32),
    "apart": (2, 2, 64),
    "one key head": (3, 1, 96),
    "narrow": (2, 1, 16),
    "not whole panels": (2, 1, 80),
}


def leaves(tokens: int, shape: tuple[int, int, int], seed: int = 0) -> list[Tensor]:
    heads, shared, width = shape
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, count, width, generator=generator).requires_grad_()
        for count in (heads, shared, shared)
    ]


def by_loop(lengths: list[int], follows: list[int], heads: list[Tensor], rules: Rules) -> Tensor:
    return each_by_hand(lengths, follows, tuple(x.transpose(0, 1)[None] for x in heads), rules)


CASES = {
    **{
        f"{layout}-{shape}-{window}": (made, SHAPES[shape], window)
        for layout, made in LAYOUTS.items()
        for shape, window in zip(SHAPES, (None, 1, 2, 5, 64), strict=True)
    },
    **{
        f"{layout}-{window}": (made, SHAPES["grouped"], window)
        for layout, made in LONG.items()
        for window in (None, 40)
    },
}


@pytest.mark.quick(*list(CASES)[::6])
@pytest.mark.parametrize(("made", "shape", "window"), CASES.values(), ids=CASES)
def test_forward_and_backward_equal_a_loop(
    made: tuple[list[int], list[int]],
    shape: tuple[int, int, int],
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison(monkeypatch)
    lengths, follows = made
    given, rules = leaves(sum(lengths), shape), Rules(0.3, window)
    assert causal.applies(*given)
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


def families(seed: int) -> tuple[list[int], list[int]]:
    """Up to 5 segments without a prefix, each with up to 5 others that follow it anywhere later,
    some longer than the queries (64) and the keys (256) taken at a time."""
    chosen = random.Random(seed)
    lengths, follows = [], []
    for _ in range(chosen.randint(1, 5)):
        follows.append(-1)
        lengths.append(chosen.choice([1, 20, 31, 65, 300, 520]))
        roots = [piece for piece, before in enumerate(follows) if before == -1]
        for _ in range(chosen.randint(0, 5)):
            follows.append(chosen.choice(roots))
            lengths.append(chosen.choice([1, 13, 60, 64, 130, 270]))
    return lengths, follows


@pytest.mark.parametrize("shape", [(4, 4, 64), (4, 2, 32), (3, 1, 64), (4, 1, 32)])
@pytest.mark.parametrize(("seed", "window"), enumerate([None, 1, 23, 100, 300]))
def test_one_pass_backward_gives_the_bits_of_two(
    seed: int, shape: tuple[int, int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    lengths, follows = families(seed)
    given = leaves(sum(lengths), shape, seed)
    out = PackedLayout(lengths, follows).attend_tokens(*given, Rules(0.3, window))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for one in (True, False):
        monkeypatch.setattr(causal.CausalPlan, "in_one_pass", lambda *_, one=one: one)
        found.append(torch.autograd.grad((out * weight).sum(), given, retain_graph=True))
    assert all(x.isfinite().all() for x in found[0])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("lengths", "follows", "shared", "threads", "one"),
    [
        ([500], [], 1, 1, True),
        ([500], [], 1, 2, False),
        ([500], [], 2, 2, False),
        ([500], [], 4, 2, True),
        ([20, *[60] * 8] * 2, [-1, *[0] * 8, -1, *[9] * 8], 4, 2, True),
        ([20, *[60] * 8] * 2, [-1, *[0] * 8, -1, *[9] * 8], 4, 8, False),
        # One family is nearly all of the work.
        ([500, *[10] * 40], [], 1, 2, False),
        # Pieces of equal lengths, but half of the work is one family's.
        ([60] * 12, [-1, *[0] * 4, *[-1] * 7], 1, 2, False),
        ([60] * 12, [], 1, 2, True),
    ],
)
def test_families_are_taken_where_they_keep_the_threads_busy(
    lengths: list[int],
    follows: list[int],
    shared: int,
    threads: int,
    one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, ran = causal.CausalPlan(lengths, follows), []
    monkeypatch.setattr(causal, "_run", lambda name, *_: ran.append(name))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    query = torch.zeros(sum(lengths), shared, 32)
    saved = (query, query, query, query, query[..., 0].contiguous())
    causal.backward(query, saved, plan, 1.0, None)
    names = ["families"] if one else ["queries", "keys"]
    assert ran == [f"keel_causal_{name}" for name in names]


@pytest.mark.parametrize("view", ["query", "key", "value", "all", "heads first"])
def test_heads_may_lie_anywhere(view: str) -> None:
    """Queries, keys and values as parts of one tensor, or heads first as transformers has them."""
    given = leaves(24, SHAPES["grouped"])
    parts = torch.cat([x.detach() for x in given], 1).split_with_sizes([4, 2, 2], 1)
    names = ("query", "key", "value")
    strided = [
        (part if view in ("all", name) else part.contiguous()).detach().requires_grad_()
        for name, part in zip(names, parts, strict=True)
    ]
    if view == "heads first":
        strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]
        assert not strided[0].is_contiguous()
    outs, slopes = [], []
    for x in (given, strided):
        outs.append(PackedLayout([17, 7], [-1, 0]).attend_tokens(*x, Rules(0.3)))
        slopes.append(torch.autograd.grad(outs[-1].square().sum(), x))
    assert torch.equal(*outs)
    assert all(map(torch.equal, *slopes))


@pytest.mark.parametrize("one", [True, False])
def test_no_more_room_is_used_than_was_made(one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    after: list[Tensor] = []

    def guarded(query: Tensor, plan: causal.CausalPlan) -> Tensor:
        size = plan.room(query.shape[-1])
        whole = torch.full((size + 4096,), 7.5)
        after.append(whole[size:])
        return whole[:size].view(1, size)

    monkeypatch.setattr(causal, "_room", guarded)
    monkeypatch.setattr(causal.CausalPlan, "in_one_pass", lambda *_: one)
    given = leaves(2 * 577, (1, 1, 32))
    out = PackedLayout([577, 577], [-1, 0]).attend_tokens(*given, Rules(0.3))
    torch.autograd.grad(out.sum(), given)
    assert len(after) == 2
    assert all((numbers == 7.5).all() for numbers in after)


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
    ("dtype", "rules"),
    [
        (torch.float64, {}),
        (torch.bfloat16, {}),
        (torch.float32, {"softcap": 2.0}),
        (torch.float32, {"sinks": torch.zeros(4)}),
    ],
)
def test_other_dtypes_and_rules_use_torch(
    dtype: torch.dtype, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "forward", None)
    given = [x.to(dtype) for x in leaves(4, (4, 2, 32))]
    PackedLayout([4]).attend_tokens(*given, Rules(0.3, **rules))


def test_values_of_another_width_use_torch() -> None:
    query, key, value = leaves(4, (4, 2, 32))
    assert not causal.applies(query, key, torch.cat([value, value], -1))


def test_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [x.detach() for x in leaves(9, SHAPES["grouped"])]
    quick = PackedLayout([4, 5]).attend_tokens(*given, Rules(0.3))
    monkeypatch.setattr(causal, "library", lambda: None)
    other = PackedLayout([4, 5]).attend_tokens(*given, Rules(0.3))
    torch.testing.assert_close(quick, other, rtol=0, atol=2e-6)
