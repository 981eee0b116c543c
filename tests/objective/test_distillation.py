"""On-policy distillation: its advantage, and the divergence that its gradient is of.

On a language model small enough to list all completions, expectations are sums over some hundred
float64 terms of order 1: tolerances of 1e-12 are those of their rounding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.learn.advantages import RolloutRewards, estimate
from keel.learn.batch import Actions
from keel.learn.loss import loss, prepare
from keel.models.head import Scores
from keel.objective import gae, segments
from studies.evidence.enumerable import EnumerableLM

BUDGET = 9
"""C of the weights: any number, since the gradient is compared up to it."""


def test_advantage_equals_a_loop() -> None:
    old = [-1.0, -0.2, -3.0, -0.7, -50.0]
    teacher = [-0.5, -2.2, -1.0, -0.7, -1.0]
    lengths = [3, 2]
    gain = [min(max(t - o, -20.0), 20.0) for t, o in zip(teacher, old, strict=True)]
    assert gain[-1] == 20.0  # clamped, of 49
    wanted = [
        gain[0] + 0.5 * gain[1] + 0.25 * gain[2],
        gain[1] + 0.5 * gain[2],
        gain[2],
        gain[3] + 0.5 * gain[4],
        gain[4],
    ]
    rows = [torch.tensor(x, dtype=torch.float64) for x in (old, teacher)]
    for gamma, expected in ((0.5, wanted), (0.0, gain)):
        found = gae.teacher_log_ratio(*rows, torch.tensor(lengths), gamma=gamma)
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14
        )


# ---------------------------------------------------------------- the gradient


def drawn(seed: int) -> tuple[EnumerableLM, Tensor]:
    """A policy, and the logits of a teacher over the same prefixes."""
    return EnumerableLM.drawn(seed), EnumerableLM.drawn(seed + 100).logits_ZV


def algorithm(gamma: float) -> Algorithm:
    """The preset with this discount."""
    own = PRESETS["opd"].algorithm
    return own.model_copy(update={"advantage": own.advantage.model_copy(update={"gamma": gamma})})


def expected_gradient(model: EnumerableLM, teacher_ZV: Tensor, chosen: Algorithm) -> Tensor:
    """The expectation over completions of the gradient of the loss in the logits, times C.

    All completions are one batch, whose weights are multiplied by S times their probability.
    """
    logits_ZV = model.logits_ZV.clone().requires_grad_()
    log_prob_N = logits_ZV.log_softmax(-1)[model.state_N, model.token_N]
    lengths, sequences = tuple(model.lengths_S.tolist()), len(model.lengths_S)
    actions = Actions(
        lengths=lengths,
        groups=tuple(range(sequences)),
        engine_log_prob_N=log_prob_N.detach(),
        old_log_prob_N=log_prob_N.detach(),
        teacher_log_prob_N=teacher_ZV.log_softmax(-1)[model.state_N, model.token_N],
    )
    unrewarded = RolloutRewards(torch.full((sequences,), torch.nan, dtype=torch.float64))
    batch = prepare(chosen, actions, estimate(chosen, actions, unrewarded, 0.0), BUDGET)
    probability_N = segments.spread(model.probability_S, model.lengths_S)
    batch = replace(batch, weight_N=batch.weight_N * sequences * probability_N)
    out = loss(chosen, batch, Scores(log_prob_N, None, None, None), 0.0)
    assert float(out.metrics["ratio/mean"]) == pytest.approx(1, abs=1e-15)
    (found,) = torch.autograd.grad(out.total, logits_ZV)
    return BUDGET * found


def divergence_of_tokens(model: EnumerableLM, teacher_ZV: Tensor) -> Tensor:
    """∇ Σ_states visits · KL(π‖π_teacher) of the next token, the visits held fixed."""
    logits_ZV = model.logits_ZV.clone().requires_grad_()
    log_ZV = logits_ZV.log_softmax(-1)
    kl_Z = (log_ZV.exp() * (log_ZV - teacher_ZV.log_softmax(-1))).sum(-1)
    (found,) = torch.autograd.grad(model.visits_ZV.sum(-1) @ kl_Z, logits_ZV)
    return found


def divergence_of_completions(model: EnumerableLM, teacher_ZV: Tensor) -> Tensor:
    """∇KL(π‖π_teacher) over all completions."""
    logits_ZV = model.logits_ZV.clone().requires_grad_()

    def log_probability_S(logits: Tensor) -> Tensor:
        log_N = logits.log_softmax(-1)[model.state_N, model.token_N]
        return segments.segment_sum(log_N, model.lengths_S)

    log_S = log_probability_S(logits_ZV)
    kl = (log_S.exp() * (log_S - log_probability_S(teacher_ZV))).sum()
    (found,) = torch.autograd.grad(kl, logits_ZV)
    return found


@pytest.mark.parametrize("seed", [3, 4])
def test_without_discount_the_gradient_is_that_of_the_next_tokens_divergence(seed: int) -> None:
    model, teacher_ZV = drawn(seed)
    found = expected_gradient(model, teacher_ZV, algorithm(0.0))
    wanted = divergence_of_tokens(model, teacher_ZV)
    assert wanted.abs().max() > 0.1  # else the comparison is empty
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    # It is not that of whole completions: earlier tokens do not answer for later states.
    assert (found - divergence_of_completions(model, teacher_ZV)).abs().max() > 0.1


@pytest.mark.parametrize("seed", [3, 4])
def test_with_discount_1_the_gradient_is_that_of_the_divergence_of_completions(seed: int) -> None:
    model, teacher_ZV = drawn(seed)
    found = expected_gradient(model, teacher_ZV, algorithm(1.0))
    wanted = divergence_of_completions(model, teacher_ZV)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
