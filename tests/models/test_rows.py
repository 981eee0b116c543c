"""Compiled norms, rotations and gates against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.kernels import rows
from keel.models.rows import gated, rms_norm, turned
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


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (33, 256), (3, 4, 200)])
def test_norms(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    given = [drawn(*shape), drawn(shape[-1], seed=1)]
    same(lambda x, w: rms_norm(x, w, 1e-5), norm_in_double, given, 2)


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
            x, weight = drawn(50, 200), drawn(200, seed=1)
            out = rms_norm(x, weight, 1e-5)
            found.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_no_gradient_is_made_for_a_weight_that_does_not_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    back = rows.rms_back

    def noting(*given: Any) -> Any:
        asked.append(given[-1])
        return back(*given)

    monkeypatch.setattr(rows, "rms_back", noting)
    for learns in (False, True):
        weight = torch.ones(8, requires_grad=learns)
        rms_norm(drawn(3, 8), weight, 1e-5).sum().backward()
    assert asked == [False, True]
