"""Law 3: nothing depends on packing order, micro-batches, ranks or the order of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm, Correction
from keel.learn.loss import loss, prepare
from keel.models.head import Scores
from tests.learn.flat import Sample, gradient, per_sequence, sample

LENGTHS = (5, 1, 9, 3, 7, 2)
GROUPS = (0, 1, 0, 2, 1, 2)
TOLERANCE = 1e-12  # float64 sums of some thirty numbers in another order


def with_everything(row: Algorithm) -> Algorithm:
    """The row with an entropy bonus and the correction on as well, so that these are held too."""
    correction = Correction(kind="truncate", level="sequence", cap=2.0)
    return row.model_copy(update={"entropy": 0.01, "correction": correction})


def made_for(row: Algorithm, seed: int = 0) -> Sample:
    made = sample(LENGTHS, GROUPS, seed, shift=0.3)
    if not row.per_token_advantage:
        made = per_sequence(made)
    return made


ROWS = {name: with_everything(preset.algorithm) for name, preset in PRESETS.items()}
SPLITS = {
    "one": [[0, 1, 2, 3, 4, 5]],
    "two": [[0, 1, 2], [3, 4, 5]],
    "each": [[0], [1], [2], [3], [4], [5]],
    "shuffled": [[4, 2], [5, 0, 1], [3]],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("split", ["two", "each", "shuffled"])
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_ranks(name: str, split: str) -> None:
    row = ROWS[name]
    made = made_for(row)
    whole_loss, whole_gradient = gradient(row, made, SPLITS["one"])
    part_loss, part_gradient = gradient(row, made, SPLITS[split])
    assert whole_gradient.abs().max() > 1e-3  # else this holds nothing
    assert part_loss.item() == pytest.approx(whole_loss.item(), abs=TOLERANCE)
    torch.testing.assert_close(part_gradient, whole_gradient, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ROWS)
def test_a_twin_that_averages_each_micro_batch_is_caught(name: str) -> None:
    """Weights computed in each micro-batch, then averaged: the usual mistake."""
    row = PRESETS[name].algorithm
    made = made_for(row)
    _, whole = gradient(row, made, SPLITS["one"])
    halves = []
    for part in ([0, 1, 2, 3], [4, 5]):
        index = made.batch.action_index(part)
        own = Sample(
            made.batch.select(part),
            made.estimates.select(index),
            made.log_prob_N[index],
            made.entropy_N[index],
            made.value_N[index],
        )
        _, half = gradient(row, own, [list(range(len(part)))])
        halves.append(half.chunk(3))
    # The parts lie in the batch's own order, so putting them end to end restores it.
    twin = torch.cat([torch.cat([a, b]) / 2 for a, b in zip(*halves, strict=True)])
    assert (twin - whole).abs().max() > 1e-4


@pytest.mark.parametrize("name", ROWS)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    row = ROWS[name]
    made = made_for(row)
    order = [3, 0, 5, 1, 4, 2]
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    index = torch.cat([torch.arange(ends[i] - LENGTHS[i], ends[i]) for i in order])
    turned = Sample(
        made.batch.select(order),
        made.estimates.select(index),
        made.log_prob_N[index],
        made.entropy_N[index],
        made.value_N[index],
    )
    loss_a, gradient_a = gradient(row, made, SPLITS["one"])
    loss_b, gradient_b = gradient(row, turned, SPLITS["one"])
    assert loss_a.item() == pytest.approx(loss_b.item(), abs=TOLERANCE)
    expected = torch.cat([part[index] for part in gradient_a.chunk(3)])
    torch.testing.assert_close(gradient_b, expected, rtol=0, atol=TOLERANCE)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=8),
    cuts=st.integers(1, 8),
    name=st.sampled_from(sorted(ROWS)),
)
def test_any_ragged_batch_cut_anywhere(lengths: list[int], cuts: int, name: str) -> None:
    row = ROWS[name]
    groups = [i % 2 for i in range(len(lengths))]
    made = sample(lengths, groups, seed=len(lengths), shift=0.2)
    if not row.per_token_advantage:
        made = per_sequence(made)
    every = list(range(len(lengths)))
    parts = [every[i::cuts] for i in range(cuts) if every[i::cuts]]
    loss_a, gradient_a = gradient(row, made, [every])
    loss_b, gradient_b = gradient(row, made, parts)
    assert loss_a.item() == pytest.approx(loss_b.item(), abs=1e-10)
    torch.testing.assert_close(gradient_a, gradient_b, rtol=0, atol=1e-10)


def test_on_policy_the_ratio_is_one_bitwise_and_rows_agree() -> None:
    """Law 1, through the rows: one gradient for all under equal weights."""
    made = per_sequence(sample(LENGTHS, GROUPS, 3, shift=0.0))
    batch = replace(made.batch, old_log_prob_N=None)
    found = {}
    for name in ("grpo", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dapo", "opo"):
        weights = PRESETS["grpo"].algorithm.weights
        row = PRESETS[name].algorithm.model_copy(update={"weights": weights, "divergence": None})
        leaf = made.log_prob_N.clone().requires_grad_()
        whole = prepare(row, batch, made.estimates, 16)
        out = loss(row, whole, Scores(leaf, None, None, None), 0.0)
        (found[name],) = torch.autograd.grad(out.total, leaf)
        if row.ratio != "none":
            assert float(out.metrics["ratio/mean"]) == pytest.approx(1.0, abs=1e-15)
            assert float(out.metrics["kl/old"]) == 0.0
            assert float(out.metrics["clip_ratio/region_mean"]) == 0.0
    for name, value in found.items():
        torch.testing.assert_close(value, found["grpo"], rtol=0, atol=1e-15, msg=name)


def test_selecting_keeps_targets_on_their_tokens() -> None:
    made = sample(LENGTHS, GROUPS, 0, shift=0.1)
    batch = made.batch
    picked = batch.select([4, 1])
    expected = [batch.tokens_T[t].item() for t in batch.target_N.tolist()]
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    wanted = expected[ends[3] : ends[4]] + expected[ends[0] : ends[1]]
    assert picked.tokens_T[picked.target_N].tolist() == wanted
    assert picked.groups_S.tolist() == [1, 1]
    assert picked.input_lengths == (9, 3)


def test_micro_batches_hold_the_budget_and_every_sequence_once() -> None:
    batch = sample(LENGTHS, GROUPS, 0, shift=0.1).batch
    for budget in (1, 8, 12, 20, 1000):
        micros = batch.micro_batches(budget)
        assert sum((m.lengths for m in micros), ()) == batch.lengths
        for micro in micros:
            assert sum(micro.input_lengths) <= budget or micro.sequences == 1
        joined = torch.cat([m.old_log_prob_N for m in micros])  # type: ignore[arg-type]
        assert torch.equal(joined, batch.old_log_prob_N)  # type: ignore[arg-type]
