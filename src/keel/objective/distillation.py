"""The advantage of on-policy distillation: a teacher's log-probabilities against the policy's own.

With `d_n = ℓ_old,n − ℓ_teacher,n` of tokens that the policy sampled, E[d_n | state] is the
KL(π_old‖π_teacher) of the next token in that state, and

| γ | on policy, E[Σ_n A_n ∇ℓ_n] is minus |
|---|---|
| 0 | the sum over tokens of ∇KL(π‖π_teacher) of the next token, the distribution of states fixed |
| 1 | ∇KL(π‖π_teacher) of whole completions |

since the score has mean 0 in every state: E[∇ℓ_n d_n] = ∇E[d_n], and the terms of earlier tokens
vanish. With γ = 0 a token answers only for how unlikely the teacher finds it where it stands, not
for the states that it leads to.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from keel.objective import divergences
from keel.objective.gae import returns_to_go


def teacher_log_ratio(
    old_log_prob_N: Float[Tensor, " N"],
    teacher_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    gamma: float,
) -> Float[Tensor, " N"]:
    """Minus k1 to the teacher, with those of the tokens that follow discounted.

        A_n = Σ_k γ^k (ℓ_teacher,n+k − ℓ_old,n+k)

    Each log-ratio is clamped to ±20, as in every estimator of a divergence.

    Source: Lu 2025, On-Policy Distillation (Thinking Machines Lab), where γ = 0; arXiv:2601.02780
    eq. 8.
    """
    log_ratio_N = -divergences.k1(old_log_prob_N, teacher_log_prob_N)
    return returns_to_go(log_ratio_N, lengths_S, gamma=gamma)
