"""Learning from comparisons and labels: reward models, and policies without one (DPO, KTO, …).

Suffix `_C` is a comparison: two answers to one prompt, `chosen` and `rejected`. Every function
gives one loss for each, so that weights can be put on them before they are summed.

A policy's losses read a score s of each answer: its log-ratio ℓ − ℓ_ref, or ℓ alone where there is
no reference (ℓ is the log-probability of the answer), as a sum or mean (s̄) over its tokens. Of two
answers they read the gap h = s_chosen − s_rejected. p is the probability that the answer called
chosen is the better one; exchanging the two with p and 1 − p changes no loss.
"""

from __future__ import annotations

import torch
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


def dpo(
    gap_C: Float[Tensor, " C"],
    probability_C: Float[Tensor, " C"],
    *,
    beta: float,
    smoothing: float,
) -> Float[Tensor, " C"]:
    """Bradley–Terry on the reward that the policy itself implies, β times its log-ratio.

        q = p (1 − ε) + (1 − p) ε,   L = −q log σ(β h) − (1 − q) log σ(−β h)

    With h̄ it is length-normalised DPO, with log-probabilities alone the preference part of CPO.

    Source: arXiv:2305.18290 eq. 7; ε, the share of labels held to be turned round, is the
    conservative DPO of Mitchell 2023, discussed in arXiv:2403.00409; h̄: arXiv:2411.15124;
    CPO: arXiv:2401.08417 eq. 3.
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


def hinge(
    gap_C: Float[Tensor, " C"], probability_C: Float[Tensor, " C"], *, beta: float
) -> Float[Tensor, " C"]:
    """A margin of 1 between the implied rewards.

        L = p max(0, 1 − β h) + (1 − p) max(0, 1 + β h)

    Source: SLiC, arXiv:2305.10425, of log-ratios as in arXiv:2309.06657.
    """
    reward_C = beta * gap_C
    return probability_C * F.relu(1 - reward_C) + (1 - probability_C) * F.relu(1 + reward_C)


def robust(
    gap_C: Float[Tensor, " C"],
    probability_C: Float[Tensor, " C"],
    *,
    beta: float,
    smoothing: float,
) -> Float[Tensor, " C"]:
    """`dpo` whose mean over labels turned round with probability ε is that of the true labels.

        q = (p − ε) / (1 − 2ε),   L = −q log σ(β h) − (1 − q) log σ(−β h)

    Source: arXiv:2403.00409; for p = 1 it is ((1 − ε) L(h) − ε L(−h)) / (1 − 2ε) there.
    """
    unbiased_C = (probability_C - smoothing) / (1 - 2 * smoothing)
    return _both_ways(beta * gap_C, -beta * gap_C, unbiased_C)


def simpo(
    gap_C: Float[Tensor, " C"],
    probability_C: Float[Tensor, " C"],
    *,
    beta: float,
    margin: float,
) -> Float[Tensor, " C"]:
    """Bradley–Terry on mean log-probabilities, with a margin and without a reference.

        L = −p log σ(β h̄ − γ) − (1 − p) log σ(−β h̄ − γ)

    Source: arXiv:2405.14734 eq. 6.
    """
    return _both_ways(beta * gap_C - margin, -beta * gap_C - margin, probability_C)


def log_odds(log_prob_S: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Log-odds of an answer, of the geometric mean of its tokens' probabilities.

        s = ℓ̄ − log(1 − exp ℓ̄)

    ℓ̄ is at most −ε of the number format, since the odds of certainty are infinite.

    Source: arXiv:2403.07691 eq. 4.
    """
    below_S = log_prob_S.clamp(max=-torch.finfo(log_prob_S.dtype).eps)
    return below_S - (-torch.expm1(below_S)).log()


def orpo(
    gap_C: Float[Tensor, " C"], probability_C: Float[Tensor, " C"], *, beta: float
) -> Float[Tensor, " C"]:
    """The odds ratio of the two answers; h is the gap of their `log_odds`.

        L = −λ (p log σ(h) + (1 − p) log σ(−h)),   λ = β

    Source: arXiv:2403.07691 eqs. 6 and 7.
    """
    return beta * _both_ways(gap_C, -gap_C, probability_C)


def chosen_nll(
    log_prob_S: Float[Tensor, " S"], share_S: Float[Tensor, " S"], *, tokens: float
) -> Float[Tensor, " S"]:
    """Each answer's part of the mean negative log-likelihood of a chosen answer's token.

        L_s = −w_s ℓ_s / Σ_s w_s L_s,   w = p of the chosen answer, 1 − p of the rejected one

    `tokens` is that sum over the whole step. The paper divides each answer by its own length.

    Source: arXiv:2404.19733 eq. 1 (`rpo_alpha`), as the mean over tokens that TRL takes.
    """
    return -share_S * log_prob_S / tokens


def reference_point(log_ratio_S: Float[Tensor, " S"]) -> Float[Tensor, ""]:
    """An estimate of KL(policy‖reference) from answers to other prompts of the step; no gradient.

        z = max(0, mean_i (log π(y_j|x_i) − log π_ref(y_j|x_i))),   j ≠ i

    Source: arXiv:2402.01306, its estimate of z_0.
    """
    return log_ratio_S.detach().mean().clamp(min=0)


def kto(
    log_ratio_S: Float[Tensor, " S"],
    label_S: Float[Tensor, " S"],
    point: Float[Tensor, ""],
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Float[Tensor, " S"]:
    """Kahneman and Tversky's value of an answer, relative to a `reference_point` z.

        L = y λ_D σ(−β (s − z)) + (1 − y) λ_U σ(β (s − z))

    y is 1 for a desirable answer, 0 for an undesirable one, between for a soft label.

    Source: arXiv:2402.01306 eq. 7, λ_y taken into it.
    """
    value_S = beta * (log_ratio_S - point)
    good_S = desirable_weight * torch.sigmoid(-value_S)
    bad_S = undesirable_weight * torch.sigmoid(value_S)
    return label_S * good_S + (1 - label_S) * bad_S


def _both_ways(
    for_it: Float[Tensor, " C"], against_it: Float[Tensor, " C"], share: Float[Tensor, " C"]
) -> Float[Tensor, " C"]:
    return -share * F.logsigmoid(for_it) - (1 - share) * F.logsigmoid(against_it)
