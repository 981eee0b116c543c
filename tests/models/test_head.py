"""The chunked head against logits made all at once, its gradients, and what it allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.models.head import Head, log_probs, logits, readout

EXACT = 1e-11
"""float64: only the order of the sums differs."""


def problem(
    seed: int,
    tokens: int = 13,
    width: int = 5,
    words: int = 11,
    dtype: torch.dtype = torch.float64,
    **rule: Any,
) -> tuple[Tensor, Head, Tensor, tuple[Tensor, Head]]:
    """Hidden states, head, tokens and a reference of another width."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    head = Head(draw(words, width).requires_grad_(), draw(words).requires_grad_(), **rule)
    token = torch.randint(0, words, (tokens,), generator=generator)
    reference = draw(tokens, 4), Head(draw(words, 4), softcap=2.0)
    return draw(tokens, width).requires_grad_(), head, token, reference


def naive(
    hidden: Tensor, head: Head, token: Tensor, temperature: float, reference: tuple[Tensor, Head]
) -> tuple[Tensor, Tensor, Tensor]:
    """log-probability, entropy and divergence from the whole matrix, written apart."""
    rows = []
    for states, other in ((hidden, head), reference):
        z = states @ other.weight.T
        z = (z if other.bias is None else z + other.bias) * other.scale
        z = z if other.softcap is None else torch.tanh(z / other.softcap) * other.softcap
        rows.append((z / temperature).log_softmax(1))
    log_p, log_q = rows
    chosen = log_p[torch.arange(len(token)), token]
    return chosen, -(log_p.exp() * log_p).sum(1), (log_p.exp() * (log_p - log_q)).sum(1)


