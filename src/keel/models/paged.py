"""Attention of one new token for each row over a key-value cache of pages, for decoding.

A layer's cache is a pool of pages of `PAGE_TOKENS` tokens; a row is a list of pages and a length,
so rows can share the pages of a prompt, and a row that ends gives its pages back. Nothing here
reads a number on the host or allocates by what a tensor holds: a CUDA graph can capture all of it.

On CUDA the work is done by Triton kernels (`kernels.paged`); elsewhere, and in float64, by torch,
which is also what the kernels are tested against.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.models.attention import Rules, attention_weights
from keel.models.kernels import has_triton

PAGE_TOKENS = 64
"""Tokens that a page holds."""


def store(
    keys: Float[Tensor, "pages Hkv page D"],
    values: Float[Tensor, "pages Hkv page D"],
    key_T: Float[Tensor, "T Hkv D"],
    value_T: Float[Tensor, "T Hkv D"],
    page_T: Int[Tensor, "T"],
    place_T: Int[Tensor, "T"],
) -> None:
    """Write tokens into the pool in place, in its dtype: token t at place `place_T[t]` (0 to
    `PAGE_TOKENS − 1`) of page `page_T[t]`.

    Tokens at the same place overwrite each other in any order. Page 0 is a scratch page that no row
    reads: write there what should not be kept.
    """
    if _kernels_apply(keys, values, key_T):
        from keel.models.kernels import paged as kernels

        return kernels.store(keys, values, key_T, value_T, page_T, place_T)
    page_T, place_T = page_T.long(), place_T.long()
    keys[page_T, :, place_T] = key_T.to(keys.dtype)
    values[page_T, :, place_T] = value_T.to(values.dtype)
    return None


def attend_pages(
    query_R: Float[Tensor, "R H D"],
    keys: Float[Tensor, "pages Hkv page D"],
    values: Float[Tensor, "pages Hkv page D"],
    pages_R: Int[Tensor, "R P"],
    length_R: Int[Tensor, "R"],
    rules: Rules,
    *,
    splits: int = 1,
) -> Float[Tensor, "R H D"]:
    """The attention output of each row's new token, in the query's dtype.

    A row attends to its first `length_R` tokens, the new one included, or with a window to the last
    `rules.window` of them; length 0 gives 0. `pages_R` holds each row's pages in order; after the
    last that a row uses come any valid page numbers, which have no effect. The query is rounded to
    the pool's dtype; the softmax is taken in float32 at least. `splits` is the number of programs
    over which the kernel spreads the pages of a row: more than 1 pays if contexts are long and rows
    times key-value heads are fewer than the card's processors.
    """
    if splits < 1:
        raise ValueError(f"splits = {splits}: give at least 1")
    if _kernels_apply(keys, values, query_R):
        from keel.models.kernels import paged as kernels

        rule = rules.scaling, rules.window, rules.softcap, rules.sinks
        return kernels.attend_pages(query_R, keys, values, pages_R, length_R, *rule, splits)
    rows, heads, width = query_R.shape
    kv_heads, places = keys.shape[1], pages_R.shape[1] * PAGE_TOKENS
    length = length_R.unsqueeze(1)
    place = torch.arange(places, device=query_R.device)
    visible = place < length
    if rules.window is not None:
        visible &= place >= length - rules.window
    dtype = torch.promote_types(keys.dtype, torch.float32)
    query = query_R.to(keys.dtype).to(dtype).view(rows, kv_heads, -1, width)
    # What a page holds beyond a row's length may be no number, and 0 times that is no 0.
    unseen = ~visible.view(rows, 1, places, 1)
    key, value = (
        pool[pages_R.long()].transpose(1, 2).reshape(rows, kv_heads, places, -1).to(dtype)
        for pool in (keys, values)
    )
    scores = query @ key.masked_fill(unseen, 0).transpose(-1, -2)
    sinks = None if rules.sinks is None else rules.sinks.view(1, kv_heads, -1, 1)
    weights = attention_weights(scores, rules, visible.view(rows, 1, 1, places), sinks)
    out = (weights @ value.masked_fill(unseen, 0)).reshape(rows, heads, -1)
    return out.masked_fill(length_R.view(-1, 1, 1) == 0, 0).to(query_R.dtype)


def _kernels_apply(keys: Tensor, values: Tensor, new: Tensor) -> bool:
    """Whether the Triton kernels take these tensors."""
    return (
        keys.is_cuda
        and has_triton()
        and torch.float64 not in (keys.dtype, new.dtype)
        and keys.shape == values.shape
        and keys.stride() == values.stride()
        and keys.stride(-1) == 1
        and keys.shape[-1] <= 256
    )
