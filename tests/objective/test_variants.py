"""Surrogates and advantages of 2025 and 2026 against loops written apart."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.objective import baselines, contrasts, group, surrogates, weighted
from tests.objective import loops

RAGGED = st.lists(st.integers(1, 7), min_size=1, max_size=6)
SEED = st.integers(0, 1000)


def batch(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-ratios, advantages, log-probabilities and lengths."""
    size = sum(lengths)
    ratio_N, advantage_N, log_prob_N = (loops.random(size, seed + k, 0.5) for k in range(3))
    return ratio_N, advantage_N, log_prob_N, loops.ints(lengths)


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, seed=SEED)
def test_weighted_surrogates_are_the_loops(lengths: list[int], seed: int) -> None:
    ratio_N, advantage_N, log_prob_N, lengths_S = batch(lengths, seed)
    ratios, a, ell = (loops.split(x, lengths) for x in (ratio_N, advantage_N, log_prob_N))
    products = [math.exp(sum(r)) for r in ratios]

    def rows(weigh: object) -> list[float]:
        return [
            weigh(i, t) * a[i][t] * ell[i][t]  # type: ignore[operator]
            for i, n in enumerate(lengths)
            for t in range(n)
        ]

    def gamma(i: int, t: int) -> float:
        k, rate = (2.0, 3.0) if a[i][t] >= 0 else (3.0, 2.0)
        w = min(max(products[i], 1e-8), math.exp(20))
        return math.exp(rate) * w**k * math.exp(-rate * w)

    found = weighted.vespo(
        ratio_N, advantage_N, lengths_S, log_prob_N=log_prob_N,
        power_positive=2.0, rate_positive=3.0, power_negative=3.0, rate_negative=2.0,
    )  # fmt: skip
    loops.close(found, rows(gamma))
    outcomes = loops.random(len(lengths), seed + 9).tolist()
    found = weighted.topr(
        ratio_N, advantage_N, lengths_S,
        log_prob_N=log_prob_N, outcome_S=loops.tensor(outcomes), threshold=0.2,
    )  # fmt: skip
    loops.close(found, rows(lambda i, t: 1.0 if outcomes[i] > 0.2 else min(products[i], 1.0)))


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, seed=SEED)
def test_surrogates_of_the_ratio_are_the_loops(lengths: list[int], seed: int) -> None:
    ratio_N, advantage_N, log_prob_N, lengths_S = batch(lengths, seed)
    flat = list(zip(ratio_N.tolist(), advantage_N.tolist(), log_prob_N.tolist(), strict=True))
    found = weighted.dro(ratio_N, advantage_N, lengths_S, log_prob_N=log_prob_N, beta=0.3)
    loops.close(found, [a * p - 0.15 * d * d for d, a, p in flat])
    found = surrogates.kimi(ratio_N, advantage_N, lengths_S, tau=0.2)
    loops.close(found, [math.exp(d) * (a - 0.2 * d) for d, a, _ in flat])
    chosen_N = (loops.random(len(flat), seed + 5) > 0).double()
    found = surrogates.kl_cov(ratio_N, advantage_N, lengths_S, prepared_N=chosen_N, coefficient=0.7)
    loops.close(
        found,
        [math.exp(d) * a - 0.7 * k * abs(d) for (d, a, _), k in zip(flat, chosen_N, strict=True)],
    )
    values = []
    for r, a in zip(loops.split(ratio_N, lengths), loops.split(advantage_N, lengths), strict=True):
        for t, advantage in enumerate(a):
            future = sum(2 ** (-(k - t) / 4) * r[k] for k in range(t, len(r)))
            factor = min(max(math.exp(future), 0.9), 1.2)
            rho = math.exp(r[t])
            values.append(factor * min(rho * advantage, min(max(rho, 0.8), 1.28) * advantage))
    found = surrogates.fipo(
        ratio_N, advantage_N, lengths_S, low=0.2, high=0.28, half_life=4.0, floor=0.9, cap=1.2
    )
    loops.close(found, values)


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, seed=SEED)
def test_real_has_the_value_and_gradient_of_its_loss(lengths: list[int], seed: int) -> None:
    """Of the sum over all groups, written out for autograd; one answer has no reward."""
    ratio_N, advantage_N, _, lengths_S = batch(lengths, seed)
    outcome_S = loops.random(len(lengths), seed + 3)
    outcome_S[0] = math.nan
    groups = [i // 3 for i in range(len(lengths))]
    leaf = ratio_N.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for number in set(groups):
        sums = {True: torch.ones(()).double(), False: torch.ones(()).double()}
        for i, part in enumerate(leaf.split(lengths)):
            if groups[i] == number and not math.isnan(outcome_S[i]):
                right = float(outcome_S[i]) > 0
                sums[right] = sums[right] + ((-1 if right else 1) * part.mean() / 0.5).exp()
        total = total - sums[True].log() - sums[False].log()
    shares = contrasts.real_shares(
        ratio_N, lengths_S, outcome_S, loops.ints(groups), threshold=0.0, temperature=0.5
    )
    own = ratio_N.clone().requires_grad_()
    found_N = contrasts.real(
        own, advantage_N, lengths_S, prepared_N=shares.repeat_interleave(lengths_S, dim=0)
    )
    # Each token of a sequence holds the sequence's share.
    found = torch.stack([part.mean() for part in found_N.split(lengths)]).sum()
    loops.close(found.view(1), [float(total.detach())])
    if len(lengths) > 1:
        loops.close(torch.autograd.grad(found, own)[0], torch.autograd.grad(total, leaf)[0])


@settings(max_examples=40, deadline=None)
@given(lengths=RAGGED, seed=SEED)
def test_online_dpo_has_the_value_and_gradient_of_its_loss(lengths: list[int], seed: int) -> None:
    """Of the mean over the groups' completions, written out for autograd; rewards often tie, and
    one answer has none."""
    log_prob_N, reference_N, advantage_N, lengths_S = batch(lengths, seed)
    rewards = [float(k) for k in (loops.random(len(lengths), seed + 3) > 0)]
    rewards[0] = math.nan if seed % 2 else rewards[0]
    groups = [5 - i // 3 for i in range(len(lengths))]
    leaf = log_prob_N.clone().requires_grad_()
    margins = (leaf - reference_N).split(lengths)
    total = torch.zeros((), dtype=torch.float64)
    for number in set(groups):
        own = [i for i, g in enumerate(groups) if g == number and not math.isnan(rewards[i])]
        if len({rewards[i] for i in own}) < 2:
            continue
        h = {i: margins[i].sum() for i in own}
        order = sorted(own, key=lambda i: (-rewards[i], float(h[i].detach())))
        best = order[0]
        worst = max(own, key=lambda i: (-rewards[i], float(h[i].detach())))
        total = total + len(own) * torch.nn.functional.logsigmoid(0.3 * (h[best] - h[worst]))
    shares = contrasts.online_dpo_shares(
        log_prob_N, reference_N, lengths_S, loops.tensor(rewards), loops.ints(groups), beta=0.3
    )
    own_N = log_prob_N.clone().requires_grad_()
    found_N = contrasts.online_dpo(
        own_N, advantage_N, lengths_S, prepared_N=shares.repeat_interleave(lengths_S, dim=0)
    )
    found = torch.stack([part.mean() for part in found_N.split(lengths)]).sum()
    loops.close(found.view(1), [float(total.detach())])
    wanted = torch.zeros_like(leaf)
    if total.requires_grad:
        wanted = torch.autograd.grad(total, leaf)[0]
    loops.close(torch.autograd.grad(found, own_N)[0], wanted)


# ---------------- advantages

# Multiples of 1/4: sums are exact, so equal rewards are equal whatever the order.
REWARDS = st.lists(
    st.tuples(
        st.one_of(st.integers(-2, 8).map(lambda k: k / 4), st.just(math.nan)),
        st.sampled_from([-7, 0, 3]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(rows=REWARDS)
def test_group_advantages_are_the_loops(rows: list[tuple[float, int]]) -> None:
    rewards, groups = (list(column) for column in zip(*rows, strict=True))
    r, g = loops.tensor(rewards), loops.ints(groups)
    present = [x for x in rewards if not math.isnan(x)]
    alpha = len(present) / max(1, sum(x != 0 for x in present))
    relative, best, best_std, rescaled = [], [], [], []
    for i, reward in enumerate(rewards):
        own = [rewards[j] for j in loops.members(groups, i, rewards)]
        if math.isnan(reward) or len(set(own)) < 2:
            for column in (relative, best, best_std, rescaled):
                column.append(0.0)
            continue
        mean, order = sum(own) / len(own), sorted(own)
        relative.append((reward - mean) / (mean + 1e-4) if mean > 0 else 0.0)
        rescaled.append(alpha * (reward - mean))
        lead = order[-1] - order[-2] if reward == order[-1] else 0.0
        best.append(lead)
        best_std.append(lead / (loops.deviation(own, 1) + 1e-6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loops.close(group.mean_relative(r, g, epsilon=1e-4), relative)
        loops.close(group.best_of_group(r, g, scale="none", epsilon=1e-6), best)
        loops.close(group.best_of_group(r, g, scale="std", epsilon=1e-6), best_std)
        loops.close(group.rescaled_baseline(r, g), rescaled)
        other = loops.random(len(rewards), 1).tolist()
        found = group.separately_normalised(
            [r, loops.tensor(other)], g, weights=[1.0, 0.5], epsilon=1e-4
        )
        parts = [loops.group_relative(x, groups, "std", 1e-4) for x in (rewards, other)]
        loops.close(found, [x + 0.5 * y for x, y in zip(*parts, strict=True)])


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([4, 1])), min_size=1, max_size=6),
       seed=SEED)  # fmt: skip
def test_optimal_token_is_the_loop(rows: list[tuple[int, int]], seed: int) -> None:
    lengths, groups = (list(column) for column in zip(*rows, strict=True))
    size = sum(lengths)
    reward_N, old_N = loops.random(size, seed), -loops.random(size, seed + 1).abs()
    absent = len(lengths) - 1 if seed % 2 else -1  # without a reward
    if absent >= 0:
        reward_N[-1] = math.nan
    squares_N = loops.random(size, seed + 2).sigmoid()
    reward, old, squares = (loops.split(x, lengths) for x in (reward_N, old_N, squares_N))
    returns = [[sum(row[t:]) for t in range(len(row))] for row in reward]
    weight = [
        [sum(1 - 2 * math.exp(o[j]) + q[j] for j in range(t + 1)) for t in range(len(o))]
        for o, q in zip(old, squares, strict=True)
    ]
    for tail in (True, False):
        wanted = []
        for i, length in enumerate(lengths):
            peers = [j for j in range(len(lengths)) if groups[j] == groups[i]]
            for t in range(length):
                there = [j for j in peers if lengths[j] > t and j != absent]
                if i == absent:
                    wanted.append(0.0)
                    continue
                mass = sum(weight[j][t] for j in there) + 1e-8
                base = sum(returns[j][t] * weight[j][t] for j in there) / mass
                alone = len(there) == 1 if tail else len({*peers} - {absent}) == 1
                wanted.append(returns[i][t] - (0.0 if alone else base))
        found = baselines.optimal_token(
            reward_N, old_N, squares_N, loops.ints(groups), loops.ints(lengths), zero_tail=tail
        )
        # The weights are differences of sums, and some are near 0.
        loops.close(found, wanted, 1e-7)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_no_answer_leads_where_several_are_best(scale: str) -> None:
    reward_S, groups_S = loops.tensor([1.0, 1.0, 0.0]), loops.ints([0, 0, 0])
    found = group.best_of_group(reward_S, groups_S, scale=scale, epsilon=0.0)  # type: ignore[arg-type]
    assert found.tolist() == [0.0, 0.0, 0.0]
