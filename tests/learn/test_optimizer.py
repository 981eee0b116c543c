"""The optimizer: weight decay; losses, gradients and weights that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import Trainer

from keel.algorithms.group_advantages import GroupRelative
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip
from keel.config.stage import Optimizer
from keel.learn.batch import Batch, Estimates, TrainBatch
from keel.learn.learner import Learner
from keel.learn.loss import prepare
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import (
    Cause,
    NotFinite,
    WeightOptimizer,
    bad_weight,
    find_offending_sequence,
    step_all,
    stop_unless_finite,
    trainable,
)
from keel.models.build import build_model
from keel.models.families import FAMILIES
from keel.models.head import ValueHead
from keel.types import KeelError
from tests.learn.flat import blank
from tests.models import tiny
from tests.models.tiny import build, policy

ALGORITHM = Algorithm(
    advantage=GroupRelative(), ratio="token", surrogate=Clip(), weights=Weights(kind="token_mean")
)


def batch_of(*lengths: int) -> Batch:
    """Sequences of a prompt and so many written tokens each."""
    made = blank(lengths, [0] * len(lengths))
    return replace(
        made,
        tokens_T=1 + (7 * made.tokens_T) % 11,
        engine_log_prob_N=torch.full((sum(lengths),), -2.0),
    )


def prepared(batch: Batch, **changes: torch.Tensor) -> TrainBatch[Batch]:
    """The batch with advantages, or with these fields in place of its own."""
    estimates = Estimates(changes.pop("advantage_N", torch.linspace(-1, 1, sum(batch.lengths))))
    return prepare(ALGORITHM, replace(batch, **changes), estimates, 9)  # type: ignore[arg-type]


def learner_of() -> Learner:
    policy = tiny.policy()
    return Learner(
        policy,
        WeightOptimizer(trainable(policy), Optimizer(learning_rate=1e-2)),
        TokenBudget(10_000),
    )


def weights(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for _, p in learner.optimizer.parameters]


def same(learner: Learner, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, weights(learner), strict=True))


def test_only_loss_and_gradient_decide_on_a_step() -> None:
    stop_unless_finite({"loss": 1.0, "ratio/mean": math.inf, "entropy": math.nan})
    for name in (
        "loss",
        "loss/policy",
        "kl/mismatched",
        "value/loss",
        "grad_norm",
        "value/grad_norm",
    ):
        with pytest.raises(NotFinite, match=name) as caught:
            stop_unless_finite({"kl": 0.0, name: math.nan})
        assert caught.value.names == (name,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("field", "term"),
    [
        ("advantage_N", "the advantage"),
        ("old_log_prob_N", "the old log-probability"),
        ("engine_log_prob_N", "the engine's log-probability"),
    ],
)
def test_cause_names_an_input_with_its_token(field: str, term: str, bad: float) -> None:
    learner = learner_of()
    batch = replace(batch_of(2, 3, 4), old_log_prob_N=torch.full((9,), -2.0))
    for at, token in ((5, 0), (6, 1)):  # of the third sequence
        clean = torch.linspace(-1, 1, 9) if field == "advantage_N" else getattr(batch, field)
        values = clean.clone()
        values[at] = bad
        part = prepared(batch, **{field: values})
        assert learner.cause_of(ALGORITHM, part, 0.0) == Cause(term, 2, token)


def test_update_takes_no_step_and_leaves_no_gradient() -> None:
    learner = learner_of()
    before = weights(learner)
    advantage_N = torch.linspace(-1, 1, 5)
    advantage_N[3] = math.nan
    batch = prepared(batch_of(2, 3), advantage_N=advantage_N)
    with pytest.raises(NotFinite):
        learner.update(ALGORITHM, batch, 0.0, (1e-2, 1e-2))
    assert same(learner, before)
    assert all(p.grad is None for _, p in learner.optimizer.parameters)
    assert not learner.optimizer.state()


def test_cause_names_a_weight() -> None:
    learner = learner_of()
    name, parameter = learner.optimizer.parameters[3]
    with torch.no_grad():
        parameter.view(-1)[0] = math.nan
    cause = learner.cause_of(ALGORITHM, prepared(batch_of(2, 3)), 0.0)
    assert cause == Cause(f"the weights {name}")


def test_cause_names_a_gradient_where_the_loss_is_finite() -> None:
    """√x at 0 has a finite value and an infinite slope; here at one token of one sequence."""
    learner = learner_of()
    batch = prepared(batch_of(3, 3))
    embedding = learner.policy.model.get_input_embeddings()

    def spoil(module: object, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        # Of each sequence's five tokens the last is not fed.
        whole = out.shape[1] == 8
        second = out.shape[1] == 4 and int(args[0][0, 0]) == int(batch.actions.tokens_T[5])
        if not whole and not second:
            return out
        mask = torch.zeros(out.shape[1], 1)
        mask[6 if whole else 2] = 1
        # Value 0 everywhere; the slope of √ at 0 is infinite where the mask is 1.
        return out + (out.detach() - out).mul(mask).abs().sqrt()

    handle = embedding.register_forward_hook(spoil)
    before = weights(learner)
    with pytest.raises(NotFinite) as caught:
        learner.update(ALGORITHM, batch, 0.0, (1e-2, 1e-2))
    assert caught.value.names == ("grad_norm",)
    assert same(learner, before)
    cause = learner.cause_of(ALGORITHM, batch, 0.0)
    handle.remove()
    assert cause.sequence == 1
    assert cause.term.startswith("the gradient of ")


def test_metric_that_decides_nothing_is_no_cause() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))

    def learn(i: int) -> dict[str, float]:
        parameter.grad = torch.zeros(2)
        return {"loss": math.nan if i == 2 else 0.0, "kl": math.inf, "margin": math.nan}

    cause = find_offending_sequence(learn, range(4), [("p", parameter)], lambda: None)
    assert cause == Cause("loss", 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_step_that_makes_weights_non_finite_is_an_error(bad: float) -> None:
    one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = WeightOptimizer([("one", one), ("two", two)], Optimizer())
    one.grad, two.grad = torch.ones(2), torch.ones(2)
    with torch.no_grad():
        two[1] = bad
    with pytest.raises(KeelError, match=r"weights two non-finite.*lower optimizer\.learning_rate"):
        optimizer.step(0.1)


def test_weights_whose_squares_overflow_are_finite() -> None:
    parameter = torch.nn.Parameter(torch.full((3,), 1e30))
    optimizer = WeightOptimizer([("p", parameter)], Optimizer())
    assert not optimizer.began
    parameter.grad = torch.ones(3)
    optimizer.step(0.1)
    assert optimizer.began
    assert bad_weight(optimizer.parameters) is None


def test_two_optimizers_step_both_or_neither() -> None:
    one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    both = [WeightOptimizer([(name, p)], Optimizer()) for name, p in (("one", one), ("two", two))]
    one.grad, two.grad = torch.ones(2), torch.tensor([1.0, math.inf])
    norms = step_all(both, [0.1, 0.1])
    assert norms == [pytest.approx(math.sqrt(2)), math.inf]
    assert one.tolist() == two.tolist() == [1.0, 1.0]
    assert one.grad is None
    assert two.grad is None
    one.grad, two.grad = torch.ones(2), torch.ones(2)
    step_all(both, [0.1, 0.2])
    assert one.tolist() == pytest.approx([0.9, 0.9])
    assert two.tolist() == pytest.approx([0.8, 0.8])


# ---------------------------------------------------------------- weight decay


def decayed(module: nn.Module, choice: Optimizer) -> set[str]:
    """The parameters that a step without a gradient changes."""
    named = trainable(module)
    for _, parameter in named:
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    WeightOptimizer(named, choice).step(0.1)
    left = {name: parameter.detach().unique().tolist() for name, parameter in named}
    assert all(values in ([1.0], [pytest.approx(0.95)]) for values in left.values())
    return {name for name, values in left.items() if values != [1.0]}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_norms_and_biases_are_not_decayed(family: str) -> None:
    """The rule of transformers.Trainer, and no vector (gpt-oss has some of attention)."""
    model = build_model(build(family), 0, torch.float32)
    wanted = set(Trainer.get_decay_parameter_names(cast("Any", None), model))
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
    found = decayed(model, Optimizer(weight_decay=0.5))
    assert found == wanted & matrices
    every = {name for name, _ in model.named_parameters()}
    assert (found == every) == (family == "olmo")  # its norms have no weights


def test_adapters_and_value_heads_are_decayed_as_matrices() -> None:
    adapted = decayed(policy(rank=2), Optimizer(weight_decay=0.5))
    assert adapted
    assert all(".lora_" in name for name in adapted)
    assert decayed(ValueHead(8), Optimizer(weight_decay=0.5)) == {"linear.weight"}


def test_nothing_is_decayed_without_weight_decay() -> None:
    assert decayed(policy(), Optimizer()) == set()
