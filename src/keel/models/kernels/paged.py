"""Decoding's attention over pages, and the store into them, as Triton kernels.

Attention here is bound by memory: a step reads each key and value once, 4 bytes an element pair in
bfloat16 for `2 · H / Hkv` multiplications each, far below what the matrix units could do. So one
program takes one row and one key-value head with all query heads that share it, and no key is read
twice. Its query tile has 16 rows, the fewest that `tl.dot` multiplies (more if more heads share);
the rows beyond the heads are zeros and cost nothing that the bus would notice. A page of 64 keys is
one contiguous block of 64 · D elements, 16 KiB in bfloat16 at D = 128: one step of the loop, while
the next pages are on their way. By registers and shared memory at least two such programs fit a
processor, so with enough rows more than 64 KiB of each processor's reads are in flight; a bus of
4 TB/s with a latency of 0.8 µs asks for about 26 for each of 132 processors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def add_page(query, keys, values, visible, inside, scaling, softcap, top, total, mixed):
    """The running softmax with one more page, of which at least one key is visible.

    `top` is the largest score of each head so far (to base 2), `total` the sum of the weights
    relative to it, `mixed` the sum of the values under these weights.
    """
    k = tl.load(keys, mask=visible[None, :] & inside[:, None], other=0.0)
    v = tl.load(values, mask=visible[:, None] & inside[None, :], other=0.0)
    score = tl.dot(query, k, input_precision="ieee") * scaling
    if softcap is not None:
        # tanh(x) = 1 − 2 / (exp(2x) + 1), without overflow at either end
        score = softcap - 2.0 * softcap / (tl.exp(2.0 * (score / softcap)) + 1.0)
    score = tl.where(visible[None, :], score * LOG2E, LOWEST)
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(top - higher)
    mixed = tl.dot(weight.to(v.dtype), v, acc=mixed * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weight, 1), mixed


@triton.jit
def attend_kernel(
    query,
    keys,
    values,
    pages,
    lengths,
    sinks,
    out,
    norm,
    scaling,
    softcap,
    query_row,
    query_head,
    page_step,
    head_step,
    place_step,
    pages_row,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One row, one key-value head and one share of the row's pages.

    `norm` is None if there is one share, and `out` is then the result; else `out` is the share's
    own attention and `norm` the logarithm to base 2 of its sum of weights.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    start, stop = first // PAGE, (length + PAGE - 1) // PAGE
    share = (stop - start + SPLITS - 1) // SPLITS
    begin = start + part * share
    end = tl.minimum(begin + share, stop)

    member, lane, place = tl.arange(0, TILE), tl.arange(0, PADDED), tl.arange(0, PAGE)
    head = kv_head * GROUP + member
    inside = lane < WIDTH
    mine = (member < GROUP)[:, None] & inside[None, :]
    at = row * query_row + head[:, None] * query_head + lane[None, :]
    q = tl.load(query + at, mask=mine, other=0.0).to(keys.dtype.element_ty)
    key_at = kv_head * head_step + place[None, :] * place_step + lane[:, None]
    value_at = kv_head * head_step + place[:, None] * place_step + lane[None, :]

    top = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if sinks is not None and part == 0:
        # A sink is a score that has no value: the sum of weights starts with it.
        top = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    mixed = tl.zeros([TILE, PADDED], tl.float32)
    for page in range(begin, end):
        number = tl.load(pages + row * pages_row + page).to(tl.int64)
        token = page * PAGE + place
        visible = (token >= first) & (token < length)
        k = keys + number * page_step + key_at
        v = values + number * page_step + value_at
        top, total, mixed = add_page(q, k, v, visible, inside, scaling, softcap, top, total, mixed)
    # Without a token nothing was added: the output is 0, and the norm −inf, which weighs nothing.
    total = tl.where(total == 0.0, 1.0, total)
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    cell = (row * tl.num_programs(1) * GROUP + head) * SPLITS + part
    tl.store(out + cell[:, None] * WIDTH + lane[None, :], mixed, mask=mine)
    if norm is not None:
        tl.store(norm + cell, top + tl.log2(total), mask=member < GROUP)


@triton.jit
def combine_kernel(
    parts,
    norm,
    out,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """One row and head: the mean of its shares, weighted by their sums of weights."""
    cell = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SHARES)
    lane = tl.arange(0, PADDED)
    size = tl.load(norm + cell * SPLITS + part, mask=part < SPLITS, other=LOWEST)
    top = tl.max(size, 0)
    weight = tl.exp2(size - tl.where(top == LOWEST, 0.0, top))
    total = tl.sum(weight, 0)
    share = tl.load(
        parts + (cell * SPLITS + part[:, None]) * WIDTH + lane[None, :],
        mask=(part < SPLITS)[:, None] & (lane < WIDTH)[None, :],
        other=0.0,
    )
    mean = tl.sum(share * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + cell * WIDTH + lane, mean.to(out.dtype.element_ty), mask=lane < WIDTH)


@triton.jit
def store_kernel(
    keys,
    values,
    key,
    value,
    pages,
    places,
    page_step,
    head_step,
    place_step,
    key_token,
    key_head,
    value_token,
    value_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: its keys and values of all heads to their place in its page."""
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + token).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    each = tl.arange(0, BLOCK)
    inside = each < HEADS * WIDTH
    head, lane = each // WIDTH, each % WIDTH
    k = tl.load(key + token * key_token + head * key_head + lane, mask=inside)
    to = page * page_step + head * head_step + place * place_step + lane
    tl.store(keys + to, k.to(keys.dtype.element_ty), mask=inside)
    v = tl.load(value + token * value_token + head * value_head + lane, mask=inside)
    tl.store(values + to, v.to(values.dtype.element_ty), mask=inside)


