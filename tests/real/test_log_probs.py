"""A trained model's log-probabilities, packed and in bfloat16, and its greedy completions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.config.model import Autocast
from keel.models.packed import pack
from keel.models.policy import Policy, load_policy
from tests.real.greedy import greedy
from tests.real.model import QUESTIONS, STORY, spec, stock, stock_log_probs

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("log-probs")]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(spec(), 0)


@pytest.fixture(scope="module")
def sequences(policy: Policy) -> list[tuple[Tensor, int]]:
    """Conversations of ragged lengths with what begins the answer: the story, cut or whole."""
    words = STORY.split()
    out = []
    for number, question in enumerate(QUESTIONS[:6]):
        prompt = policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        answer = policy.tokenizer(" ".join(words[: 6 * (number + 1)])).input_ids
        out.append((torch.tensor([*prompt, *answer]), len(prompt)))
    return out


@pytest.fixture(scope="module")
def exact(sequences: list[tuple[Tensor, int]]) -> Tensor:
    """The stock model's in float32, one sequence at a time."""
    model = stock()
    return torch.cat([stock_log_probs(model, *one) for one in sequences])


@torch.no_grad()
def packed_log_probs(policy: Policy, sequences: list[tuple[Tensor, int]]) -> Tensor:
    targets = [torch.arange(prompt, len(tokens)) for tokens, prompt in sequences]
    return policy.scores(pack([tokens for tokens, _ in sequences], targets)).log_prob_N


def test_packed_log_probs_equal_separate_ones(
    policy: Policy, sequences: list[tuple[Tensor, int]], exact: Tensor
) -> None:
    """float32: sums in another order over 30 layers."""
    assert len(exact) > 100
    torch.testing.assert_close(packed_log_probs(policy, sequences), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "autocast"), [("float32", "bfloat16"), ("bfloat16", False)])
def test_bfloat16_is_as_near_to_float32_as_stock(
    dtype: str, autocast: Autocast, sequences: list[tuple[Tensor, int]], exact: Tensor
) -> None:
    """In the mean over the tokens; with bfloat16 weights both round alike, hence the 5 %."""
    ours = packed_log_probs(load_policy(spec(dtype=dtype, autocast=autocast), 0), sequences)
    model = stock(getattr(torch, dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not False):
        theirs = torch.cat([stock_log_probs(model, *one) for one in sequences])
    far, stock_far = ((one - exact).abs().mean() for one in (ours, theirs))
    assert stock_far > 1e-3
    assert far < 1.05 * stock_far


def test_greedy_completions_equal_generate() -> None:
    found = greedy(QUESTIONS, max_tokens=40)
    assert sum(one.tokens for one in found) > 100
    assert [one for one in found if not one.excused] == []
    assert sum(one.gap is None for one in found) >= len(found) - 1
