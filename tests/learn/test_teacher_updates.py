"""Updates with a teacher in the loss: a micro-batch of any size gives one gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from keel.algorithms.auxiliary import DemonstrationNLL
from keel.algorithms.losses import LossDistillation
from keel.algorithms.presets import PRESETS
from keel.algorithms.ratios import Weights
from keel.learn.batch import Batch, Estimates, from_groups
from keel.learn.learner import backward
from keel.learn.loss import demonstrated, prepare
from keel.learn.ranks import ONE
from keel.types import Group, Prompt
from tests.cluster.updates import built, parts_of
from tests.learn.flat import answer


def test_sequences_and_their_teachers_prompts_are_selected_together() -> None:
    """Sizes are of the larger of both, sequence by sequence."""

    def batch_of(*prompts: int) -> Batch:
        return from_groups(
            [
                Group(Prompt(str(i), "", tokens=(1,) * count), (answer([2 + i, 9]),))
                for i, count in enumerate(prompts)
            ]
        )

    batch = replace(batch_of(1, 5, 2), taught=batch_of(4, 1, 6))
    assert list(batch.sizes.lengths) == [6, 7, 8]
    picked = batch.select([2, 0])
    assert picked.taught is not None
    for one in (picked, picked.taught):
        assert one.tokens_T[one.target_N].tolist() == [4, 9, 2, 9]
    assert picked.taught.input_lengths == (8, 6)
    assert list(picked.sizes.lengths) == [8, 6]


def gradients(tokens: int) -> tuple[float, dict[str, Tensor]]:
    """The divergence of a batch, in micro-batches, and its gradient in each weight, in float64."""
    learner = built("gkd", False, ONE, family="gpt2")  # Llama's norms are float32
    batch = parts_of(learner, "gkd", 0)[0].batch
    made = backward(learner, PRESETS["gkd"].algorithm, batch, 0.0, tokens)
    found = {name: p.grad for name, p in learner.policy.trainable().items() if p.grad is not None}
    return float(made.metrics["teacher/divergence"]), found


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64])
def test_micro_batches_do_not_change_a_gradient(tokens: int) -> None:
    whole, wanted = gradients(100_000)
    cut, found = gradients(tokens)
    assert whole > 1e-3
    assert cut == pytest.approx(whole, abs=1e-12)
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-4
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 100_000])
def test_demonstrations_have_the_divergence_of_completions(tokens: int) -> None:
    """The same sequences as completions and as demonstrations, half and half, are them once."""
    rows = [((1, 2, 3), [4, 5]), ((6,), [7, 8, 9, 1]), ((2, 2), [3])]
    shown = from_groups([Group(Prompt("", "", tokens=p), (answer(a),)) for p, a in rows])
    more = {
        "weights": Weights(kind="token_mean"),
        "distillation": LossDistillation(coefficient=0.3),
    }
    plain = PRESETS["gkd"].algorithm.model_copy(update=more)
    term = DemonstrationNLL(coefficient=0.5, weighting="teacher")
    mixed = plain.model_copy(update={"auxiliary": (term,)})
    estimates = Estimates(torch.zeros(7, dtype=torch.float64))
    both = demonstrated(mixed, prepare(mixed, shown, estimates, 16), shown, 1)
    found = []
    for algorithm, batch in ((plain, prepare(plain, shown, estimates, 16)), (mixed, both)):
        learner = built("gkd", False, ONE, family="gpt2")
        loss = backward(learner, algorithm, batch, 0.0, tokens).metrics["loss"]
        own = learner.policy.trainable().items()
        found.append((float(loss), {n: p.grad for n, p in own if p.grad is not None}))
    (whole, wanted), (half, gradients) = found
    assert whole > 3e-4
    assert half == pytest.approx(whole, abs=1e-12)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-12, msg=name)
