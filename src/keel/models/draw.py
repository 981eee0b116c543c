"""A token from logits by one uniform number, without truncation: the sampling of captured decoding.

A row's token is the inverse of its cumulative distribution at its own number, so that it depends
on no other row. On CUDA the work is done by Triton kernels in float32 (`kernels.draw`); elsewhere
by torch in float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.models.kernels import has_triton


def draw_tokens(
    logits_RV: Float[Tensor, "R V"], uniform_R: Float[Tensor, "R"], temperature: float
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """A token of each row (int64), and its log-probability (float32) under the distribution that
    it was sampled from, softmax(logits / temperature).

    `uniform_R` is float64, in [0, 1). Temperature 0 takes the largest logit (the lowest id among
    equals) and reports its log-probability at temperature 1. A token without mass is never chosen.
    Logits that are not numbers give a log-probability that is not a number. Nothing is read by the
    host, so the call can be captured.
    """
    if temperature < 0:
        raise ValueError(f"temperature = {temperature}: give 0 (greedy) or above")
    if logits_RV.is_cuda and logits_RV.dtype != torch.float64 and has_triton():
        from keel.models.kernels import draw as kernels

        return kernels.draw_tokens(logits_RV, uniform_R, temperature)
    logits = logits_RV.double()
    if temperature not in (0, 1):
        logits = logits / temperature
    log_prob_RV = logits.log_softmax(-1)
    if temperature == 0:
        choice = logits.argmax(-1, keepdim=True)
    else:
        choice, _ = invert(log_prob_RV.exp(), uniform_R)
    return choice[:, 0], log_prob_RV.gather(-1, choice)[:, 0].float()


def invert(
    prob: Float[Tensor, "R V"], uniform: Float[Tensor, "R"]
) -> tuple[Int[Tensor, "R 1"], Float[Tensor, "R 1"]]:
    """The first index whose cumulative mass exceeds uniform · total; and the total.

    Numbers of 53 bits below 1 times the total stay below the total in float64, so that neither end
    of [0, 1) chooses an index without mass; in float32 the product is kept below it.
    """
    mass = prob.cumsum(-1)
    total = mass[:, -1:]
    target = (uniform.unsqueeze(-1) * total).to(total.dtype)
    if total.dtype != torch.float64:
        target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    choice = torch.searchsorted(mass, target, right=True)
    # Only logits that are not numbers reach the end; their log-probability tells.
    return choice.clamp_(max=prob.shape[-1] - 1), total
