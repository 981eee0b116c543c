"""Log-probabilities and entropies from logits, and the gradient of the logits, as Triton kernels.

Torch's own operators would read or write a chunk of logits some twenty times; the first kernel
reads it once, the second reads and writes it once. Both take the products W h + b, and apply scale,
soft cap and temperature to each number they read, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(float("-inf"))
BLOCK = 4096
"""Logits that a program holds at a time."""


@triton.jit
def shaped(product, scale, softcap, temperature):
    """The logit over temperature, and the derivative of the soft cap."""
    logit = product * scale
    slope = 1.0
    if softcap is not None:
        # tanh(x) = 1 − 2 / (exp(2x) + 1), without overflow at either end
        bent = 1.0 - 2.0 / (tl.exp(2.0 * (logit / softcap)) + 1.0)
        logit = softcap * bent
        slope = 1.0 - bent * bent
    return logit / temperature, slope


@triton.jit
def statistics_kernel(
    products,
    tokens,
    log_prob,
    entropy,
    normaliser,
    row_step,
    size,
    scale,
    softcap,
    temperature,
    BLOCK: tl.constexpr,
):
    """One row: log Σ exp z, log p of its token and, unless `entropy` is None, −Σ p log p."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        place = start + each
        product = tl.load(products + row * row_step + place, mask=place < size, other=LOWEST)
        logit, _ = shaped(product.to(tl.float32), scale, softcap, temperature)
        logit = tl.where(place < size, logit, LOWEST)
        higher = tl.maximum(top, logit)
        base = tl.where(higher == LOWEST, 0.0, higher)
        shrink, weight = tl.exp(top - base), tl.exp(logit - base)
        # Sums are relative to `base`, those of log-weights too: no large number is multiplied.
        if entropy is not None:
            moved = tl.where(top == LOWEST, 0.0, (top - base) * total)
            mixed = (mixed + moved) * shrink + tl.where(weight > 0.0, weight * (logit - base), 0.0)
        total = total * shrink + weight
        top = higher
    highest = tl.max(top, 0)
    base = tl.where(highest == LOWEST, 0.0, highest)
    shrink = tl.exp(top - base)
    whole = tl.sum(total * shrink, 0)
    log_whole = tl.log(whole)
    token = tl.load(tokens + row)
    own, _ = shaped(
        tl.load(products + row * row_step + token).to(tl.float32), scale, softcap, temperature
    )
    tl.store(normaliser + row, base + log_whole)
    tl.store(log_prob + row, (own - base) - log_whole)
    if entropy is not None:
        moved = tl.where(top == LOWEST, 0.0, (top - base) * total)
        tl.store(entropy + row, log_whole - tl.sum((mixed + moved) * shrink, 0) / whole)


@triton.jit
def gradient_kernel(
    products,
    tokens,
    normaliser,
    entropy,
    grad,
    grad_entropy,
    out,
    row_step,
    out_step,
    size,
    scale,
    softcap,
    temperature,
    BLOCK: tl.constexpr,
):
    """One block of a row: the gradient of W h + b, from those of log-probability and entropy."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    product = tl.load(products + row * row_step + place, mask=inside, other=0.0).to(tl.float32)
    logit, slope = shaped(product, scale, softcap, temperature)
    log_p = logit - tl.load(normaliser + row)
    g = tl.load(grad + row)
    factor = -g
    if entropy is not None:
        factor -= tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    found = tl.exp(log_p) * factor + tl.where(place == tl.load(tokens + row), g, 0.0)
    found = found * slope * (scale / temperature)
    tl.store(out + row * out_step + place, found.to(out.dtype.element_ty), mask=inside)


def statistics(
    products: Tensor,
    token: Tensor,
    shape: tuple[float, float | None, float],
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """log p of the tokens, the entropies if asked for, and log Σ exp, each (c,) in float32.

    `shape` is the logits' scale, soft cap and temperature.
    """
    rows, size = products.shape
    log_prob, entropies, normaliser = (
        products.new_empty(rows, dtype=torch.float32) for _ in range(3)
    )
    block = _block(size)
    statistics_kernel[rows,](
        products,
        token.contiguous(),
        log_prob,
        entropies if entropy else None,
        normaliser,
        products.stride(0),
        size,
        *shape,
        BLOCK=block,
        num_warps=8,
    )
    return log_prob, entropies if entropy else None, normaliser


def gradient(
    products: Tensor,
    token: Tensor,
    shape: tuple[float, float | None, float],
    known: tuple[Tensor, Tensor | None],
    grads: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The gradient (c, V) of the products in `dtype`, in their place if they have it.

    `known` are log Σ exp and, if they have a gradient, the entropies; `grads` those of
    log-probabilities and entropies.
    """
    rows, size = products.shape
    out = products if products.dtype == dtype else torch.empty_like(products, dtype=dtype)
    block = _block(size)
    gradient_kernel[rows, -(-size // block)](
        products,
        token.contiguous(),
        *known,
        *(grad.contiguous() for grad in grads),
        out,
        products.stride(0),
        out.stride(0),
        size,
        *shape,
        BLOCK=block,
        num_warps=8,
    )
    return out


def _block(size: int) -> int:
    return min(BLOCK, max(16, 1 << (size - 1).bit_length()))
