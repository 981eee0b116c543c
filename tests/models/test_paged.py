"""Attention over pages: torch's path in float64 against scaled dot-product attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keel.models.attention import Rules, attention_weights
from keel.models.paged import PAGE_TOKENS, attend_pages, store

EXACT = 1e-12
"""float64 sums in another order."""


@dataclass(frozen=True)
class Cache:
    """Rows of keys and values, and the same in a pool of pages in a random order."""

    query_R: Tensor
    key_RL: Tensor
    value_RL: Tensor
    keys: Tensor
    values: Tensor
    pages_R: Tensor
    length_R: Tensor


def cache(
    lengths: list[int], heads: tuple[int, int], width: int, dtype: torch.dtype, spare: int = 1
) -> Cache:
    """Everything that no row may read is NaN; `spare` pages follow the pages that a row uses."""
    count, kv_heads = heads
    torch.manual_seed(len(lengths) * width + count)
    rows, most = len(lengths), -(-max(lengths) // PAGE_TOKENS) + spare
    key, value = (torch.randn(rows, most * PAGE_TOKENS, kv_heads, width) for _ in range(2))
    numbers = 1 + torch.randperm(rows * most).view(rows, most)
    pool = torch.full((1 + rows * most, kv_heads, PAGE_TOKENS, width), float("nan"), dtype=dtype)
    made = Cache(
        torch.randn(rows, count, width).to(dtype),
        key.to(dtype),
        value.to(dtype),
        pool,
        pool.clone(),
        numbers.int(),
        torch.tensor(lengths, dtype=torch.int32),
    )
    for row, length in enumerate(lengths):
        place = torch.arange(length)
        at = numbers[row][place // PAGE_TOKENS], place % PAGE_TOKENS
        made.keys[at[0], :, at[1]] = made.key_RL[row, :length]
        made.values[at[0], :, at[1]] = made.value_RL[row, :length]
    return made


def expected(made: Cache, rules: Rules) -> Tensor:
    """Row by row in float64, with no page: (R, H, D)."""
    out = torch.zeros(made.query_R.shape, dtype=torch.float64)
    shared = made.query_R.shape[1] // made.keys.shape[1]
    for row, length in enumerate(made.length_R.tolist()):
        first = 0 if rules.window is None else max(0, length - rules.window)
        if length == 0:
            continue
        query = made.query_R[row].double().unsqueeze(1)
        key, value = (
            x[row, first:length].double().transpose(0, 1).repeat_interleave(shared, 0)
            for x in (made.key_RL, made.value_RL)
        )
        if rules.softcap is None and rules.sinks is None:
            part = F.scaled_dot_product_attention(query, key, value, scale=rules.scaling)
        else:
            sinks = None if rules.sinks is None else rules.sinks.double().view(-1, 1, 1)
            part = attention_weights(query @ key.mT, rules, None, sinks) @ value
        out[row] = part[:, 0]
    return out


LENGTHS = [1, 63, 64, 65, 0, 200]


@pytest.mark.parametrize(
    ("heads", "width", "rules"),
    [
        ((4, 4), 64, Rules(0.125)),
        ((14, 2), 80, Rules(0.3, window=70)),
        ((3, 1), 96, Rules(0.1, softcap=2.0)),
        ((16, 1), 128, Rules(0.1, window=1)),
        ((8, 2), 256, Rules(0.1, window=64, softcap=5.0, sinks=torch.linspace(-3, 3, 8))),
    ],
    ids=["plain", "window", "softcap", "itself", "all"],
)
def test_pages_give_the_attention_of_their_rows(
    heads: tuple[int, int], width: int, rules: Rules
) -> None:
    made = cache(LENGTHS, heads, width, torch.float64)
    given = made.query_R, made.keys, made.values, made.pages_R, made.length_R
    found = attend_pages(*given, rules)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected(made, rules), rtol=0, atol=EXACT)
    assert torch.equal(attend_pages(*given, rules, splits=4), found)


def test_rows_of_length_zero_are_zero_with_sinks() -> None:
    made = cache([0, 5], (2, 1), 16, torch.float32)
    rules = Rules(0.25, sinks=torch.tensor([0.5, -0.5]))
    given = made.query_R, made.keys, made.values, made.pages_R, made.length_R
    found = attend_pages(*given, rules)
    assert found[0].tolist() == torch.zeros(2, 16).tolist()
    assert found[1].abs().min() > 0


def test_softmax_of_half_precision_is_taken_in_float32() -> None:
    made = cache([130, 64], (4, 2), 64, torch.bfloat16)
    given = made.query_R, made.keys, made.values, made.pages_R, made.length_R
    found = attend_pages(*given, Rules(0.125))
    assert found.dtype == torch.bfloat16
    wanted = expected(made, Rules(0.125)).bfloat16()
    # One rounding of the result: at most one unit in the last place of 8 bits.
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)


def test_no_splits_are_refused() -> None:
    made = cache([1], (1, 1), 16, torch.float32)
    given = made.query_R, made.keys, made.values, made.pages_R, made.length_R
    with pytest.raises(ValueError, match="splits = 0: give at least 1"):
        attend_pages(*given, Rules(1.0), splits=0)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_store_writes_the_places_and_no_others(dtype: torch.dtype, index: torch.dtype) -> None:
    keys, values = (torch.zeros(4, 2, PAGE_TOKENS, 8, dtype=dtype) for _ in range(2))
    key_T, value_T = (torch.randn(3, 2, 8) for _ in range(2))
    page_T, place_T = torch.tensor([2, 1, 2], dtype=index), torch.tensor([63, 0, 5], dtype=index)
    store(keys, values, key_T, value_T, page_T, place_T)
    for pool, token_T in ((keys, key_T), (values, value_T)):
        wanted = torch.zeros_like(pool)
        for token, (page, place) in enumerate(zip(page_T, place_T, strict=True)):
            wanted[page, :, place] = token_T[token].to(dtype)
        assert torch.equal(pool, wanted)
