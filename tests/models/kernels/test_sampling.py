"""Logits and tokens by compiled code: against float64, and torch's path, which sorts and sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.engines import sampler
from keel.models.head import Head, logits, steady_logits
from keel.models.kernels import sampling as compiled
from keel.models.kernels.sampling import sample_tokens
from keel.types import Sampling
from tests.engines.test_decoding import poison

pytestmark = pytest.mark.skipif(compiled.head_library() is None, reason="no compiler")
LAST = 1 - 2.0**-53
CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 900},
    {"top_p": 0.31},
    {"top_p": 0.93},
    {"top_p": 0.999999},
    {"min_p": 0.07},
    {"min_p": 1e-7},
    {"top_k": 40, "top_p": 0.87},
    {"top_k": 40, "min_p": 0.21},
    {"top_p": 0.9, "min_p": 0.013},
    {"top_p": 0.6, "min_p": 1e-5},
    {"top_k": 700, "top_p": 0.97, "min_p": 0.003},
]


def made(rows: int, vocabulary: int, seed: int = 0, large: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits, and a number for each row."""
    generator = torch.Generator().manual_seed(seed)
    logits = large * torch.randn(rows, vocabulary, generator=generator)
    return logits, torch.rand(rows, dtype=torch.float64, generator=generator)


def slack(logits: Tensor, sampling: Sampling) -> float:
    """By what torch's cumulative sums and logarithms are off: they divide by T before they subtract
    the largest, which is rounded at the size of the quotient."""
    largest = logits[logits.isfinite()].abs().max().item()
    return 1e-12 + 1e-15 * largest / (sampling.temperature or 1)


def agree(logits: Tensor, uniform: Tensor, sampling: Sampling) -> None:
    """The same tokens and log-probabilities; another token only where the number lies on the
    boundary of two."""
    tokens, log_probs = sample_tokens(logits, uniform, sampling)
    want, want_log_probs = sampler._sample_tokens(logits, uniform, sampling)
    near = slack(logits, sampling)
    for row in (tokens != want).nonzero()[:, 0].tolist():
        around = uniform[row] + torch.tensor([-near, near], dtype=torch.float64)
        both = logits[row].expand(2, -1), around.clamp(0, LAST)
        assert tokens[row] in sampler._sample_tokens(*both, sampling)[0], (
            row,
            uniform[row],
            sampling,
        )
    same = tokens == want
    assert same.double().mean() > 0.9
    assert log_probs.dtype == torch.float64
    torch.testing.assert_close(log_probs[same], want_log_probs[same], rtol=1e-12, atol=near)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    vocabulary=st.one_of(st.integers(1, 70), st.integers(1, 5000)),
    large=st.sampled_from([0.0, 0.1, 1.0, 5.0, 100.0]),
    temperature=st.one_of(st.sampled_from([0, 1e-3, 1, 100]), st.floats(0.1, 5)),
    top_k=st.one_of(st.just(0), st.integers(1, 60), st.integers(1, 6000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-9, 0.99)),
)
def test_whatever_is_asked(
    seed: int,
    rows: int,
    vocabulary: int,
    large: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits, uniform = made(rows, vocabulary, seed, large)
    if large == 0 and top_p < 1:
        # Equal logits: torch's sums of 1/V come near a limit that is a multiple of it.
        top_p = (int(top_p * min(top_k or vocabulary, vocabulary)) + 0.5) / vocabulary
    agree(logits, uniform, Sampling(1, temperature, top_k, min(top_p, 1.0), min_p))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocabulary", [1000, 1025, 3000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_number_within_each_share_of_the_unit(
    cut: dict[str, float], vocabulary: int, temperature: float
) -> None:
    """In the middle of a token's share of [0, 1), whichever it is, only that token is right."""
    logits = made(1, vocabulary)[0]
    sampling = Sampling(1, temperature, **cut)
    prob = (logits.double() / temperature).softmax(-1)
    order = torch.arange(vocabulary)[None]
    if cut:
        prob, order = prob.sort(stable=True, descending=True)
        prob = sampler._truncate(prob, sampling)
    count = int((prob > 0).sum())
    prob = prob[0, :count] / prob.sum()
    middle = prob.cumsum(0) - prob / 2
    tokens, log_probs = sample_tokens(logits.expand(count, -1), middle, sampling)
    assert torch.equal(tokens, order[0, :count])
    torch.testing.assert_close(log_probs, prob.log(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ties_go_by_the_lowest_id(cut: dict[str, float]) -> None:
    """A few levels, some thousands of tokens on each; zeros of both signs are equal."""
    for vocabulary in (90, 4000):
        logits, uniform = made(40, vocabulary, large=1.3)
        logits = logits.round()
        logits[:, ::3] *= torch.where(logits[:, ::3] == 0, -1.0, 1.0)
        assert torch.signbit(logits[logits == 0]).any()
        agree(logits, uniform, Sampling(1, **cut))


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_p": 0.7, "min_p": 0.1}])
def test_a_vocabulary_larger_than_any(options: dict[str, float]) -> None:
    """Blocks of sums grow, for there is room for so many."""
    logits, _ = made(1, 600_001)
    uniform = torch.linspace(0, LAST, 5, dtype=torch.float64)
    agree(logits.expand(5, -1), uniform, Sampling(1, **options))


@pytest.mark.parametrize("options", [{}, {"top_k": 1024}, {"min_p": 0.5}])
def test_a_boundary_belongs_to_the_token_behind(options: dict[str, float]) -> None:
    """Sums of ones and their parts of 1/1024 are exact."""
    places = torch.arange(1024)
    logits = torch.full((1, 1024), 2.5).expand(1024, -1)
    tokens, _ = sample_tokens(logits, places.double() / 1024, Sampling(1, **options))
    assert torch.equal(tokens, places)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 100.0, 1e6, 1e300, 1e-310])