def shape_of(width: int, group: int, itemsize: int) -> dict[str, int]:
    """The tile of `attend_kernel` and how it is compiled: `TILE`, `PADDED`, warps and stages.

    A page's number is itself read from memory, which takes Triton's pipeline two stages before the
    page: of 5 stages, two pages of keys and values are on their way while one is used, of 3 one.
    Pages of more than 16 KiB have 3, so that a program fits the shared memory of sm_80 (163 KiB).
    """
    padded = max(16, triton.next_power_of_2(width))
    return {
        "TILE": max(16, triton.next_power_of_2(group)),
        "PADDED": padded,
        "num_warps": 4 if padded <= 128 else 8,
        "num_stages": 5 if padded * itemsize <= 256 else 3,
    }


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    splits: int,
) -> Tensor:
    """`keel.models.paged.attend_pages` by one kernel, or two if `splits` is more than 1."""
    rows, heads, width = query.shape
    kv_heads, page = keys.shape[1:3]
    query, pages, lengths = _dense(query), _dense(pages), _dense(lengths)
    group = heads // kv_heads
    shape = shape_of(width, group, keys.element_size())
    out = query.new_empty(rows, heads, width)
    parts, norm = out, None
    if splits > 1:
        parts = query.new_empty((rows, heads, splits, width), dtype=torch.float32)
        norm = query.new_empty((rows, heads, splits), dtype=torch.float32)
    attend_kernel[rows, kv_heads, splits](
        query,
        keys,
        values,
        pages,
        lengths,
        sinks,
        parts,
        norm,
        scaling,
        softcap,
        *query.stride()[:2],
        *keys.stride()[:3],
        pages.stride(0),
        GROUP=group,
        WIDTH=width,
        PAGE=page,
        SPLITS=splits,
        WINDOW=window or 0,
        **shape,
    )
    if splits > 1:
        combine_kernel[rows * heads,](
            parts,
            norm,
            out,
            WIDTH=width,
            PADDED=shape["PADDED"],
            SPLITS=splits,
            SHARES=triton.next_power_of_2(splits),
            num_warps=1,
        )
    return out


def store(
    keys: Tensor, values: Tensor, key: Tensor, value: Tensor, page: Tensor, place: Tensor
) -> None:
    """`keel.models.paged.store` by one kernel; torch would need a launch for each cast and pool."""
    tokens, heads, width = key.shape
    key, value, page, place = _dense(key), _dense(value), _dense(page), _dense(place)
    store_kernel[tokens,](
        keys,
        values,
        key,
        value,
        page,
        place,
        *keys.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(heads * width),
    )


def _dense(x: Tensor) -> Tensor:
    """The kernels take any strides but the last, which is 1; keys and values have the same."""
    return x if x.stride(-1) == 1 else x.contiguous()
