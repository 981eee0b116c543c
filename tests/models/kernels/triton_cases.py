"""What the Triton kernels must do: checked in the interpreter, and on a GPU by `tests/gpu`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from keel.models.attention import Rules
from keel.models.draw import draw_tokens
from keel.models.paged import PAGE_TOKENS, store
from tests.models.test_paged import Cache, cache, expected

Attend = Callable[..., Tensor]
Draw = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
LAST = 1 - 2.0**-53
EDGE = 1e-6
"""How near an edge of the cumulative distribution a number may choose the other token."""

SHORT = [1, 63, 64, 65, 0, 200]
SINKS = torch.linspace(-3, 3, 40)
CASES: dict[str, tuple[list[int], tuple[int, int], int, Rules, int]] = {
    "plain": (SHORT, (4, 4), 64, Rules(0.125), 1),
    "window": (SHORT, (14, 2), 80, Rules(0.3, window=70), 2),
    "window-of-a-page": ([64, 65, 128, 300], (4, 2), 64, Rules(0.2, window=64), 3),
    "softcap": (SHORT, (3, 1), 96, Rules(0.1, softcap=2.0), 3),
    "itself": (SHORT, (16, 1), 128, Rules(0.1, window=1), 8),
    "sinks": (SHORT, (40, 2), 128, Rules(0.1, sinks=SINKS), 1),
    "all": (SHORT, (40, 2), 256, Rules(0.05, 100, 5.0, SINKS), 4),
    "pages": ([6400, 1, 9001], (2, 1), 64, Rules(0.2), 1),
    "pages-split": ([6400, 1, 9001], (2, 1), 64, Rules(0.2), 8),
    "pages-window": ([6400, 1, 9001], (2, 1), 64, Rules(0.2, 4000, 20.0, SINKS[:2]), 5),
}
"""Lengths, heads and key-value heads, width, rules, splits."""


def strided(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def placed(made: Cache, device: str) -> Cache:
    """The cache on a device, keys and values as layer 1 of a larger pool, the query transposed."""
    pool = torch.stack([torch.full_like(made.keys, math.nan), made.keys, made.values]).to(device)
    query = made.query_R.transpose(0, 1).contiguous().to(device).transpose(0, 1)
    pages, lengths = made.pages_R.to(device), strided(made.length_R.to(device))
    return replace(
        made, query_R=query, keys=pool[1], values=pool[2], pages_R=pages, length_R=lengths
    )


def check_attention(
    attend: Attend, name: str, dtype: torch.dtype, tolerance: float, device: str = "cpu"
) -> None:
    """`attend` against float64, absolutely and relatively within `tolerance`."""
    lengths, heads, width, rules, splits = CASES[name]
    made = cache(lengths, heads, width, dtype)
    sinks = None if rules.sinks is None else rules.sinks.to(device)
    there = placed(made, device)
    given = there.query_R, there.keys, there.values, there.pages_R, there.length_R
    found = attend(*given, replace(rules, sinks=sinks), splits=splits)
    assert (found.dtype, found.shape) == (dtype, made.query_R.shape)
    torch.testing.assert_close(
        found.cpu().double(), expected(made, rules), rtol=tolerance, atol=tolerance
    )


def check_mixed_precision(attend: Attend, half: torch.dtype, device: str = "cpu") -> None:
    """A float32 query over a half-precision pool is rounded to it; the result is float32."""
    made = cache([3, 100], (4, 2), 64, half)
    there = placed(made, device)
    given = there.keys, there.values, there.pages_R, there.length_R
    one = attend(there.query_R.float(), *given, Rules(0.125), splits=2)
    assert one.dtype == torch.float32
    two = attend(there.query_R, *given, Rules(0.125), splits=2)
    assert torch.equal(one.to(half), two)


def check_store(write: Callable[..., None], half: torch.dtype, device: str = "cpu") -> None:
    """`write` against torch's path: 3 heads of 80, a transposed key, tokens in pages that share."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 3, 5, 80).transpose(1, 2).to(device)
    page = torch.tensor([4, 1, 4, 0, 2], device=device, dtype=torch.int32)
    place = strided(torch.tensor([63, 0, 62, 9, 31], device=device))
    found, wanted = (
        torch.zeros(2, 5, 3, PAGE_TOKENS, 80, dtype=half, device=dev) for dev in (device, "cpu")
    )
    write(found[0], found[1], key, value, page, place)
    store(wanted[0], wanted[1], *(x.cpu() for x in (key, value, page, place)))
    assert found[0].any()
    assert torch.equal(found.cpu(), wanted)