def test_temperatures_far_out(cut: dict[str, float], temperature: float) -> None:
    logits, uniform = made(8, 2500)
    sampling = Sampling(1, temperature, **cut)
    if 1e-3 <= temperature <= 100:
        agree(logits, uniform, sampling)
    tokens, log_probs = sample_tokens(logits, uniform, sampling)
    if temperature < 1e-300:
        assert torch.equal(tokens, logits.argmax(-1))
        assert not log_probs.any()
    if temperature > 1e5:
        # As good as uniform over what is kept.
        count = math.ceil(min(2500, cut.get("top_k", 2500)) * cut.get("top_p", 1))
        want = torch.full_like(log_probs, -math.log(count))
        torch.testing.assert_close(log_probs, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocabulary", [5, 40, 3000])
def test_tokens_without_mass_are_never_chosen(cut: dict[str, float], vocabulary: int) -> None:
    """Most of the vocabulary is masked; at the end of [0, 1) and elsewhere."""
    logits, _ = made(1, vocabulary)
    masked = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1)) < 0.8
    masked[0] = masked[-1] = True
    masked[1] = False
    logits[:, masked] = -torch.inf
    uniform = torch.cat([torch.linspace(0, LAST, 99, dtype=torch.float64), torch.tensor([LAST])])
    logits = logits.expand(100, -1)
    agree(logits, uniform, Sampling(1, **cut))
    tokens, log_probs = sample_tokens(logits, uniform, Sampling(1, **cut))
    assert not masked[tokens].any()
    assert log_probs.isfinite().all()


