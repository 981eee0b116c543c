"""On-policy distillation: its advantage, and the divergence that its gradient is of.

On a language model small enough to list all completions, expectations are sums over some hundred
float64 terms of order 1: tolerances of 1e-12 are those of their rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from keel.algorithms.group_advantages import GroupRelative
from keel.algorithms.losses import AdvantageDistillation, LossDistillation
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.learn.advantages import RolloutRewards, estimate
from keel.learn.batch import Actions
from keel.learn.loss import loss, prepare
from keel.models.head import Scores
from keel.objective import distillation, divergences, segments
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
        found = distillation.teacher_log_ratio(*rows, torch.tensor(lengths), gamma=gamma)
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14
        )


def test_prefix_weights_equal_a_loop() -> None:
    rows = [[0.5, -1.0, 2.0, -0.25], [0.0, 0.0], [3.0]]
    wanted: list[float] = []
    for row in rows:
        total = sum(map(abs, row)) or 1.0
        wanted += [
            a * (1 + 0.5 * (1 - sum(map(abs, row[:at])) / total)) for at, a in enumerate(row)
        ]
    flat = torch.tensor([a for row in rows for a in row], dtype=torch.float64)
    lengths_S = torch.tensor([len(row) for row in rows])
    found = distillation.prefix_weighted(flat, lengths_S, gain=0.5)
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=0, atol=1e-6)
    assert torch.equal(distillation.prefix_weighted(flat, lengths_S, gain=0.0), flat)


def rows_of(seed: int, rows: int = 6, words: int = 7) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a policy and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    both = 1.5 * torch.randn(2, rows, words, generator=generator, dtype=torch.float64)
    policy_NV, teacher_NV = both.log_softmax(-1)
    return policy_NV, teacher_NV


def looped(policy: list[float], teacher: list[float], mix: float) -> tuple[float, list[float]]:
    """The divergence of one token, and its gradient in the policy's logits."""
    p, q = [math.exp(x) for x in policy], [math.exp(x) for x in teacher]
    if mix == 0:
        return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)), [
            a - b for a, b in zip(p, q, strict=True)
        ]
    m = q if mix == 1 else [mix * b + (1 - mix) * a for a, b in zip(p, q, strict=True)]
    own = sum(a * math.log(a / c) for a, c in zip(p, m, strict=True))
    other = sum(b * math.log(b / c) for b, c in zip(q, m, strict=True))
    weight = 1.0 if mix == 1 else 1 - mix
    slope = [weight * a * (math.log(a / c) - own) for a, c in zip(p, m, strict=True)]
    return weight * own + (0.0 if mix == 1 else mix * other), slope


