"""Shared prompts, and sequences without gradient, against a plain pass over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import CustomSurrogate
from keel.config.stage import Optimizer
from keel.learn import learner as learner_module
from keel.learn.batch import Batch, Estimates, TrainBatch, from_groups
from keel.learn.learner import Learner, backward
from keel.learn.loss import prepare
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.models.attention import install
from keel.models.packed import Packed
from keel.models.policy import Policy
from keel.models.reference import value_head_for
from keel.types import Completion, Group, Prompt
from tests.engines.tiny import TOKENIZER, tiny
from tests.learn.flat import answer

PLAN = [  # tokens of the prompt, and of each answer which are the policy's
    (1, ["1", "0110", "1"]),
    (5, ["111"]),
    (9, ["001", "00", "111111", "111"]),
    (4, ["1111", "1111", "1111"]),
]


def batch() -> Batch:
    """Groups of several sizes; the third prompt comes again as a group of its own."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(2, len(TOKENIZER), count)

    def marked(marks: str) -> Completion:
        written = [mark == "1" for mark in marks]
        own = tokens(len(marks))
        return answer(own, written, rng.normal(-3, 1, len(marks)).astype(np.float32))

    groups = [
        Group(Prompt(f"p{i}", "", tokens=tuple(tokens(count).tolist())), tuple(map(marked, marks)))
        for i, (count, marks) in enumerate(PLAN)
    ]
    groups.append(Group(groups[2].prompt, (marked("10011"), marked("11"), marked(""))))
    return from_groups(groups)


def policy(family: str) -> Policy:
    model = tiny(family)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    install(model)
    return Policy(model, TOKENIZER)


def learner(family: str = "llama", tokens: int = 1000, *, value: bool = False) -> Learner:
    made = policy(family)
    head = value_head_for(made) if value else None
    named = trainable(made) + ([] if head is None else trainable(head, "value_head."))
    return Learner(made, WeightOptimizer(named, Optimizer()), TokenBudget(tokens), value_head=head)


def gradients(found: Learner) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in found.optimizer.parameters
    }