def everything(
    hidden: Tensor,
    head: Head,
    token: Tensor,
    temperature: float,
    reference: tuple[Tensor, Head],
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same three of the chunked head."""
    out = readout(
        hidden,
        head,
        token,
        temperature,
        entropy=True,
        reference=reference,
        chunk_bytes=0,
        chunk_tokens=chunk,
    )
    assert out.entropy_N is not None
    assert out.full_kl_N is not None
    return out.log_prob_N, out.entropy_N, out.full_kl_N


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_values_and_gradients_are_those_of_the_whole_matrix(
    softcap: float | None, temperature: float, chunk: int
) -> None:
    hidden, head, token, reference = problem(0, scale=1.7, softcap=softcap)
    inputs = (hidden, head.weight, head.bias)
    ours = everything(hidden, head, token, temperature, reference, chunk)
    theirs = naive(hidden, head, token, temperature, reference)
    weights = torch.randn(3, len(token), generator=torch.Generator().manual_seed(5)).double()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=EXACT)
    losses = [sum((w * x).sum() for w, x in zip(weights, xs, strict=True)) for xs in (ours, theirs)]
    grads = [torch.autograd.grad(loss, inputs) for loss in losses]  # type: ignore[arg-type]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=EXACT)


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_gradcheck(softcap: float | None) -> None:
    hidden, head, token, reference = problem(1, tokens=5, scale=0.8, softcap=softcap)
    assert head.bias is not None

    def f(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return everything(h, Head(w, b, head.scale, head.softcap), token, 0.7, reference, 2)

    assert torch.autograd.gradcheck(f, (hidden, head.weight, head.bias))


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(0, 9), chunk=st.integers(1, 12), seed=st.integers(0, 99))
def test_the_chunk_does_not_change_the_result(tokens: int, chunk: int, seed: int) -> None:
    hidden, head, token, _ = problem(seed, tokens=tokens)
    values, grads = [], []
    for size in (chunk, 1000):
        value = log_probs(hidden, head, token, 0.9, chunk_bytes=0, chunk_tokens=size)
        values.append(value)
        grads.append(torch.autograd.grad(value.sum(), (hidden, head.weight)))
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=EXACT)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=EXACT)


def test_the_reference_gets_no_gradient_and_its_own_divergence_is_zero() -> None:
    hidden, head, token, reference = problem(2)

    def full_divergence(states: Tensor, other: Head) -> Tensor:
        found = readout(hidden, head, token, reference=(states, other)).full_kl_N
        assert found is not None
        return found

    states = reference[0].clone().requires_grad_()
    other = Head(reference[1].weight.clone().requires_grad_(), softcap=2.0)
    full_divergence(states, other).sum().backward()
    assert states.grad is None
    assert other.weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().max() > 0
    same = full_divergence(hidden, head)
    assert same.abs().max() < EXACT
    assert (full_divergence(*reference) > 0).all()


def test_a_frozen_weight_costs_no_gradient_buffer() -> None:
    hidden, head, token, _ = problem(3, tokens=2, words=64, width=32)
    frozen = head.detached()
    with largest_allocation() as seen:
        log_probs(hidden, frozen, token, chunk_bytes=0, chunk_tokens=1).sum().backward()
    assert frozen.weight.grad is None
    assert seen.most < frozen.weight.numel()


class Largest(TorchDispatchMode):
    """Records the most elements that a fresh tensor of any operation had."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if _is_tensor(t)}
        for tensor in tree_leaves(out):
            if _is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.most = max(self.most, tensor.numel())
        return out


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def largest_allocation() -> Iterator[Largest]:
    with Largest() as mode:
        yield mode


def test_no_tensor_of_tokens_by_vocabulary_ever_lives() -> None:
    tokens, words, width, chunk = 96, 500, 8, 4
    hidden, head, token, _ = problem(4, tokens, width, words, torch.float32)
    reference = hidden.detach(), head.detached()
    with largest_allocation() as whole:
        sum(x.sum() for x in naive(hidden, head, token, 1.0, reference)).backward()  # type: ignore[union-attr]
    assert whole.most == tokens * words, "the detector must see the naive matrix"
    with largest_allocation() as seen:
        sum(everything(hidden, head, token, 0.7, reference, chunk)).sum().backward()  # type: ignore[union-attr]
    # The weight's gradient is the largest thing that may be made.
    assert seen.most == max(words * width, chunk * words) < tokens * words / 10


def test_the_default_chunk_holds_32_mib_of_logits() -> None:
    words = 2**17
    hidden, head, token, _ = problem(5, 128, 2, words, torch.float32)
    with largest_allocation() as seen, torch.no_grad():
        log_probs(hidden, head, token)
    assert seen.most * 4 == 32 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_float32_whatever_the_dtype_and_under_autocast(dtype: torch.dtype) -> None:
    hidden, head, token, _ = problem(6, dtype=dtype)
    exact = log_probs(
        hidden.detach().double(),
        Head(head.weight.double(), head.bias.double()),
        token,  # type: ignore[union-attr]
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = log_probs(hidden, head, token)
        out.sum().backward()
        assert logits(hidden, head).dtype == torch.float32
    assert out.dtype == torch.float32
    # float32 arithmetic: bfloat16 would be off by 1e-2.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert hidden.grad.dtype == head.weight.grad.dtype == dtype


def test_logits_agree_with_the_naive_ones() -> None:
    hidden, head, token, reference = problem(7, scale=0.5, softcap=1.5)
    log_p = (logits(hidden, head) / 0.8).log_softmax(1).gather(1, token[:, None])[:, 0]
    expected = naive(hidden, head, token, 0.8, reference)[0]
    torch.testing.assert_close(log_p, expected, rtol=0, atol=EXACT)


def test_a_temperature_of_zero_is_refused() -> None:
    hidden, head, token, _ = problem(8)
    with pytest.raises(ValueError, match="temperature"):
        log_probs(hidden, head, token, 0.0)


def test_sums_of_few_rows_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, token, _ = problem(9, tokens=11, words=40)
    whole = log_probs(hidden, head, token)
    parts: list[int] = []
    real = Tensor.logsumexp
    monkeypatch.setattr(Tensor, "logsumexp", lambda x, dim: parts.append(len(x)) or real(x, dim))
    monkeypatch.setattr("keel.models.head.SUM_BYTES", 3 * 40 * hidden.element_size())
    assert torch.equal(log_probs(hidden, head, token), whole)
    assert parts == [3, 3, 3, 2]
