"""Tokens by inversion: torch's path against the sampler of the engines, and χ²."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from keel.engines.sampler import sample_tokens
from keel.models.draw import draw_tokens
from keel.types import Sampling

LAST = 1 - 2.0**-53


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_tokens_equal_those_of_the_sampler(temperature: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(200, 300)).to(dtype)
    uniform = torch.rand(200, dtype=torch.float64)
    uniform[:2] = torch.tensor([0, LAST], dtype=torch.float64)
    token, log_prob = draw_tokens(logits, uniform, temperature)
    # Doubles keep the sampler on its torch path, whose sums are taken in the same order.
    wanted = sample_tokens(logits.double(), uniform, Sampling(8, temperature=temperature))
    assert (token.dtype, log_prob.dtype) == (torch.int64, torch.float32)
    assert torch.equal(token, wanted[0])
    assert torch.equal(log_prob, wanted[1].float())


def test_a_token_without_mass_is_never_chosen() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(3, 1)
    uniform = torch.tensor([0.0, 0.5, LAST], dtype=torch.float64)
    token, log_prob = draw_tokens(logits, uniform, 0.7)
    assert token.tolist() == [1, 3, 3]
    assert log_prob.tolist() == pytest.approx([math.log(0.5)] * 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_show(temperature: float) -> None:
    logits = torch.randn(3, 50)
    logits[0, 7] = math.nan
    logits[1] = -math.inf
    token, log_prob = draw_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), temperature)
    assert log_prob.isnan().tolist() == [True, True, False]
    assert ((token >= 0) & (token < 50)).all()


def test_frequencies_pass_chi_square() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 20)
    count = 20_000
    token, _ = draw_tokens(logits.expand(count, -1), torch.rand(count, dtype=torch.float64), 1.5)
    wanted = (logits[0].double() / 1.5).softmax(0) * count
    assert stats.chisquare(token.bincount(minlength=20).numpy(), wanted.numpy()).pvalue > 1e-3


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature = -1"):
        draw_tokens(torch.zeros(1, 2), torch.zeros(1, dtype=torch.float64), -1)
