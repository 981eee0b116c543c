"""Laws of GAE's bias on a model whose expectations are sums, with the study that docs figures use.

Tolerances are those of float64 sums over some hundred terms.
"""

from __future__ import annotations

import pytest
import torch

from studies.evidence import gae
from studies.evidence.enumerable import EnumerableLM


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
