"""bfloat16 autocast on a CPU: where it applies, what it moves, and how its gain is found out."""

from __future__ import annotations

import pytest
import torch

from keel.config.model import Autocast
from keel.learn.ranks import ONE
from keel.models import policy as policies
from keel.models.families import uses_autocast
from keel.models.policy import (
    ProductTimes,
    needs_resolution,
    resolve_autocast,
    rounding_effect,
    time_products,
)
from tests.cluster.updates import built, step
from tests.models.tiny import batch, policy, spec

WORDS = 15
LOG_PROB = 0.04
"""Nats. bfloat16 keeps 8 bits, so that a product rounds at 4e-3; the largest found is 0.014."""
GRADIENT = 0.03
"""Of the gradient's norm; the largest found is 0.013."""


@pytest.mark.parametrize(
    ("autocast", "dtype", "expected"),
    [
        (True, "float32", False),
        (False, "float32", False),
        ("auto", "float32", False),
        ("bfloat16", "float32", True),
        ("bfloat16", "float64", False),
    ],
)
def test_only_bfloat16_rounds_on_a_cpu(autocast: Autocast, dtype: str, expected: bool) -> None:
    made = policy(dtype=dtype, autocast=autocast)
    assert uses_autocast(made.model, made.autocast) is expected
    _, packed = batch(WORDS)
    exact = policy(dtype=dtype, autocast=False)
    same = torch.equal(made.scores(packed).log_prob_N, exact.scores(packed).log_prob_N)
    assert same is not expected


ROUNDED: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("llama", {"rank": 4}),
    ("llama", {"activation_checkpointing": True}),
    ("gpt2", {}),
    ("gemma2", {}),  # soft caps
    ("gpt_oss", {}),  # sinks
]


@pytest.mark.parametrize(("family", "keys"), ROUNDED, ids=str)
def test_rounding_moves_log_probs_and_gradient_within_a_bound(
    family: str, keys: dict[str, object]
) -> None:
    made = policy(family, autocast="bfloat16", **keys)
    _, packed = batch(WORDS)
    weight_N = torch.linspace(-1, 1, len(packed.target_N))
    scores = made.scores(packed, entropy=True)
    assert scores.log_prob_N.dtype == torch.float32
    assert scores.entropy_N is not None
    assert scores.entropy_N.dtype == torch.float32
    effect = rounding_effect(made, packed, weight_N)
    assert effect.tokens == len(packed.target_N)
    assert 1e-4 < effect.mean <= effect.largest < LOG_PROB
    assert 1e-4 < effect.gradient < GRADIENT
    assert made.autocast == "bfloat16"
    assert all(p.grad is None for p in made.parameters())


def test_a_policy_in_float32_is_not_moved() -> None:
    _, packed = batch(WORDS)
    effect = rounding_effect(policy(), packed, torch.ones(len(packed.target_N)))
    assert (effect.mean, effect.largest, effect.gradient) == (0, 0, 0)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_updates_in_bfloat16_follow_those_in_float32(name: str) -> None:
    """Losses and norms of gradients of four updates on two ragged batches.

    Old and new log-probabilities are rounded alike, so ratios and losses hardly move: the largest
    differences found are 3e-5 of losses up to 0.3, and 6e-4 of the norms.
    """
    found = []
    for autocast in (False, "bfloat16"):
        learner = built(name, False, ONE, autocast=autocast)
        found.append([metrics for at in range(2) for metrics in step(learner, name, at)])
        weights = [*learner.policy.parameters()]
        assert all(weight.dtype == torch.float32 for weight in weights)
        moments = [m for o in learner.optimizers.values() for m in o.state().values()]
        assert all(m.dtype == torch.float32 for m in moments if m.is_floating_point())
    for exact, rounded in zip(*found, strict=True):
        assert rounded["loss"] == pytest.approx(exact["loss"], abs=2e-4)
        assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=3e-3)
    assert found[0] != found[1]


def test_products_are_timed_in_the_sizes_of_the_model() -> None:
    made = policy()
    sizes = policies._product_sizes(made.model.base_model)
    hidden, mlp = 32, made.model.config.intermediate_size
    # Of two layers: q and o; k and v, of half as many heads; gate and up; down.
    assert sizes == {(hidden, hidden): 4, (16, hidden): 4, (mlp, hidden): 4, (hidden, mlp): 2}
    times = time_products(made.model)
    assert min(times.float32, times.bfloat16) > 0
    assert "640 tokens take" in str(times)


def test_bfloat16_pays_where_it_takes_much_less_time() -> None:
    assert ProductTimes(float32=1.0, bfloat16=0.5).bfloat16_pays
    assert not ProductTimes(float32=1.0, bfloat16=0.9).bfloat16_pays


def test_only_auto_in_float32_is_left_to_a_timing() -> None:
    for autocast, dtype, expected in (
        ("auto", "float32", True),
        ("auto", "float64", False),
        ("bfloat16", "float32", False),
        (True, "float32", False),
    ):
        model = spec(dtype=dtype, autocast=autocast)
        assert needs_resolution(model, policy(dtype=dtype)) is expected
    made, asked = policy(autocast="auto"), spec(autocast="auto")
    assert resolve_autocast(asked, made, True).autocast == made.autocast == "bfloat16"
    assert resolve_autocast(asked, made, False).autocast is made.autocast is False