def alike(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    """Norms and rotary embeddings work in float32 inside transformers: hence 1e-6."""
    assert one.keys() == other.keys()
    scale = max(float(g.abs().max()) for g in other.values() if g is not None)
    for name, gradient in one.items():
        wanted = other[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None and wanted is not None:
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6 * scale, msg=name)


ORDERS: dict[str, Sequence[int]] = {
    "as they come": range(14),
    "shuffled": [3, 2, 0, 1, 8, 9, 7, 6, 5, 4, 10, 13, 11, 12],
    "some": [0, 2, 4, 6, 7, 11, 12],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_shared_prompt_changes_no_score_and_no_gradient(family: str, order: Sequence[int]) -> None:
    chosen = batch().select(order)
    found = learner(family, value=True)
    plain = Packed(chosen.tokens_T, chosen.input_lengths, chosen.target_N)
    results = []
    for packed in (chosen.packed, plain):
        assert torch.equal(packed.scored(), plain.scored())
        scores = found.policy.scores(packed, 0.7, entropy=True, value_head=found.value_head)
        weight = torch.randn(
            len(scores.log_prob_N), generator=torch.Generator().manual_seed(1)
        ).double()
        assert scores.entropy_N is not None and scores.value_N is not None  # noqa: PT018
        total = scores.log_prob_N + 0.3 * scores.entropy_N + scores.value_N
        (total * weight).sum().backward()
        results.append((scores.log_prob_N.detach(), gradients(found)))
        found.clear()
    assert len(chosen.packed.tokens_T) < len(plain.tokens_T)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    alike(results[0][1], results[1][1])


def test_prompt_is_packed_once_for_neighbours_only() -> None:
    found = batch()
    #        p0       p1  p2          p3       p2 again; an answer without tokens goes alone
    assert found.shared == (0, 1, 1, 0, 0, 9, 9, 9, 0, 4, 4, 0, 9, 0)
    assert len(found.packed.tokens_T) == sum(found.input_lengths) - sum(found.shared)
    assert found.select([0, 3, 1]).shared == (0, 0, 0)
    assert found.select([1, 2, 4, 7]).shared == (0, 1, 0, 9)
    micros = found.micro_batches(17)
    entering = [sum(m.input_lengths) - sum(m.shared) for m in micros]
    assert entering == [len(m.packed.tokens_T) for m in micros] == [15, 14, 15, 12, 16, 16, 9]


def with_zero_advantages(algorithm: Algorithm) -> TrainBatch[Batch]:
    """A prepared batch in which the advantages of seven sequences are 0."""
    made = batch().select(range(11))
    generator = torch.Generator().manual_seed(3)
    old_N = -torch.rand(len(made.target_N), generator=generator, dtype=torch.float64) - 1
    advantage_S = torch.randn(made.sequences, generator=generator, dtype=torch.float64)
    advantage_S[[0, 1, 2, 4, 5, 6, 7]] = 0
    made = replace(
        made,
        engine_log_prob_N=old_N + 0.1,
        old_log_prob_N=old_N,
        reference_log_prob_N=old_N - 0.2,
        value_N=old_N,
    )
    estimates = Estimates(advantage_S.repeat_interleave(made.lengths_S), old_N + 1)
    return prepare(algorithm, made, estimates, 8)


def algorithm_of(name: str, **changes: object) -> Algorithm:
    return PRESETS[name].algorithm.model_copy(update=changes)


CASES = {
    "grpo without a divergence": (algorithm_of("grpo", divergence=None), 0.0, 7),
    "grpo, beta 0": (algorithm_of("grpo"), 0.0, 7),
    "grpo": (algorithm_of("grpo"), 0.1, 0),
    "gspo": (algorithm_of("gspo", divergence=None), 0.0, 7),
    "entropy": (algorithm_of("grpo", divergence=None, entropy=0.01), 0.0, 0),
    "dr_grpo": (algorithm_of("dr_grpo", divergence=None), 0.0, 7),
    "value": (algorithm_of("ppo"), 0.0, 0),
}


@pytest.mark.parametrize(("algorithm", "beta", "left_out"), CASES.values(), ids=CASES)
def test_sequences_without_gradient_are_in_the_metrics(
    algorithm: Algorithm, beta: float, left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = learner(tokens=20, value=algorithm.value is not None)
    prepared = with_zero_advantages(algorithm)
    assert len(learner_module.by_gradient(algorithm, prepared, beta)[1]) == left_out
    whole = backward(found, algorithm, prepared, beta, 1000)
    wanted = gradients(found)
    found.clear()
    seen: dict[str, Tensor | None] = {}

    def stop(optimizer: WeightOptimizer) -> Tensor:
        seen.update(gradients(found))
        found.clear()
        return torch.tensor(1.0)

    monkeypatch.setattr(WeightOptimizer, "clip", stop)
    monkeypatch.setattr(learner_module, "apply_all", lambda *given: None)
    made = found.update(algorithm, prepared, beta, (0.0, 0.0))
    alike(seen, wanted)
    assert list(made.metrics) == [*whole.metrics, "grad_norm"]
    for name, value in whole.metrics.items():
        assert made.metrics[name] == pytest.approx(float(value), rel=1e-6, abs=1e-9), name
    assert list(made.tokens) == list(whole.tokens)
    for name, value_N in whole.tokens.items():
        torch.testing.assert_close(made.tokens[name], value_N, rtol=1e-5, atol=1e-7)
    terms = sum(float(v.sum()) for name, v in made.tokens.items() if name.startswith("loss/"))
    assert terms == pytest.approx(made.metrics["loss"], rel=1e-5, abs=1e-6)


def test_all_advantages_zero_give_zero_gradients() -> None:
    """So that moments and weights decay as usual."""
    algorithm = algorithm_of("grpo", divergence=None)
    prepared = replace(
        with_zero_advantages(algorithm),
        advantage_N=torch.zeros_like(with_zero_advantages(algorithm).advantage_N),
    )
    found = learner()
    moving, others = learner_module.by_gradient(algorithm, prepared, 0.0)
    assert (len(moving), len(others)) == (1, 10)
    backward(found, algorithm, prepared.select(moving), 0.0, 1000)
    assert all(g is not None and not g.any() for g in gradients(found).values())


def test_users_surrogate_leaves_no_sequence_out() -> None:
    algorithm = algorithm_of("grpo", divergence=None)
    own = CustomSurrogate(function="builtins:sum")
    assert not learner_module.by_gradient(
        algorithm.model_copy(update={"surrogate": own}), with_zero_advantages(algorithm), 0.0
    )[1]