def check_tokens(
    draw: Draw, size: int, temperature: float, spread: float, dtype: torch.dtype, device: str
) -> None:
    """Tokens of equal numbers as in float64, but at an edge, and their log-probabilities."""
    torch.manual_seed(size)
    rows = 12
    logits = (spread * torch.randn(rows, size + 3)).to(dtype)[:, :size]
    logits[3, size // 2 :: 3] = -math.inf
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[:2] = torch.tensor([0, LAST], dtype=torch.float64)
    token, log_prob = (
        x.cpu() for x in draw(logits.to(device)[:, :size], strided(uniform.to(device)), temperature)
    )
    assert (token.dtype, log_prob.dtype) == (torch.int64, torch.float32)
    wanted, _ = draw_tokens(logits, uniform, temperature)
    scaled = logits.double() / (temperature or 1)
    exact = scaled.log_softmax(-1)
    if temperature == 0:
        assert torch.equal(token, wanted)
    else:
        mass = exact.exp().cumsum(-1)
        low = torch.nn.functional.pad(mass, (1, 0)).gather(1, token[:, None])[:, 0]
        high = mass.gather(1, token[:, None])[:, 0]
        assert ((low - EDGE <= uniform) & (uniform <= high + EDGE)).all()
        if size <= 5000:  # beyond, edges are so near each other that some number is at one
            assert (token[2:] == wanted[2:]).all()
    # Logits of 40 in float32, and sums of float32 weights.
    own = exact.gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(log_prob.double(), own, rtol=1e-6, atol=2e-6)


def check_mass(draw: Draw, device: str = "cpu") -> None:
    """Neither end of [0, 1) chooses a token without mass, within a block or in an empty one."""
    uniform = torch.tensor([0.0, 0.5, LAST], dtype=torch.float64)
    for second in (8191, 9000):  # the last of the first's block, and in the next block
        logits = torch.full((3, 12_000), -math.inf)
        logits[:, [5000, second]] = 0.0
        token, log_prob = draw(logits.to(device), uniform.to(device), 0.7)
        assert token.tolist() == [5000, second, second]
        torch.testing.assert_close(log_prob.cpu(), torch.full((3,), math.log(0.5)))


def check_greedy_ties(draw: Draw, device: str = "cpu") -> None:
    """The lowest id among equal logits, within a block and across blocks."""
    logits = torch.zeros(2, 9000)
    logits[0, [8999, 4500, 4499]] = 2.0
    token, _ = draw(logits.to(device), torch.full((2,), 0.9).double().to(device), 0.0)
    assert token.tolist() == [4499, 0]


def check_not_numbers(draw: Draw, temperature: float, device: str = "cpu") -> None:
    """NaN, +inf and a row without mass give a NaN log-probability and a valid token."""
    torch.manual_seed(0)
    logits = torch.randn(5, 5000)
    logits[0, 4700] = math.nan
    logits[1] = -math.inf
    logits[2] = math.nan
    logits[3, 9] = math.inf
    uniform = torch.full((5,), 0.5, dtype=torch.float64)
    token, log_prob = draw(logits.to(device), uniform.to(device), temperature)
    assert log_prob.isnan().tolist() == [True, True, True, True, False]
    assert ((token >= 0) & (token < 5000)).all()


def check_frequencies(draw: Draw, size: int, count: int, device: str = "cpu") -> None:
    """χ² at 1e-3 over 20 of the tokens, which lie in both blocks if there are two."""
    torch.manual_seed(1)
    logits = torch.full((size,), -math.inf)
    ids = torch.randperm(size)[:20].sort().values
    logits[ids] = torch.randn(20)
    uniform = torch.rand(count, dtype=torch.float64)
    token, _ = draw(logits.expand(count, -1).to(device), uniform.to(device), 1.5)
    counts = token.cpu().bincount(minlength=size)[ids]
    assert counts.sum() == count
    wanted = (logits[ids].double() / 1.5).softmax(0) * count
    assert stats.chisquare(counts.numpy(), wanted.numpy()).pvalue > 1e-3


READOUTS: dict[str, tuple[int, float, float | None, float]] = {
    "plain": (300, 1.0, None, 1.0),
    "blocks": (9000, 1.0, None, 0.7),
    "capped": (5000, 0.25, 3.0, 1.3),
    "vocabulary": (151_936, 1.0, None, 1.0),
}
"""Tokens of the vocabulary; scale, soft cap and temperature of the logits."""


def check_readout(kernels: Any, name: str, entropy: bool, device: str = "cpu") -> None:
    """Values and gradients of the products against float64 and autograd."""
    size, scale, cap, temperature = READOUTS[name]
    torch.manual_seed(size)
    wide = 4 * torch.randn(5, size + 3)
    wide[2, : size // 2] -= 300  # without mass
    products, token = wide[:, :size], torch.tensor([0, size - 1, size - 2, 7, 7])
    grads = torch.randn(2, 5)
    exact = products.double().requires_grad_()
    logits = exact * scale
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    log_p = logits.log_softmax(-1)
    wanted = log_p.gather(1, token[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    used = grads if entropy else grads * torch.tensor([[1.0], [0.0]])
    torch.autograd.backward(wanted, [*used.double()])

    given = wide.to(device)[:, :size]
    on = token.to(device)
    shape = scale, cap, temperature
    log_prob, entropies, normaliser = kernels.statistics(given, on, shape, entropy=entropy)
    assert (entropies is not None) == entropy
    close = partial(torch.testing.assert_close, rtol=2e-6, atol=1e-5)  # float32 sums
    close(log_prob.cpu().double(), wanted[0].detach())
    if entropy:
        close(entropies.cpu().double(), wanted[1].detach())
    close(normaliser.cpu().double(), logits.detach().logsumexp(1))
    rest = torch.randn(5, 3).to(device)
    wide = torch.cat([given, rest], 1)
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        known = normaliser, entropies
        into = wide[:, :size]
        found = kernels.gradient(into, on, shape, known, grads.to(device), dtype)
        assert found.dtype == dtype
        assert (found.data_ptr() == into.data_ptr()) == (dtype == torch.float32)
        torch.testing.assert_close(found.cpu().double(), exact.grad, rtol=bound, atol=1e-5)
    assert torch.equal(wide[:, size:], rest)
