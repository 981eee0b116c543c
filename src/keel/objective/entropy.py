"""The entropy of the next token's distribution."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def entropy(logits_NV: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """The exact entropy over the vocabulary, in nats; a logit of −inf adds 0.

        H_n = −Σ_v p(v) log p(v),   p = softmax(logits)

    Source: Shannon 1948; as a bonus, Williams and Peng 1991 and arXiv:1602.01783.
    """
    log_prob_NV = torch.log_softmax(logits_NV, dim=-1)
    finite_NV = log_prob_NV.masked_fill(log_prob_NV == -torch.inf, 0.0)
    return -(log_prob_NV.exp() * finite_NV).sum(-1)
