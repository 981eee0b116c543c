"""Sampling by inversion as two Triton kernels, which read each logit once and one block again.

Weights are float32 powers of two relative to the largest logit of their block of the vocabulary.
Sums of blocks are joined in float64, and so is the chosen block's running sum, so the token is that
of float64 unless the number lies within about 1e-6 of an edge between two tokens.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LN2 = tl.constexpr(math.log(2.0))
LOWEST = tl.constexpr(float("-inf"))
BLOCK = 4096
"""Logits that one program reads: 16 KiB of float32, and 64 blocks at a vocabulary of 262,144."""


@triton.jit
def block_kernel(
    logits, tops, sums, row_step, size, scale, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of a row: its largest logit, and the sum of weights relative to it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * row_step + place, mask=place < size, other=LOWEST).to(tl.float32)
    top = tl.max(logit, 0)
    base = tl.where(top == LOWEST, 0.0, top)
    tl.store(tops + row * BLOCKS + block, top)
    tl.store(sums + row * BLOCKS + block, tl.sum(tl.exp2((logit - base) * scale), 0))


@triton.jit
def pick_kernel(
    logits,
    tops,
    sums,
    uniform,
    token,
    log_prob,
    row_step,
    size,
    scale,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """One row: the block that holds the number's share of the mass, then the token within it.

    Sums of a parallel scan may round down from one element to the next, so in both places the first
    element with mass is taken whose running sum exceeds the target, or the last with mass.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    top_of = tl.load(tops + row * BLOCKS + block, mask=block < BLOCKS, other=LOWEST)
    sum_of = tl.load(sums + row * BLOCKS + block, mask=block < BLOCKS, other=0.0).to(tl.float64)
    top = tl.max(top_of, 0)
    base = tl.where(top == LOWEST, 0.0, top)
    mass = sum_of * tl.exp2(((top_of - base) * scale).to(tl.float64))
    total = tl.sum(mass, 0)
    target = tl.load(uniform + row) * total
    found = top_of == top if GREEDY else (tl.cumsum(mass, 0) > target) & (mass > 0)
    last = tl.max(tl.where(mass > 0, block, 0), 0)
    chosen = tl.min(tl.where(found, block, PADDED), 0)
    chosen = tl.where(chosen == PADDED, last, chosen)
    here = block == chosen
    rest = target - tl.sum(tl.where(block < chosen, mass, 0.0), 0)
    rest = rest / tl.sum(tl.where(here, mass, 0.0), 0) * tl.sum(tl.where(here, sum_of, 0.0), 0)

    each = tl.arange(0, BLOCK)
    place = chosen * BLOCK + each
    logit = tl.load(logits + row * row_step + place, mask=place < size, other=LOWEST).to(tl.float32)
    own = tl.max(tl.where(here, top_of, LOWEST), 0)
    weight = tl.exp2((logit - tl.where(own == LOWEST, 0.0, own)) * scale)
    running = tl.cumsum(weight.to(tl.float64), 0)
    inside = logit == top if GREEDY else (running > rest) & (weight > 0)
    last = tl.max(tl.where(weight > 0, each, 0), 0)
    index = tl.min(tl.where(inside, each, BLOCK), 0)
    index = tl.where(index == BLOCK, last, index)
    # Only logits that are not numbers need the bound; their total is not a number either.
    number = tl.minimum(chosen * BLOCK + index, size - 1)
    logit_of = tl.load(logits + row * row_step + number).to(tl.float64)
    value = (logit_of - base.to(tl.float64)) * scale * LN2 - tl.log(total)
    tl.store(token + row, number.to(tl.int64))
    tl.store(log_prob + row, value.to(tl.float32))


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`keel.models.draw.draw_tokens` by the two kernels."""
    rows, size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    uniform = uniform.double().contiguous()
    block = min(BLOCK, max(16, triton.next_power_of_2(size)))
    blocks = -(-size // block)
    tops, sums = (logits.new_empty((rows, blocks), dtype=torch.float32) for _ in range(2))
    token = logits.new_empty(rows, dtype=torch.int64)
    log_prob = logits.new_empty(rows, dtype=torch.float32)
    # Weights are 2 ** ((logit − top) · scale); temperature 0 reports those of temperature 1.
    scale = 1 / (math.log(2) * (temperature or 1))
    warps = 8 if block == BLOCK else 1
    block_kernel[rows, blocks](
        logits, tops, sums, logits.stride(0), size, scale, blocks, block, num_warps=warps
    )
    pick_kernel[rows,](
        logits,
        tops,
        sums,
        uniform,
        token,
        log_prob,
        logits.stride(0),
        size,
        scale,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        BLOCK=block,
        GREEDY=temperature == 0,
        num_warps=warps,
    )
    return token, log_prob
