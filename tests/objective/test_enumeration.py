"""MATH's seventh law: every sequence of a tabular language model of 3 tokens and 3 steps.

The model is a table of logits for each of the 1 + 3 + 9 prefixes; its 27 sequences are the whole of
its distribution, so expectations are sums and no tolerance is for sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from keel.objective import divergences, ratios, segments, surrogates, weighted
from tests.objective import loops

SEQUENCES = list(itertools.product(range(3), repeat=3))
STATE = loops.ints([state for a, b, _ in SEQUENCES for state in (0, 1 + a, 4 + 3 * a + b)])
TOKEN = loops.ints([token for sequence in SEQUENCES for token in sequence])
LENGTHS = loops.ints([3] * 27)

Estimator = Callable[[Tensor, Tensor], Tensor]


def table(seed: int) -> Tensor:
    return loops.random(39, seed, 0.7).reshape(13, 3)


POLICY, REFERENCE, OLD = table(1), table(2), table(3)


def tokens(logits: Tensor) -> Tensor:
    """The log-probabilities of the 81 tokens."""
    return logits.log_softmax(-1)[STATE, TOKEN]


def whole(logits: Tensor) -> Tensor:
    """The log-probabilities of the 27 sequences."""
    return segments.segment_sum(tokens(logits), LENGTHS)


def gradient(value: Tensor, parameter: Tensor) -> Tensor:
    return torch.autograd.grad(value, parameter)[0]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of two distributions over sequences, from their logarithms."""
    return (p.exp() * (p - q)).sum()


def expected(sampler: Tensor, value: Tensor) -> Tensor:
    """E over sequences under the sampler, whose probabilities are not differentiated."""
    return (sampler.detach().exp() * value).sum()


def parameter() -> Tensor:
    return POLICY.clone().requires_grad_()


# ---------------- the table: whole sequences, and token by token with states held fixed


def by_token(sampler: Tensor, value_N: Tensor) -> Tensor:
    """E over sequences of the sum over their tokens."""
    return expected(whole(sampler), segments.segment_sum(value_N, LENGTHS))


def in_states(sampler: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ over states of how often the sampler is there, times a value of the state; all 13 once."""
    visits = torch.zeros(13, dtype=torch.float64).index_add(
        0, STATE, whole(sampler).detach().exp().repeat_interleave(3)
    )
    # 27, 9 and 3 of the 81 tokens share a state; each sequence passes through it once.
    return (visits * value(torch.arange(13))).sum()


def state_kl(p: Tensor, q: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda states: divergences.full(p[states], q[states])


def exact(level: str, sampler: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """KL(p‖q) of two tables, of sequences or of the next token in the sampler's states."""
    if level == "sequence":
        return kl(whole(p), whole(q))
    return in_states(sampler, state_kl(p, q))


def mean_of(level: str, sampler: Tensor, estimator: Estimator, p: Tensor, q: Tensor) -> Tensor:
    """E of the estimator over the sampler's sequences."""
    if level == "sequence":
        return expected(whole(sampler), estimator(whole(p), whole(q)))
    return by_token(sampler, estimator(tokens(p), tokens(q)))


LEVELS = ["sequence", "token"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        (divergences.k1, "forward", "none"),
        (divergences.k2, "biased", "forward"),
        (divergences.k3, "forward", "backward"),
    ],
)
def test_estimators_of_the_divergence(
    estimator: Estimator, value: str, slope: str, level: str
) -> None:
    theta = parameter()
    forward = exact(level, POLICY, theta, REFERENCE)
    backward = exact(level, POLICY, REFERENCE, theta)
    estimate = mean_of(level, POLICY, estimator, theta, REFERENCE)
    if value == "forward":
        loops.close(estimate, forward)
    else:
        assert (estimate - forward).detach().abs() > 1e-2
    truth = {
        "none": torch.zeros_like(theta),
        "forward": gradient(forward, theta),
        "backward": gradient(backward, theta),
    }
    if level == "token":  # its states are fixed, and those of the whole move with the policy
        truth["whole"] = gradient(kl(whole(theta), whole(REFERENCE)), theta)
    actual = gradient(estimate, theta)
    loops.close(actual, truth.pop(slope))
    assert all((actual - other).abs().max() > 1e-3 for other in truth.values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", [divergences.k1, divergences.k3])
@pytest.mark.parametrize("sampler", [POLICY, OLD])
def test_weighted_estimators_of_the_divergence(
    estimator: Estimator, sampler: Tensor, level: str
) -> None:
    theta = parameter()

    def weighted(p: Tensor, old: Tensor) -> Tensor:
        reference = {"sequence": whole, "token": tokens}[level](REFERENCE)
        return divergences.weighted(estimator(p, reference), p, old)

    estimate = mean_of(level, sampler, weighted, theta, sampler)
    wanted = exact(level, sampler, theta, REFERENCE)
    loops.close(estimate, wanted)
    loops.close(gradient(estimate, theta), gradient(wanted, theta))


def test_k1_in_the_reward_is_exact_for_the_sequence() -> None:
    """REINFORCE on −k1, summed from each token to the end, descends the sequence divergence."""
    theta = parameter()
    penalty_N = -divergences.k1(tokens(POLICY), tokens(REFERENCE))
    advantage_N = segments.to_go(penalty_N, LENGTHS)
    value_N = weighted.log_prob(tokens(theta), advantage_N, LENGTHS)
    wanted = -gradient(kl(whole(theta), whole(REFERENCE)), theta)
    loops.close(gradient(by_token(POLICY, value_N), theta), wanted)
    # Without the way to the end it is the gradient of something else.
    myopic_N = weighted.log_prob(tokens(theta), penalty_N, LENGTHS)
    assert (gradient(by_token(POLICY, myopic_N), theta) - wanted).abs().max() > 1e-3


# ---------------- the old policy


@pytest.mark.parametrize("level", LEVELS)
def test_divergences_to_the_old_policy(level: str) -> None:
    theta = parameter()
    for estimator, wanted in [
        (divergences.old_to_policy, exact(level, OLD, OLD, theta)),
        (divergences.policy_to_old, exact(level, OLD, theta, OLD)),
    ]:
        estimate = mean_of(level, OLD, estimator, theta, OLD)
        loops.close(estimate, wanted)
        loops.close(gradient(estimate, theta), gradient(wanted, theta))
    # −k1 has the value of the first and no more.
    loops.close(-mean_of(level, OLD, divergences.k1, theta, OLD), exact(level, OLD, OLD, theta))


# ---------------- policy gradients

REWARD = loops.random(27, 9)


def objective(theta: Tensor) -> Tensor:
    return (whole(theta).exp() * REWARD).sum()


def test_the_enumerated_policy_gradient() -> None:
    """Every ratio that is exact gives ∇E[R], on policy or from the old policy's samples."""
    theta = parameter()
    exact = gradient(objective(theta), theta)
    advantage_N = segments.spread(REWARD, LENGTHS)
    on_policy = by_token(POLICY, weighted.log_prob(tokens(theta), advantage_N, LENGTHS))
    loops.close(gradient(on_policy, theta), exact)
    log_ratio_N = ratios.sequence_product(tokens(theta), tokens(OLD), LENGTHS)
    one_action = surrogates.unclipped(log_ratio_N, advantage_N, LENGTHS)
    loops.close(gradient(by_token(OLD, one_action) / 3, theta), exact)
