"""From logits and one uniform number to a token and its log-probability."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.models.kernels import sample as compiled
from keel.types import KeelError, Sampling

_CHUNK = 1 << 24
"""Scores turned to float64 at a time (rows × vocabulary), to bound memory: 128 MiB a copy."""


def check(sampling: Sampling) -> None:
    """Raise KeelError for a setting that no distribution can be drawn with."""
    for name, good, want in (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= sampling.temperature < float("inf"), "0 (greedy) or above"),
        ("top_k", sampling.top_k >= 0, "0 (off) or above"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1 (off)"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 (off) to 1"),
        ("stop", all(sampling.stop), "strings that are not empty"),
    ):
        if not good:
            raise KeelError(f"sampling.{name} = {getattr(sampling, name)!r}: give {want}")


def draw(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], sampling: Sampling
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """A token for each row and its log-probability under the distribution that was drawn from.

    `uniform` (float64, in [0, 1)) chooses by the inverse of the cumulative distribution, so a row's
    token depends on its own logits and number alone. The distribution is softmax(logits / T), cut
    by top-k, then top-p (over what top-k left), then min-p, and renormalised. Temperature 0 takes
    the largest logit (the lowest id among equals) and reports its log-probability at temperature 1;
    truncation does not touch it. Everything is done in float64: by compiled code for float32 logits
    on a CPU, else in chunks over rows.
    """
    if logits.dtype == torch.float32 and logits.device.type == "cpu" and compiled.library():
        if logits.shape[1] > 1 and logits.stride(1) != 1:
            logits = logits.contiguous()
        return compiled.draw(logits, uniform.contiguous(), sampling)
    rows = max(1, _CHUNK // logits.shape[-1])
    if len(logits) <= rows:
        return _draw(logits, uniform, sampling)
    parts = [
        _draw(part, numbers, sampling)
        for part, numbers in zip(torch.split(logits, rows), torch.split(uniform, rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    logits = logits.double()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        log_probs = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
        return tokens[:, 0], log_probs[:, 0]
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    log_prob_V = logits.log_softmax(-1)
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        choice, _ = _invert(log_prob_V.exp(), uniform)
        return choice[:, 0], log_prob_V.gather(-1, choice)[:, 0]
    log_prob_V, order = log_prob_V.sort(stable=True, dim=-1, descending=True)
    prob_V = _truncate(log_prob_V.exp(), sampling)
    choice, kept = _invert(prob_V, uniform)
    log_probs = log_prob_V.gather(-1, choice) - kept.log()
    return order.gather(-1, choice)[:, 0], log_probs[:, 0]


def _truncate(prob: Float[Tensor, "R V"], sampling: Sampling) -> Float[Tensor, "R V"]:
    """Zero what top-k, top-p and min-p leave out. `prob` descends along the vocabulary.

    top-p (Holtzman et al. 2020, arXiv:1904.09751): the fewest tokens whose mass reaches p.
    min-p (Nguyen et al. 2024, arXiv:2407.01082): tokens of at least min_p times the likeliest.
    """
    if 0 < sampling.top_k < prob.shape[-1]:
        prob = prob.clone()
        prob[:, sampling.top_k :] = 0
    if sampling.top_p < 1:
        mass = prob.cumsum(-1)
        before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        prob = prob * (before < sampling.top_p * mass[:, -1:])
    if sampling.min_p > 0:
        prob = prob * (prob >= sampling.min_p * prob[:, :1])
    return prob


def _invert(prob: Float[Tensor, "R V"], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first index (R, 1) whose cumulative mass exceeds uniform · total; and the total (R, 1).

    Numbers of 53 bits below 1 times the total stay below the total in float64, so that neither end
    of [0, 1) chooses an index without mass.
    """
    mass = prob.cumsum(-1)
    total = mass[:, -1:]
    choice = torch.searchsorted(mass, uniform.unsqueeze(-1) * total, right=True)
    # Only logits that are not numbers reach the end; their log-probability tells.
    return choice.clamp_(max=prob.shape[-1] - 1), total
