"""Auxiliary terms in the loss and in an update: their values, and what they do not depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.algorithms.auxiliary import DemonstrationNLL, PositiveNLL, Replies
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch, Estimates, TrainBatch, from_groups
from keel.learn.learner import Learner, backward
from keel.learn.loss import demonstrated, loss, prepare, whole_batch
from keel.learn.optimizer import trainable
from keel.models.head import Scores
from keel.models.packed import Packed
from keel.models.reference import Critic
from keel.types import Completion, Group, Prompt
from tests.learn.flat import answer
from tests.learn.test_invariance import with_everything
from tests.learn.test_shared import learner

TERMS = (
    PositiveNLL(coefficient=0.3, threshold=0.1),
    Replies(coefficient=0.2),
    DemonstrationNLL(coefficient=0.4),
)
TOLERANCE = 1e-12  # float64 sums of some forty numbers in another order
SHAPES = [  # prompts, and for each of their answers which tokens the policy wrote
    ((1, 2, 3), ("11011", "1", "1100111")),
    ((4, 5), ("10", "111")),
    ((6,), ("1010",)),
]


def groups(rng: np.random.Generator) -> list[Group]:
    found = []
    for at, (prompt, answers) in enumerate(SHAPES):
        made: list[Completion] = []
        for marks in answers:
            written = [mark == "1" for mark in marks]
            made.append(answer(rng.integers(0, 12, len(marks)).tolist(), written))
        found.append(Group(Prompt(str(at), "", tokens=prompt), tuple(made)))
    return found


def shown(rng: np.random.Generator) -> Batch:
    """Three demonstrations."""
    lengths = (4, 2, 6)
    every = [answer(rng.integers(0, 12, n).tolist()) for n in lengths]
    return from_groups([Group(Prompt("d", "", tokens=(7, 8)), (one,)) for one in every])


def batch(seed: int = 0) -> tuple[Batch, Estimates, Batch]:
    """A batch with replies and scores, its estimates, and demonstrations."""
    rng = np.random.default_rng(seed)
    made = from_groups(groups(rng), replies=True)
    count = sum(made.lengths)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.from_numpy(scale * rng.normal(size=count))

    old_N = -normal().abs() - 0.1
    names = ("engine_log_prob_N", "reference_log_prob_N", "value_N")
    scores: dict[str, Any] = {name: old_N + normal(0.2) for name in names}
    made = replace(made, old_log_prob_N=old_N, **scores)
    each_S = torch.from_numpy(rng.normal(size=made.sequences)).repeat_interleave(made.lengths_S)
    outcome_S = torch.tensor([1.0, math.nan, 0.5, 0.0, -1.0, 0.2], dtype=torch.float64)
    outcome_N = outcome_S.repeat_interleave(made.lengths_S)
    return made, Estimates(each_S, normal(), outcome_N=outcome_N), shown(rng)


def prepared(algorithm: Algorithm, step: int = 1) -> TrainBatch[Batch]:
    made, estimates, demonstrations = batch()
    return demonstrated(algorithm, prepare(algorithm, made, estimates, 16), demonstrations, step)


def leaves(whole: TrainBatch[Batch]) -> list[Tensor]:
    """Log-probabilities of the N and of the M, entropies and values."""
    generator = torch.Generator().manual_seed(5)
    count, extra = sum(whole.lengths), sum(whole.actions.extra_lengths)
    drawn = [
        torch.randn(n, generator=generator, dtype=torch.float64) for n in (count, extra, count)
    ]
    assert whole.actions.old_log_prob_N is not None
    log_prob_N = whole.actions.old_log_prob_N + 0.3 * drawn[0]
    return [log_prob_N, -drawn[1].abs(), drawn[2].abs(), drawn[2]]


def gradient(
    algorithm: Algorithm, whole: TrainBatch[Batch], parts: Sequence[Sequence[int]]
) -> tuple[float, list[Tensor], dict[str, float]]:
    """The loss and its gradient in the leaves, summed over micro-batches, and its metrics."""
    own = [leaf.requires_grad_() for leaf in leaves(whole)]
    if algorithm.whole_batch:
        whole = whole_batch(algorithm, whole, own[0].detach(), own[2].detach())
    ends = np.cumsum(whole.actions.extra_lengths)
    total, metrics = 0.0, dict[str, float]()
    for part in parts:
        of_N = whole.actions.action_index(list(part))
        spans = [torch.arange(ends[i] - whole.actions.extra_lengths[i], ends[i]) for i in part]
        scores = Scores(own[0][of_N], own[2][of_N], own[3][of_N], None)
        extra_M, taught_N = own[1][torch.cat(spans)], own[0][of_N].square()
        scores = replace(scores, extra_log_prob_M=extra_M, distillation_N=taught_N)
        out = loss(algorithm, whole.select(list(part)), scores, 0.04)
        out.total.backward()  # type: ignore[no-untyped-call]
        total += float(out.total.detach())
        for name, value in out.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in own]
    return total, found, metrics


def test_terms_are_the_loops_with_gradients() -> None:
    """Each term written apart, as a mean over its own tokens, on top of the loss without them."""
    plain = PRESETS["grpo"].algorithm
    whole = prepared(plain.model_copy(update={"auxiliary": TERMS}))
    every = [range(whole.sequences)]
    bare = replace(whole, auxiliary_K=None, share=1.0)
    below, slopes, _ = gradient(plain, bare, every)
    found, grads, metrics = gradient(plain.model_copy(update={"auxiliary": TERMS}), whole, every)
    log_prob_N, log_prob_M, *_ = (leaf.tolist() for leaf in leaves(whole))
    assert whole.outcome_N is not None
    right = [x for x, r in zip(log_prob_N, whole.outcome_N.tolist(), strict=True) if r > 0.1]
    replies = sum(mark == "0" for _, answers in SHAPES for marks in answers for mark in marks)
    expected = 0.6 * (below - 0.3 * sum(right) / len(right))
    expected -= 0.6 * 0.2 * sum(log_prob_M[:replies]) / replies
    demos = log_prob_M[replies:]
    assert len(demos) == 12
    weighed = [math.exp(x) * (1 - math.exp(x)) for x in demos]
    expected -= 0.4 * sum(w * x for w, x in zip(weighed, demos, strict=True)) / 12
    assert found == pytest.approx(expected, abs=TOLERANCE)
    of_M = [-0.6 * 0.2 / replies] * replies + [-0.4 * w / 12 for w in weighed]
    torch.testing.assert_close(grads[1].tolist(), of_M, rtol=0, atol=TOLERANCE)
    is_right_N = (whole.outcome_N > 0.1).double()
    of_N = 0.6 * (slopes[0] - 0.3 * is_right_N / len(right))
    torch.testing.assert_close(grads[0], of_N, rtol=0, atol=TOLERANCE)
    parts = [metrics[f"loss/{name}"] for name in ("positive_nll", "replies", "demonstrations")]
    assert sum(parts) + 0.6 * below == pytest.approx(found, abs=TOLERANCE)


@pytest.mark.parametrize("name", PRESETS)
def test_terms_do_not_depend_on_micro_batches(name: str) -> None:
    """Also where a micro-batch holds demonstrations alone."""
    algorithm = with_everything(name).model_copy(update={"auxiliary": TERMS})
    whole = prepared(algorithm)
    assert whole.sequences == 9
    total, grads, metrics = gradient(algorithm, whole, [range(9)])
    assert math.isfinite(total)
    for split in (
        [range(3), range(3, 9)],
        [[i] for i in range(9)],
        [[8, 0, 5], [1, 6], [7, 2, 3, 4]],
    ):
        found, slopes, other = gradient(algorithm, whole, split)
        assert found == pytest.approx(total, abs=TOLERANCE)
        assert other == pytest.approx(metrics, abs=TOLERANCE)
        for one, slope in zip(grads, slopes, strict=True):
            torch.testing.assert_close(slope, one, rtol=0, atol=TOLERANCE)


def test_coefficients_of_zero_change_nothing() -> None:
    plain = PRESETS["dapo"].algorithm
    none = tuple(term.model_copy(update={"coefficient": 0.0}) for term in TERMS)
    off = plain.model_copy(update={"auxiliary": none})
    without = prepared(plain)
    total, grads, metrics = gradient(plain, without, [range(3), range(3, 6)])
    whole = prepared(off)
    assert whole.sequences == 6
    found, slopes, other = gradient(off, whole, [range(3), range(3, 6)])
    assert (found, other) == (total, metrics)
    assert all(torch.equal(one, slope) for one, slope in zip(grads, slopes, strict=True))
    # The share of a step may be 0 too.
    warm = plain.model_copy(
        update={"auxiliary": (DemonstrationNLL(final=0.0, decay_steps=1, warmup_steps=1),)}
    )
    found, slopes, _ = gradient(warm, prepared(warm, 2), [range(3), range(3, 6)])
    assert found == total
    assert torch.equal(slopes[0], grads[0])


def test_the_share_warms_up_and_decays_by_a_cosine() -> None:
    term = DemonstrationNLL(coefficient=0.9, warmup_steps=4, final=0.1, decay_steps=10)
    shares = [term.share(step) for step in (1, 4, 9, 14, 99)]
    assert shares == pytest.approx([0.225, 0.9, 0.5, 0.1, 0.1], abs=1e-12)
    assert DemonstrationNLL(coefficient=0.3).share(7) == 0.3


def test_a_share_that_grows_from_zero_trains() -> None:
    rising = DemonstrationNLL(coefficient=0.0, final=0.5, decay_steps=1)
    chord = PRESETS["chord"].algorithm.model_copy(update={"auxiliary": (rising,)})
    found, _, metrics = gradient(chord, prepared(chord, 2), [range(9)])
    assert prepared(chord, 2).share == 0.5
    assert metrics["loss/demonstrations"] > 0
    assert math.isfinite(found)


def test_what_stands_before_the_first_token_is_no_reply() -> None:
    led = answer([5, 6, 7, 8, 9], [False, False, True, False, True])
    silent = answer([5, 6], [False, False])
    made = from_groups([Group(Prompt("p", "", tokens=(1, 2)), (led, silent))], replies=True)
    assert made.extra_target_M is not None
    assert made.tokens_T[made.extra_target_M].tolist() == [8]
    assert made.extra_lengths == (1, 0)


# ---------------------------------------------------------------- with a model


def slopes_of(made: Learner, algorithm: Algorithm, whole: TrainBatch[Batch]) -> dict[str, Tensor]:
    backward(made, algorithm, whole, 0.0, made.budget.tokens)
    found = {n: p.grad.clone() for n, p in trainable(made.policy) if p.grad is not None}
    made.clear()
    return found


def test_an_update_reads_replies_and_demonstrations() -> None:
    """The gradient through the model is that of log-probabilities scored one by one, whatever the
    packing and the micro-batches."""
    algorithm = PRESETS["dapo"].algorithm.model_copy(update={"auxiliary": TERMS})
    whole = prepared(algorithm)
    made = learner("gpt2", 10_000)  # no part of it works in float32
    found = slopes_of(made, algorithm, whole)
    for tokens in (1, 17, 30):
        for name, slope in slopes_of(learner("gpt2", tokens), algorithm, whole).items():
            torch.testing.assert_close(slope, found[name], rtol=0, atol=1e-10, msg=name)
    alone = replace(whole, actions=replace(whole.actions, prompt_lengths=()))  # nothing is shared
    assert any(whole.actions.shared)
    turned = whole.select([8, 3, 0, 6, 1, 2, 7, 5, 4])
    for other in (alone, turned):
        for name, slope in slopes_of(made, algorithm, other).items():
            torch.testing.assert_close(slope, found[name], rtol=0, atol=1e-10, msg=name)

    actions = whole.actions
    assert actions.extra_target_M is not None
    sequences = actions.tokens_T.split(actions.input_lengths)
    every = []
    for tokens_L in sequences:
        one = Packed(tokens_L, (len(tokens_L),), torch.arange(1, len(tokens_L)))
        scored_L = made.policy.scores(one).log_prob_N
        every.append(torch.cat([scored_L.new_zeros(1), scored_L]))
    log_prob_T = torch.cat(every)
    scores = Scores(log_prob_T[actions.target_N], None, None, None)
    scores = replace(scores, extra_log_prob_M=log_prob_T[actions.extra_target_M])
    loss(algorithm, whole, scores, 0.0).total.backward()  # type: ignore[no-untyped-call]
    for name, parameter in trainable(made.policy):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, found[name], rtol=0, atol=1e-10, msg=name)
    assert max(float(slope.abs().max()) for slope in found.values()) > 1e-3


def test_critic_and_scores_read_no_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a micro-batch holds them alone: ranks compute together."""
    whole = prepared(with_everything("dapo").model_copy(update={"auxiliary": TERMS}))
    own = batch()[0]
    assert torch.equal(whole.actions.rollouts.tokens_T, own.tokens_T)
    alone = whole.select([7, 8]).actions
    assert alone.rollouts is alone
    read: list[int] = []

    class Values:
        def values(self, packed: Packed) -> Tensor:
            read.append(len(packed.tokens_T))
            return torch.zeros(len(packed.target_N))

    made = replace(learner("gpt2", 10_000), critic=cast("Critic", Values()))
    found = made.scores(PRESETS["grpo"].algorithm, whole.actions)
    assert read == [len(own.packed.tokens_T)]
    assert found.value_N is not None
    assert len(found.value_N) == sum(own.lengths)
    scored = made.policy.scores
    monkeypatch.setattr(
        type(made.policy), "scores",
        lambda self, packed, *args, **keys: (read.append(len(packed.tokens_T)),
                                             scored(packed, *args, **keys))[1],
    )  # fmt: skip
    reads_all = with_everything("m2po").model_copy(update={"auxiliary": TERMS})
    assert reads_all.whole_batch
    made._prepared(reads_all, whole, moved=True)
    assert read[1:] == read[:1]


def test_every_kept_token_is_on_its_place_after_a_selection() -> None:
    made, _, demonstrations = batch()
    joined = demonstrated(
        PRESETS["chord"].algorithm,
        prepare(PRESETS["chord"].algorithm, made, batch()[1], 16),
        demonstrations,
        1,
    ).actions
    picked = joined.select([7, 2, 3])
    assert picked.extra_target_M is not None
    assert joined.extra_target_M is not None
    tokens = joined.tokens_T[joined.extra_target_M].split(joined.extra_lengths)
    chosen = torch.cat([tokens[7], tokens[2], tokens[3]])
    assert torch.equal(picked.tokens_T[picked.extra_target_M], chosen)
    assert picked.extra_lengths == (2, 2, 1)
