"""Logits of compiled code against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.models.head import Head, logits, steady_logits
from keel.models.kernels import sampling as compiled
from tests.engines.test_decoding import poison

pytestmark = pytest.mark.skipif(compiled.head_library() is None, reason="no compiler")

SHAPES = [
    (1, 1, 1),
    (1, 64, 33),
    (12, 16, 32),
    (13, 40, 98),
    (64, 256, 98),
    (5, 7, 31),
    (30, 90, 257),
]
"""Rows, inputs, outputs: whole tiles and panels, and parts of them."""


def made(rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, weight and bias."""
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    states, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return states, weight, bias


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_logits_are_those_of_float64(
    shape: tuple[int, int, int], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, weight, bias = made(*shape)
    want = states.double() @ weight.double().T + (bias.double() if biased else 0)
    poison(monkeypatch)
    message = compiled.HeadWeight(weight, bias if biased else None)(states)
    assert message.shape == want.shape
    # One rounding a term, of at most the sum of their sizes.
    most = (states.abs() @ weight.abs().T + bias.abs()).max().item()
    assert (message - want).abs().max().item() <= 6e-8 * (shape[1] + 1) * most


def test_a_row_does_not_depend_on_the_others_or_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, bias = made(61, 96, 1000)
    whole = compiled.HeadWeight(weight, bias)(states)
    for rows in (slice(0, 1), slice(7, 20), slice(40, 61)):
        assert torch.equal(compiled.HeadWeight(weight, bias)(states[rows]), whole[rows])
    monkeypatch.setattr(compiled, "SHARED_PRODUCTS", 1)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(compiled.HeadWeight(weight, bias)(states), whole)


def test_what_is_no_number_stays_in_its_row_and_column() -> None:
    states, weight, bias = made(20, 48, 70)
    states[3, 5], weight[40, 2] = torch.nan, torch.inf
    message = compiled.HeadWeight(weight, bias)(states).isfinite()
    message[3], message[:, 40] = ~message[3], ~message[:, 40]
    message[3, 40] = True
    assert message.all()


def test_a_steady_head_takes_compiled_code_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, bias = made(6, 32, 50)
    calls: list[int] = []
    real = compiled.HeadWeight.__call__

    def counted(own: compiled.HeadWeight, x: Tensor) -> Tensor:
        calls.append(len(x))
        return real(own, x)

    monkeypatch.setattr(compiled.HeadWeight, "__call__", counted)
    wide = torch.cat([states, states], dim=1)[:, :32]
    halves = states.to(torch.bfloat16)
    for given in (states, wide, halves):
        message = steady_logits(Head(weight, bias))(given)
        torch.testing.assert_close(message, logits(given, Head(weight, bias)))
    assert calls == [6, 6, 6]
    strange = (
        Head(weight.repeat(1, 2)[:, :32], bias),
        Head(weight, bias.repeat_interleave(2)[::2]),
        Head(weight.double(), bias.double()),
    )
    for head in strange:
        x = states.to(head.weight.dtype)
        assert torch.equal(steady_logits(head)(x), logits(x, head))
    assert calls == [6, 6, 6]
    assert steady_logits(Head(weight, None))(states[:0]).shape == (0, 50)


def test_scale_and_cap_are_taken_behind_it() -> None:
    states, weight, bias = made(9, 24, 40)
    message = steady_logits(Head(weight, bias, scale=0.5, softcap=3.0))(states)
    want = 3 * torch.tanh(0.5 * (states @ weight.T + bias) / 3)
    torch.testing.assert_close(message, want)
