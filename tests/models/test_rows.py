"""Compiled norms, rotations and gates against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.models.kernels import pointwise as rows
from keel.models.pointwise import added_norm, gated, rms_norm, turned
from tests.engines.test_decoding import poison


def drawn(*shape: int, seed: int = 0, large: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (large * torch.randn(shape, generator=generator)).requires_grad_()


def norm_in_double(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def silu_in_double(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def turned_in_double(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], -1)


def same(
    quick: Callable[..., Tensor], exact: Callable[..., Tensor], given: list[Tensor], some: int
) -> None:
    """Values, and gradients of the first `some`."""
    double = [x.detach().double().requires_grad_() for x in given]
    out, want = quick(*given), exact(*double)
    atol = 1e-6 * float(want.detach().abs().max())
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=atol)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad(out, given[:some], seed)
    for grad, other in zip(
        grads, torch.autograd.grad(want, double[:some], seed.double()), strict=True
    ):
        # A sum over the rows has errors of the size of its largest terms.
        atol = 4e-6 * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(grad.double(), other, rtol=2e-6, atol=atol)


# The last two: whole blocks of rows, and more of them than two.
SHAPES = [(1, 1), (7, 5), (33, 256), (3, 4, 200), (128, 20), (2, 67, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    given = [drawn(*shape), drawn(shape[-1], seed=1)]
    same(lambda x, w: rms_norm(x, w, 1e-5), norm_in_double, given, 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(0, 2)])
def test_added_norms(shape: tuple[int, ...], used: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sum, its norm, or both are used."""
    poison(monkeypatch)
    given = [drawn(*shape), drawn(*shape, seed=2), drawn(shape[-1], seed=1)]
    # Of a sum the weight has no gradient.
    some = 2 if used == slice(0, 1) else 3
    same(
        lambda x, update, w: torch.cat(added_norm(x, update, w, 1e-5)[used]),
        lambda x, update, w: torch.cat((x + update, norm_in_double(x + update, w))[used]),
        given,
        some,
    )


def test_an_added_norm_has_the_bits_of_its_two_steps() -> None:
    x, update, weight = drawn(150, 72), drawn(72, 150, seed=1).T, drawn(72, seed=2)
    both = x + update
    one, other = added_norm(x, update, weight, 1e-5), (both, rms_norm(both, weight, 1e-5))
    seeds = [drawn(150, 72, seed=3).detach(), drawn(72, 150, seed=4).detach().T]
    for mine, want in zip(one, other, strict=True):
        assert torch.equal(mine, want)
    given = (x, update, weight)
    slopes = torch.autograd.grad(one, given, seeds)
    assert all(map(torch.equal, slopes, torch.autograd.grad(other, given, seeds)))


def test_a_gradient_given_twice_is_written_to_by_none() -> None:
    """Gradients of both summands are one tensor: what is added to one must not reach the other."""
    x, update, weight = drawn(5, 8), drawn(5, 8, seed=1), drawn(8, seed=2)
    seeds = [drawn(5, 8, seed=3).detach(), drawn(5, 8, seed=4).detach()]
    before = [seed.clone() for seed in seeds]
    once = torch.autograd.grad(added_norm(x, update, weight, 1e-5), (x, update), seeds)
    for times in (1, 2, 3):
        # Each summand has a use of its own besides, one before and one behind.
        early, late = 2 * x, 3 * update
        torch.autograd.backward(
            [early.sum(), *added_norm(x, update, weight, 1e-5), late.sum()], [None, *seeds, None]
        )
        for grad, slope, own in ((x.grad, once[0], 2.0), (update.grad, once[1], 3.0)):
            torch.testing.assert_close(grad, times * (slope + own))
    assert all(map(torch.equal, seeds, before))


def test_summands_must_be_of_one_shape() -> None:
    with pytest.raises(AssertionError):
        added_norm(drawn(3, 8), drawn(1, 8), drawn(8), 1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 10), (9, 4, 64)])
def test_rotations(shape: tuple[int, int, int]) -> None:
    angle = drawn(shape[0], shape[2] // 2, seed=1, large=3.0).detach()
    # Scaled, as YaRN has them.
    given = [drawn(*shape), 1.3 * angle.cos(), 1.3 * angle.sin()]
    same(turned, turned_in_double, given, 1)


@pytest.mark.parametrize("shape", [(1,), (3, 7), (17, 80)])
@pytest.mark.parametrize("large", [1.0, 40.0])
def test_gates(shape: tuple[int, ...], large: float) -> None:
    same(gated, silu_in_double, [drawn(*shape, large=large), drawn(*shape, seed=1)], 2)


def test_gates_far_out() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.0, 0.0, 88.5, 1e30, float("nan")] * 4)
    out = gated(gate, torch.ones(32))
    want = silu_in_double(gate.double(), torch.ones(32).double())
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=1e-35, equal_nan=True)


def test_strided_inputs_and_gradients() -> None:
    x = drawn(6, 40)[:, ::2]
    assert not x.is_contiguous()
    weight = drawn(20, seed=1)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))
    out = rms_norm(x.detach().requires_grad_(), weight, 1e-5)
    seed = torch.ones(20, 6).T
    one = torch.autograd.grad(out, weight, seed, retain_graph=True)[0]
    assert torch.equal(one, torch.autograd.grad(out, weight, seed.contiguous())[0])


def test_threads_change_no_bit() -> None:
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x, weight = drawn(300, 200), drawn(200, seed=1)
            both, out = added_norm(x, 2 * x, weight, 1e-5)
            out = out * both
            found.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_no_gradient_is_made_that_nobody_has_or_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    back = rows.rms_back

    def noting(grad: Tensor, beside: Tensor | None, *rest: Any) -> Any:
        asked.append((beside is not None, rest[-1]))
        return back(grad, beside, *rest)

    monkeypatch.setattr(rows, "rms_back", noting)
    for learns in (False, True):
        weight = torch.ones(8, requires_grad=learns)
        rms_norm(drawn(3, 8), weight, 1e-5).sum().backward()
        both, out = added_norm(drawn(3, 8), drawn(3, 8), weight, 1e-5)
        out.sum().backward(retain_graph=True)
        (both + out).sum().backward(retain_graph=True)
        both.sum().backward()
    assert asked == [
        (beside, learns) for learns in (False, True) for beside in (False, False, True)
    ]