@pytest.mark.parametrize("cut", [*CUTS, {"temperature": 0}], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 50, 64, 3000])
@pytest.mark.parametrize("number", [0, 0.4, LAST])
def test_logits_that_are_not_finite_are_reported(
    cut: dict[str, float], vocabulary: int, number: float
) -> None:
    """Wherever in the row: one of a vector, or after the last whole one."""
    places = sorted({0, vocabulary // 2, vocabulary - 1})
    logits, uniform = made(2 * len(places) + 2, vocabulary)
    for row, place in enumerate(places):
        logits[2 * row, place], logits[2 * row + 1, place] = torch.nan, torch.inf
    logits[-2] = -torch.inf
    tokens, log_probs = sample_tokens(logits, uniform.fill_(number), Sampling(1, **cut))
    assert log_probs.isfinite().tolist() == [False] * (2 * len(places) + 1) + [True]
    assert tokens.min() >= 0
    assert tokens.max() < vocabulary
    # The row next to them is as it is alone.
    alone = sample_tokens(logits[-1:], uniform[-1:], Sampling(1, **cut))
    assert (tokens[-1], log_probs[-1]) == (alone[0].item(), alone[1].item())


def draw_alone(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Row by row."""
    rows = [sample_tokens(logits[r, None], uniform[r, None], sampling) for r in range(len(logits))]
    return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])


@pytest.mark.parametrize("cut", [*CUTS, {"temperature": 0}], ids=str)
@pytest.mark.parametrize("shape", [(1, 40_000), (2, 70_001), (70, 900), (7, 9000)])
def test_neither_threads_nor_other_rows_change_a_bit(
    cut: dict[str, float], shape: tuple[int, int]
) -> None:
    logits, uniform = made(*shape)
    order = torch.randperm(len(uniform), generator=torch.Generator().manual_seed(3))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(sample_tokens(logits, uniform, Sampling(1, **cut)))
            moved = sample_tokens(logits[order], uniform[order], Sampling(1, **cut))
            back = order.argsort()
            found.append((moved[0][back], moved[1][back]))
    finally:
        torch.set_num_threads(before)
    found.append(draw_alone(logits, uniform, Sampling(1, **cut)))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_memory_that_nothing_was_written_to_is_not_read(
    cut: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, uniform = made(5, 2100)
    clean = sample_tokens(logits, uniform, Sampling(1, **cut))
    poison(monkeypatch)
    assert all(map(torch.equal, clean, sample_tokens(logits, uniform, Sampling(1, **cut))))


def test_greedy_takes_the_first_of_the_largest() -> None:
    for place in (0, 255, 256, 511, 999):
        logits = torch.zeros(2, 1000)
        logits[0, place:] = 3
        logits[1, [place, 999]] = 3
        tokens, log_probs = sample_tokens(
            logits, torch.rand(2).double(), Sampling(1, 0, 3, 0.5, 0.5)
        )
        assert tokens.tolist() == [place, place]
        want = logits.double().log_softmax(-1)[:, place]
        torch.testing.assert_close(log_probs, want, rtol=1e-13, atol=1e-13)


def test_more_tokens_than_there_are() -> None:
    """Also a number that C has no integer for."""
    logits, uniform = made(6, 1300)
    for top_k in (1300, 1301, 2**70):
        tokens, log_probs = sample_tokens(logits, uniform, Sampling(1, top_k=top_k))
        # In falling order, as where something is left out.
        want = sampler._sample_tokens(logits, uniform, Sampling(1, top_k=1300))
        assert torch.equal(tokens, want[0])
        torch.testing.assert_close(log_probs, want[1], rtol=1e-13, atol=1e-13)


def test_no_rows() -> None:
    for sampling in (Sampling(1), Sampling(1, top_k=2)):
        tokens, log_probs = sample_tokens(torch.empty(0, 9), torch.empty(0).double(), sampling)
        assert len(tokens) == len(log_probs) == 0


# ---------------------------------------------------------------- logits


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


def operands(rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
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
    states, weight, bias = operands(*shape)
    want = states.double() @ weight.double().T + (bias.double() if biased else 0)
    poison(monkeypatch)
    message = compiled.HeadWeight(weight, bias if biased else None)(states)
    assert message.shape == want.shape
    # One rounding a term, of at most the sum of their sizes.
    most = (states.abs() @ weight.abs().T + bias.abs()).max().item()
    assert (message - want).abs().max().item() <= 6e-8 * (shape[1] + 1) * most


def test_a_row_does_not_depend_on_the_others_or_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, bias = operands(61, 96, 1000)
    whole = compiled.HeadWeight(weight, bias)(states)
    for rows in (slice(0, 1), slice(7, 20), slice(40, 61)):
        assert torch.equal(compiled.HeadWeight(weight, bias)(states[rows]), whole[rows])
    monkeypatch.setattr(compiled, "SHARED_PRODUCTS", 1)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(compiled.HeadWeight(weight, bias)(states), whole)


def test_what_is_no_number_stays_in_its_row_and_column() -> None:
    states, weight, bias = operands(20, 48, 70)
    states[3, 5], weight[40, 2] = torch.nan, torch.inf
    message = compiled.HeadWeight(weight, bias)(states).isfinite()
    message[3], message[:, 40] = ~message[3], ~message[:, 40]
    message[3, 40] = True
    assert message.all()


def test_a_steady_head_takes_compiled_code_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, bias = operands(6, 32, 50)
    calls: list[int] = []
    real = compiled.HeadWeight.__call__

    def counted(own: compiled.HeadWeight, x: Tensor) -> Tensor:
        calls.append(len(x))
        return real(own, x)

    monkeypatch.setattr(compiled.HeadWeight, "__call__", counted)
    wide = torch.cat([states, states], dim=1)[:, :32]
    halves = states.to(torch.bfloat16)
    for states_ in (states, wide, halves):
        message = steady_logits(Head(weight, bias))(states_)
        torch.testing.assert_close(message, logits(states_, Head(weight, bias)))
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
    states, weight, bias = operands(9, 24, 40)
    message = steady_logits(Head(weight, bias, scale=0.5, softcap=3.0))(states)
    want = 3 * torch.tanh(0.5 * (states @ weight.T + bias) / 3)
    torch.testing.assert_close(message, want)