@pytest.mark.parametrize("mix", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jensen_shannon_equals_a_loop_with_its_gradient(mix: float) -> None:
    policy_NV, teacher_NV = rows_of(1)
    logits_NV = policy_NV.clone().requires_grad_()
    found_N = distillation.jensen_shannon(logits_NV.log_softmax(-1), teacher_NV, mix=mix)
    (slope_NV,) = torch.autograd.grad(found_N.sum(), logits_NV)
    for n, (own, other) in enumerate(zip(policy_NV.tolist(), teacher_NV.tolist(), strict=True)):
        value, slope = looped(own, other, mix)
        assert float(found_N[n].detach()) == pytest.approx(value, abs=1e-12)
        assert slope_NV[n].tolist() == pytest.approx(slope, abs=1e-12)


def test_mix_runs_from_the_forward_to_the_reverse_divergence() -> None:
    policy_NV, teacher_NV = rows_of(2)
    reverse_N = divergences.full(policy_NV, teacher_NV)
    forward_N = divergences.relative_entropy(teacher_NV, policy_NV)

    def at(mix: float) -> Tensor:
        return distillation.jensen_shannon(policy_NV, teacher_NV, mix=mix)

    torch.testing.assert_close(at(1.0), reverse_N, rtol=0, atol=1e-12)
    torch.testing.assert_close(at(0.0), forward_N, rtol=0, atol=1e-12)
    near = 1e-6  # between, it is 0 at both ends, and over the distance to an end that end's KL
    torch.testing.assert_close(at(near) / near, forward_N, rtol=1e-4, atol=0)
    torch.testing.assert_close(at(1 - near) / near, reverse_N, rtol=1e-4, atol=0)
    assert ((at(0.5) > 0) & (at(0.5) < math.log(2))).all()


@pytest.mark.parametrize("mix", [0.0, 0.4, 1.0])
def test_top_k_puts_the_rest_into_one_token(mix: float) -> None:
    policy_NV, teacher_NV = rows_of(3)
    found_N = distillation.jensen_shannon(policy_NV, teacher_NV, mix=mix, top_k=3)
    for n, (own, other) in enumerate(zip(policy_NV.tolist(), teacher_NV.tolist(), strict=True)):
        best = sorted(range(7), key=lambda v: -other[v])[:3]
        short = [
            [row[v] for v in best] + [math.log(1 - sum(math.exp(row[v]) for v in best))]
            for row in (own, other)
        ]
        assert float(found_N[n]) == pytest.approx(looped(*short, mix)[0], abs=1e-12)
    for k in (7, 9):
        whole_N = distillation.jensen_shannon(policy_NV, teacher_NV, mix=mix, top_k=k)
        assert torch.equal(whole_N, distillation.jensen_shannon(policy_NV, teacher_NV, mix=mix))
    certain_NV = torch.tensor([[0.0, -90.0, -90.0]]).log_softmax(-1)  # in float32 no rest is left
    assert distillation.jensen_shannon(certain_NV, certain_NV, mix=0.5, top_k=1).isfinite().all()


# ---------------------------------------------------------------- in the objective


@pytest.mark.parametrize("whiten", [False, True])
def test_term_is_added_after_normalisation(whiten: bool) -> None:
    """A group's advantages with a teacher's term: those without it, and half the log-ratio."""
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 2, 4)
    old_N, teacher_N = -torch.rand(2, 9, generator=generator, dtype=torch.float64)
    actions = Actions(
        lengths=lengths, groups=(0, 0, 0), engine_log_prob_N=old_N, old_log_prob_N=old_N,
        teacher_log_prob_N=teacher_N,
    )  # fmt: skip
    plain = PRESETS["grpo"].algorithm
    plain = plain.model_copy(update={"advantage": GroupRelative(whiten=whiten)})
    both = plain.model_copy(update={"distillation": AdvantageDistillation(coefficient=0.5)})
    found, without = (
        prepare(one, actions, estimate(one, actions, [1.0, 0.0, 0.5]), BUDGET).advantage_N
        for one in (both, plain)
    )
    wanted = without + 0.5 * (teacher_N - old_N)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


# ---------------------------------------------------------------- the gradient


def drawn(seed: int) -> tuple[EnumerableLM, Tensor]:
    """A policy, and the logits of a teacher over the same prefixes."""
    return EnumerableLM.drawn(seed), EnumerableLM.drawn(seed + 100).logits_ZV


def algorithm(gamma: float) -> Algorithm:
    """The preset with this discount."""
    own = PRESETS["opd"].algorithm
    return own.model_copy(update={"distillation": AdvantageDistillation(gamma=gamma)})


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
    scores = Scores(log_prob_N, None, None, None)
    if (term := chosen.loss_distillation) is not None:
        taught_N = term.value(logits_ZV.log_softmax(-1), teacher_ZV.log_softmax(-1))
        scores = replace(scores, distillation_N=taught_N[model.state_N])
    out = loss(chosen, batch, scores, 0.0)
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


@pytest.mark.parametrize("seed", [3, 4])
def test_reverse_divergence_in_the_loss_is_the_expected_advantage_term(seed: int) -> None:
    """GKD with mix 1 over the vocabulary, and OPD at the sampled tokens, in expectation."""
    model, teacher_ZV = drawn(seed)
    term = LossDistillation(mix=1.0)
    chosen = PRESETS["opd"].algorithm.model_copy(update={"distillation": term})
    found = expected_gradient(model, teacher_ZV, chosen)
    wanted = divergence_of_tokens(model, teacher_ZV)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    sampled = expected_gradient(model, teacher_ZV, algorithm(0.0))
    torch.testing.assert_close(found, sampled, rtol=0, atol=1e-12)
