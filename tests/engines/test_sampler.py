"""One uniform number chooses one token by the inverse of the cumulative distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.engines import sampler
from keel.engines.sampler import draw, sample_tokens
from keel.models.kernels import sampling as compiled
from keel.types import Sampling


@pytest.fixture(scope="module", params=["compiled", "torch"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way in which tokens are drawn on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(compiled, "sample_library", lambda: None)
        yield request.param


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), [0.1, 0.4, 0.05, 0.3, 0.15]),
        (Sampling(1, temperature=0.5), [0.01, 0.16, 0.0025, 0.09, 0.0225]),
        (Sampling(1, top_k=2), [0, 0.4, 0, 0.3, 0]),
        (Sampling(1, top_k=9), [0.1, 0.4, 0.05, 0.3, 0.15]),
        # 0.4 alone is too little, 0.4 + 0.3 reaches 0.6.
        (Sampling(1, top_p=0.6), [0, 0.4, 0, 0.3, 0]),
        (Sampling(1, top_p=0.72), [0, 0.4, 0, 0.3, 0.15]),
        (Sampling(1, top_p=1e-9), [0, 1, 0, 0, 0]),
        # 0.46 of what the three likeliest hold, 0.85, is 0.391: less than 0.4.
        (Sampling(1, top_k=3, top_p=0.46), [0, 0.4, 0, 0, 0]),
        (Sampling(1, min_p=0.3), [0, 0.4, 0, 0.3, 0.15]),
        (Sampling(1, min_p=1), [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_frequencies_on_a_grid_are_the_distribution(
    sampling: Sampling, expected: list[float]
) -> None:
    """Numbers on a regular grid hit each token in proportion, to one point of the grid."""
    count = 10_000
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log().expand(count, 5)
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, log_probs = sample_tokens(logits, uniform, sampling)
    prob = np.array(expected) / sum(expected)
    np.testing.assert_allclose(np.bincount(tokens, minlength=5), prob * count, atol=1.01)
    # The logits are float32, of which 1e-6 is a few last places.
    np.testing.assert_allclose(log_probs, np.log(prob[tokens]), atol=1e-6)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    tokens, log_probs = sample_tokens(
        logits, torch.tensor([0.99]).double(), Sampling(1, temperature=0)
    )
    assert tokens.tolist() == [1]
    assert log_probs.item() == pytest.approx(logits[0].double().log_softmax(0)[1].item())


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.999999}, {"min_p": 1e-9}])
@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_no_number_chooses_a_token_without_mass(number: float, options: dict) -> None:
    """Neither end of [0, 1) falls on a token of probability 0."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, 0.3, -torch.inf, -torch.inf]])
    uniform = torch.tensor([number], dtype=torch.float64)
    tokens, log_probs = sample_tokens(logits, uniform, Sampling(1, **options))
    assert tokens.item() in (1, 3, 4)
    assert torch.isfinite(log_probs).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(1, 40),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_kept_probabilities_sum_to_one(
    seed: int, vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Over a fine grid every kept token is hit, and the log-probabilities reported sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator)
    sampling = Sampling(1, temperature, top_k, top_p, min_p)
    uniform = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    tokens, log_probs = sample_tokens(logits.expand(4000, -1), uniform, sampling)
    seen = {int(token): float(log_prob) for token, log_prob in zip(tokens, log_probs, strict=True)}
    assert 0 < len(seen) <= (top_k or vocabulary)
    # A token of less mass than the grid's 1/4000 may be missed; there are at most 40.
    assert sum(np.exp(list(seen.values()))) == pytest.approx(1, abs=40 / 4000)
    assert sum(np.exp(list(seen.values()))) <= 1 + 1e-9


def test_chunks_over_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniform = torch.randn(7, 11), torch.rand(7, dtype=torch.float64)
    sampling = Sampling(1, top_p=0.8)
    whole = sample_tokens(logits, uniform, sampling)
    monkeypatch.setattr(sampler, "_CHUNK", 25)
    for left, right in zip(whole, sample_tokens(logits, uniform, sampling), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9}])
def test_rows_may_lie_apart(options: dict) -> None:
    """Every second row, one for all, by columns; every second number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 40, generator=generator)
    uniform = torch.rand(12, dtype=torch.float64, generator=generator)
    sampling = Sampling(1, **options)
    for given_, numbers in (
        (logits[::2], uniform[:6]),
        (logits[1:2].expand(6, -1), uniform[::2]),
        (logits.t().contiguous().t(), uniform),
        (logits[:, ::2], uniform),
        (logits[:, ::40], uniform),
        (logits[:1, ::40], uniform[:1]),
    ):
        want = sample_tokens(
            given_.clone(memory_format=torch.contiguous_format), numbers.clone(), sampling
        )
        tokens, log_probs = sample_tokens(given_, numbers, sampling)
        assert torch.equal(tokens, want[0])
        # Torch sums in the order of memory.
        torch.testing.assert_close(log_probs, want[1], rtol=1e-13, atol=1e-13)


def test_compiled_code_draws_from_float32_on_a_cpu(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    theirs = compiled.sample_tokens

    def noting(*given_: Any) -> Any:
        asked.append(given_[0].dtype)
        return theirs(*given_)

    monkeypatch.setattr(compiled, "sample_tokens", noting)
    logits, uniform = torch.randn(3, 9), torch.rand(3, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tokens, log_probs = sample_tokens(logits.to(dtype), uniform, Sampling(1))
        assert (tokens.dtype, log_probs.dtype) == (torch.int64, torch.float64)
    assert asked == ([torch.float32] if path == "compiled" else [])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0, "top_k": 3},
        {"temperature": 0.4},
        {"temperature": 0.4, "top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
    ],
    ids=str,
)
def test_each_setting_is_drawn_on_the_device(options: dict) -> None:
    """Without reading by the host; on a CPU the log-probabilities are the sampler's in float32."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 12, generator=generator)
    uniform = torch.rand(200, dtype=torch.float64, generator=generator)
    wanted = sample_tokens(logits, uniform, Sampling(1, **options))
    tokens, log_probs = draw(logits, uniform, Sampling(1, **options))
    assert torch.equal(tokens, wanted[0])
    torch.testing.assert_close(log_probs.double(), wanted[1], rtol=1e-6, atol=1e-6)
