"""What a policy, and the value model beside it, say of actions that were taken."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """What one forward says of the scored actions; None where it was not asked."""

    log_prob_N: Float[Tensor, "N"]
    entropy_N: Float[Tensor, "N"] | None
    value_N: Float[Tensor, "N"] | None
    full_kl_N: Float[Tensor, "N"] | None
