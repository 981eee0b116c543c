"""Laws of the biases of GRPO and GAE, with the studies that docs figures use.

Tolerances are those of float64 sums over some hundred terms, and of the ε of GRPO's deviation.
"""

from __future__ import annotations

import math

import pytest
import torch

from studies.evidence import bias, gae, ratios
from studies.evidence.enumerable import EnumerableLM


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("size", [2, 8])
def test_without_the_deviation_prompts_count_alike(p: float, size: int) -> None:
    right, wrong = bias.expected_advantages(p, size, "none")
    # Every completion's own part in the mean takes 1/G of what it would get.
    assert right * p == pytest.approx(p * (1 - p) * (size - 1) / size, abs=1e-12)
    assert right - wrong == pytest.approx((size - 1) / size, abs=1e-12)


@pytest.mark.quick("8")
@pytest.mark.parametrize("size", bias.GROUPS)
def test_the_deviation_weighs_rare_answers_up_to_a_bound_of_the_group(size: int) -> None:
    shares = bias.SHARES[1::2]
    found = [bias.difficulty_weight(p, size, "std") for p in shares]
    assert [1, *found] == sorted([1, *found])
    assert found[-1] == pytest.approx({8: 1.41, 64: 3.39}[size], abs=5e-3)  # as documented
    easy = bias.difficulty_weight(1 - shares[-1], size, "std")
    assert easy == pytest.approx(found[-1], rel=1e-9)
    # One right answer in a group of G, the rest wrong, has A = (1 − 1/G)√G [ddof = 1].
    bound = (1 - 1 / size) * math.sqrt(size)
    right, wrong = bias.expected_advantages(1e-6, size, "std")
    assert right == pytest.approx(bound, rel=1e-3)
    assert abs(wrong) < 1e-3
    assert found[-1] < bound / (sum(abs(a) for a in bias.expected_advantages(0.5, size, "std")))


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_only_weights_by_length_make_wrong_answers_longer(seed: int, scale: bias.Scale) -> None:
    right, wrong = bias.length_drift(seed, scale, by_length=True)
    assert right < -1e-3
    assert wrong > 1e-3
    assert bias.length_drift(seed, scale, by_length=False) == pytest.approx((0, 0), abs=1e-12)


@pytest.mark.parametrize("kind", ratios.KINDS, ids=lambda kind: kind.name)
def test_on_policy_no_token_is_weighed(kind: ratios.Kind) -> None:
    on_policy = torch.zeros(4, 16, dtype=torch.float64)
    assert ratios.error(ratios.multipliers(kind, on_policy)) < 1e-12


def test_a_wild_token_is_divided_by_the_length_in_a_geometric_mean() -> None:
    token, mean, _, product = ratios.KINDS
    log_ratio = torch.zeros(2, 64, dtype=torch.float64)
    log_ratio[:, 5] = ratios.WILD
    by_token = ratios.multipliers(token, log_ratio)
    assert by_token[:, 5].tolist() == pytest.approx([0, 20])  # clipped where it is rewarded
    assert by_token.sum().item() == pytest.approx(2 * 63 + 20)
    by_mean = ratios.multipliers(mean, log_ratio)
    assert by_mean.flatten().tolist() == pytest.approx([math.exp(ratios.WILD / 64)] * 128)
    assert ratios.multipliers(product, log_ratio)[1].tolist() == pytest.approx([20.0] * 64)


# ---------------- GAE


@pytest.mark.parametrize("seed", [3, 4])
def test_exact_values_and_advantages_obey_bellman(seed: int) -> None:
    model = EnumerableLM.drawn(seed)
    probability_ZV = model.logits_ZV.softmax(-1)
    assert float(model.probability_S.sum()) == pytest.approx(1, abs=1e-12)
    # Of the prefix of all, the value is the mean reward; under the policy no advantage remains.
    mean = model.probability_S @ model.reward_S
    assert float(model.value_Z[model.state_N[0]]) == pytest.approx(float(mean), abs=1e-12)
    mean_advantage_Z = (probability_ZV * model.advantage_ZV).sum(-1)
    torch.testing.assert_close(
        mean_advantage_Z, torch.zeros_like(mean_advantage_Z), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_an_exact_critic_gives_an_unbiased_advantage_for_every_lambda(
    seed: int, lam: float
) -> None:
    found = gae.lambda_estimate(seed, lam, critic_error=0.0)
    assert found.advantage_bias < 1e-7  # the root of a sum that is 0 to 1e-15
    assert found.gradient_bias < 1e-12
    assert (found.advantage_std < 1e-7) == (lam == 0)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_wrong_critic_biases_the_gradient_except_at_lambda_one(seed: int) -> None:
    biases = [gae.lambda_estimate(seed, lam, 0.3).gradient_bias for lam in (0.0, 0.5, 0.9, 1.0)]
    assert biases == sorted(biases, reverse=True)
    assert biases[0] > 0.1
    assert biases[-1] < 1e-12
