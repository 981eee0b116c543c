"""One GPU: the kernels of decoding in bfloat16 and float32, and captured in a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from keel.models import paged
from keel.models.attention import Rules
from keel.models.draw import draw_tokens
from keel.models.head import Head
from keel.models.head import readout as readout_of
from keel.models.kernels import has_triton, readout
from tests.gpu import needs_gpus
from tests.models.kernels import triton_cases as cases
from tests.models.test_paged import Cache, cache, expected

pytestmark = needs_gpus(1)
DEVICE = "cuda"
KINDS = {
    # Weights and results of order 1 rounded to 8 bits.
    "bfloat16": (torch.bfloat16, 1e-2),
    "float16": (torch.float16, 2e-3),
    # Exponentials of the card: two units in the last place, of scores of 10.
    "float32": (torch.float32, 2e-5),
}


@pytest.fixture(autouse=True)
def kernels_apply() -> None:
    """Without Triton the public functions would compare torch with itself."""
    assert has_triton(), "torch's CUDA builds bring triton: this one has none"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", cases.CASES)
def test_attention_over_pages_equals_float64(name: str, kind: str) -> None:
    cases.check_attention(paged.attend_pages, name, *KINDS[kind], DEVICE)


@pytest.mark.parametrize("splits", range(1, 9))
def test_splits_agree(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(0.2, 500, 10.0, cases.SINKS[:4])
    monkeypatch.setitem(cases.CASES, "here", ([700, 0, 1, 64], (4, 2), 64, rules, splits))
    cases.check_attention(paged.attend_pages, "here", *KINDS["bfloat16"], DEVICE)


def test_query_in_float32_over_a_bfloat16_pool() -> None:
    cases.check_mixed_precision(paged.attend_pages, torch.bfloat16, DEVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_store_equals_the_torch_path(kind: str) -> None:
    cases.check_store(paged.store, KINDS[kind][0], DEVICE)


def moved(made: Cache, lengths: list[int]) -> Cache:
    return replace(made, length_R=torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("splits", [1, 4])
def test_lengths_change_between_replays(splits: int) -> None:
    rules = Rules(0.125, window=150)
    made = cache([400, 300, 64], (14, 2), 64, torch.bfloat16)
    there = cases.placed(made, DEVICE)
    given: Any = there.query_R, there.keys, there.values, there.pages_R, there.length_R, rules
    paged.attend_pages(*given, splits=splits)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged.attend_pages(*given, splits=splits)
    for lengths in ([400, 300, 64], [1, 0, 63], [399, 150, 64]):
        there.length_R.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(
            out.cpu().double(), expected(moved(made, lengths), rules), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("size", [11, 300, 5000, 151_936, 262_144])
def test_tokens_equal_those_in_float64(
    size: int, temperature: float, spread: float, dtype: torch.dtype
) -> None:
    cases.check_tokens(draw_tokens, size, temperature, spread, dtype, DEVICE)


def test_ends_and_ties_choose_as_on_a_cpu() -> None:
    cases.check_mass(draw_tokens, DEVICE)
    cases.check_greedy_ties(draw_tokens, DEVICE)
    for temperature in (0.0, 1.0):
        cases.check_not_numbers(draw_tokens, temperature, DEVICE)


def test_frequencies_of_tokens_pass_chi_square() -> None:
    cases.check_frequencies(draw_tokens, 5000, 100_000, DEVICE)


def test_tokens_are_drawn_in_a_graph() -> None:
    logits = torch.randn(4, 9000, device=DEVICE)
    uniform = torch.rand(4, dtype=torch.float64, device=DEVICE)
    draw_tokens(logits, uniform, 0.8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, log_prob = draw_tokens(logits, uniform, 0.8)
    for number in (0.0, 0.4, 0.9):
        uniform.fill_(number)
        graph.replay()
        wanted = draw_tokens(logits.cpu(), uniform.cpu(), 0.8)
        assert torch.equal(token.cpu(), wanted[0])
        torch.testing.assert_close(log_prob.cpu(), wanted[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", cases.READOUTS)
def test_readout_equals_float64(name: str, entropy: bool) -> None:
    cases.check_readout(readout, name, entropy, DEVICE)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_head_on_a_gpu_equals_that_on_a_cpu(softcap: float | None) -> None:
    """Values and gradients of all inputs, over several chunks."""
    torch.manual_seed(0)
    states, weight, bias = torch.randn(70, 16), torch.randn(310, 16), torch.randn(310)
    tokens, grads = torch.randint(0, 300, (70,)), torch.randn(2, 70)
    found = []
    for device in ("cpu", DEVICE):
        given = [x.to(device, copy=True).requires_grad_() for x in (states, weight, bias)]
        head = Head(given[1], given[2], 0.5, softcap, tokens=300)
        options: dict[str, Any] = {"entropy": True, "chunk_bytes": 40_000}
        out = readout_of(given[0], head, tokens.to(device), 0.8, **options)
        values = [out.log_prob_N, out.entropy_N]
        torch.autograd.backward(values, [*grads.to(device)])
        found.append([x.detach().cpu() for x in (*values, *(x.grad for x in given))])  # type: ignore[union-attr]
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)
