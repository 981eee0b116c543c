"""The chunked head against logits made all at once, its gradients, and what it allocates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.models import head as head_module
from keel.models.head import Head, OtherStates, log_probs, logits, product_dtype, readout
from keel.models.policy import load_policy
from keel.models.reference import reference_for
from keel.objective.distillation import jensen_shannon
from tests.models.tiny import spec

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


TEACHER_WAYS = [(1.0, None), (0.0, None), (0.3, None), (0.3, 4)]


def taught(
    hidden: Tensor, head: Head, token: Tensor, other: tuple[Tensor, Head], chunk: int,
    mix: float, top_k: int | None,
) -> Tensor:  # fmt: skip
    """log π + entropy + 2 D of each token, D to a teacher, chunk by chunk."""
    teacher = OtherStates(*other, partial(jensen_shannon, mix=mix, top_k=top_k))
    out = readout(
        hidden, head, token, 0.7, entropy=True, teacher=teacher, chunk_bytes=0, chunk_tokens=chunk
    )
    assert out.entropy_N is not None
    assert out.distillation_N is not None
    return out.log_prob_N + out.entropy_N + 2 * out.distillation_N


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(("mix", "top_k"), TEACHER_WAYS)
def test_divergence_to_a_teacher_is_that_of_the_whole_matrix(
    mix: float, top_k: int | None, chunk: int
) -> None:
    hidden, head, token, other = problem(0, scale=1.7, softcap=2.5)
    log_p, log_q = (
        (logits(states, one) / 0.7).log_softmax(1) for states, one in ((hidden, head), other)
    )
    own, entropy, _ = naive(hidden, head, token, 0.7, other)
    whole = own + entropy + 2 * jensen_shannon(log_p, log_q, mix=mix, top_k=top_k)
    found = taught(hidden, head, token, other, chunk, mix, top_k)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    weight = torch.randn(len(token), generator=torch.Generator().manual_seed(5)).double()
    inputs = (hidden, head.weight, head.bias)
    grads = [torch.autograd.grad((weight * x).sum(), inputs) for x in (found, whole)]  # type: ignore[arg-type]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("mix", "top_k"), TEACHER_WAYS)
def test_gradcheck_of_the_divergence_to_a_teacher(mix: float, top_k: int | None) -> None:
    hidden, head, token, other = problem(1, tokens=5)

    def f(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return taught(h, Head(w, b), token, other, 2, mix, top_k)

    assert torch.autograd.gradcheck(f, (hidden, head.weight, head.bias))


def test_no_matrix_of_a_teacher_ever_lives() -> None:
    tokens, words, width, chunk = 96, 500, 8, 4
    hidden, head, token, _ = problem(4, tokens, width, words, torch.float32)
    other = hidden.detach(), head.detached()
    with largest_allocation() as seen:
        taught(hidden, head, token, other, chunk, 0.5, None).sum().backward()
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


@pytest.mark.parametrize("rule", [{}, {"scale": 0.5, "softcap": 3.0}], ids=["plain", "capped"])
def test_bfloat16_products_are_rounded_and_nothing_else(rule: dict[str, Any]) -> None:
    """Against float32 of inputs that were rounded before: the values are the same, and gradients
    are within the rounding of their own factors (8 bits), of the largest."""
    hidden, head, token, reference = problem(3, width=16, dtype=torch.float32, **rule)
    head = replace(head, dtype="bfloat16")
    other = (reference[0], replace(reference[1], dtype="bfloat16"))
    near = replace(head, weight=head.weight.detach().bfloat16().float().requires_grad_())
    near = replace(near, dtype="float32")
    states = hidden.detach().bfloat16().float().requires_grad_()
    rounded = tuple(x.bfloat16().float() for x in (reference[0], reference[1].weight))
    wanted_other = (rounded[0], replace(reference[1], weight=rounded[1]))
    options = {"entropy": True, "chunk_bytes": 0, "chunk_tokens": 4}
    found = readout(hidden, head, token, 0.9, reference=other, **options)
    wanted = readout(states, near, token, 0.9, reference=wanted_other, **options)
    exact = readout(states, replace(near, weight=head.weight.detach()), token, 0.9, **options)
    assert not torch.equal(found.log_prob_N, exact.log_prob_N)
    for name in ("log_prob_N", "entropy_N", "full_kl_N"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(hidden, head), logits(states, near), rtol=0, atol=1e-6)
    pairs = [(found, (hidden, head.weight)), (wanted, (states, near.weight))]
    grads, wanted_grads = (
        torch.autograd.grad((s.log_prob_N + s.entropy_N + s.full_kl_N).sum(), x) for s, x in pairs
    )
    for grad, want in zip(grads, wanted_grads, strict=True):
        assert grad.dtype == torch.float32
        assert float((grad - want).abs().max()) <= 2**-7 * float(want.abs().max())


def test_tf32_holds_in_both_passes_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass runs in a thread of its own on a GPU: here as well."""
    matmul, product, seen = torch.backends.cuda.matmul, head_module._product, []

    def watched(left: Tensor, right: Tensor) -> Tensor:
        seen.append(matmul.fp32_precision)
        return product(left, right)

    monkeypatch.setattr(head_module, "_product", watched)
    hidden, head, token, _ = problem(3, dtype=torch.float32)
    before = matmul.fp32_precision
    total = log_probs(hidden, replace(head, dtype="tf32"), token).sum()
    assert matmul.fp32_precision == before
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    # The logits twice, and the gradient of the hidden states.
    assert seen == ["tf32"] * 3
    assert matmul.fp32_precision == before
    log_probs(hidden, head, token)
    assert seen[3:] == [before]


def test_head_dtype_of_the_recipe_reaches_the_head() -> None:
    for autocast, asked, wanted in ((True, "auto", "auto"), (False, "auto", "float32"),
                                    (False, "bfloat16", "bfloat16")):  # fmt: skip
        made = spec("llama").model_copy(update={"autocast": autocast, "head_dtype": asked})
        policy = load_policy(made, 0)
        assert policy.head.dtype == reference_for(policy).head.dtype == wanted
    auto = replace(policy.head, dtype="auto")
    assert product_dtype(auto, torch.zeros(1, 1)) == "float32"
    assert product_dtype(policy.head, torch.zeros(1, 1, dtype=torch.float64)) == "float32"
