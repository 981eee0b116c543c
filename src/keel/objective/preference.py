"""Learning from comparisons and labels: reward models, and policies without one (DPO).

Suffix `_C` is a comparison: two answers to one prompt, `chosen` and `rejected`. Every function
gives one loss for each, so that weights can be put on them before they are summed.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry(
    chosen_C: Float[Tensor, " C"],
    rejected_C: Float[Tensor, " C"],
    probability_C: Float[Tensor, " C"],
    margin_C: Float[Tensor, " C"],
) -> Float[Tensor, " C"]:
    """Cross-entropy between who is preferred and what the scores say of it.

        h = r_chosen − r_rejected,   L = −p log σ(h − m) − (1 − p) log σ(−h − m)

    p is 1 for a plain preference, between for a soft label, ½ for a tie. The margin m is asked of
    whichever answer is the better one, so that exchanging the two with p and 1 − p changes nothing.

    Source: Bradley and Terry, Biometrika 1952; as a reward model's loss arXiv:1706.03741; with a
    margin arXiv:2307.09288 §3.2.2.
    """
    h_C = chosen_C - rejected_C
    return _both_ways(h_C - margin_C, -h_C - margin_C, probability_C)


def centering(
    chosen_C: Float[Tensor, " C"], rejected_C: Float[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """What holds the scores of a comparison around 0, which Bradley–Terry leaves free.

        L = (r_chosen + r_rejected)²

    Source: arXiv:2312.09244.
    """
    return (chosen_C + rejected_C).square()


def label_cross_entropy(
    logit_S: Float[Tensor, " S"], label_S: Float[Tensor, " S"]
) -> Float[Tensor, " S"]:
    """Cross-entropy of right (1) and wrong (0), of an answer or of a step's last token.

        L = −y log σ(z) − (1 − y) log σ(−z)

    With two logits a step, z is that of right less that of wrong: the softmax is then the same.

    Source: verifiers of outcomes, arXiv:2110.14168 §4; of steps, arXiv:2305.20050 §2.
    """
    return _both_ways(logit_S, -logit_S, label_S)


def log_ratio_gap(
    chosen_C: Float[Tensor, " C"],
    rejected_C: Float[Tensor, " C"],
    reference_chosen_C: Float[Tensor, " C"],
    reference_rejected_C: Float[Tensor, " C"],
) -> Float[Tensor, " C"]:
    """How much further the policy has moved towards the chosen answer than towards the other.

        h = (ℓ_chosen − ℓ_ref,chosen) − (ℓ_rejected − ℓ_ref,rejected)

    ℓ is the log-probability of a whole answer, or its mean over the tokens (for `ipo`).

    Source: arXiv:2305.18290 eq. 7.
    """
    return (chosen_C - reference_chosen_C) - (rejected_C - reference_rejected_C)


def dpo(
    gap_C: Float[Tensor, " C"],
    probability_C: Float[Tensor, " C"],
    *,
    beta: float,
    smoothing: float,
) -> Float[Tensor, " C"]:
    """Bradley–Terry on the reward that the policy itself implies, β times its log-ratio.

        q = p (1 − ε) + (1 − p) ε,   L = −q log σ(β h) − (1 − q) log σ(−β h)

    Source: arXiv:2305.18290 eq. 7; ε, the share of labels held to be turned round, is the
    conservative DPO of Mitchell 2023, discussed in arXiv:2403.00409.
    """
    believed_C = probability_C * (1 - smoothing) + (1 - probability_C) * smoothing
    return _both_ways(beta * gap_C, -beta * gap_C, believed_C)


def ipo(
    gap_C: Float[Tensor, " C"], probability_C: Float[Tensor, " C"], *, beta: float
) -> Float[Tensor, " C"]:
    """Squared distance of the log-ratio gap from the one that the preference asks for.

        L = p (h̄ − 1/(2β))² + (1 − p) (h̄ + 1/(2β))²

    h̄ is the gap of log-probabilities that are means over an answer's tokens, as TRL has it; the
    paper sums them.

    Source: arXiv:2310.12036 eq. 17.
    """
    target = 1 / (2 * beta)
    return (
        probability_C * (gap_C - target).square() + (1 - probability_C) * (gap_C + target).square()
    )


def _both_ways(
    for_it: Float[Tensor, " C"], against_it: Float[Tensor, " C"], share: Float[Tensor, " C"]
) -> Float[Tensor, " C"]:
    return -share * F.logsigmoid(for_it) - (1 - share) * F.logsigmoid(against_it)
