"""Results do not depend on packing, micro-batches, ranks or the order of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from keel.algorithms.corrections import Normalise, Truncate
from keel.algorithms.masks import OffPolicySequences, TopEntropy
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.learn.loss import loss, prepare
from keel.models.head import Scores
from tests.learn.flat import Sample, gradient, per_sequence, sample

LENGTHS = (5, 1, 9, 3, 7, 2)
GROUPS = (0, 1, 0, 2, 1, 2)
TOLERANCE = 1e-12  # float64 sums of some thirty numbers in another order
WHOLE = [[0, 1, 2, 3, 4, 5]]
SPLITS = ([[0, 1, 2], [3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[4, 2], [5, 0, 1], [3]])


def with_everything(preset: str) -> Algorithm:
    """A preset with an entropy bonus, masks and corrections, so that these are tested too."""
    own = PRESETS[preset].algorithm
    more = {
        "entropy": 0.01,
        "corrections": (Truncate(level="sequence", cap=2.0), Normalise()),
        "masks": (*own.masks, TopEntropy(share=0.9), OffPolicySequences(bound=0.2)),
    }
    return own.model_copy(update=more)


def made_for(algorithm: Algorithm) -> Sample:
    made = sample(LENGTHS, GROUPS, 0, shift=0.3)
    return made if algorithm.per_token_advantage else per_sequence(made)


def selected(made: Sample, chosen: Sequence[int]) -> tuple[Sample, torch.Tensor]:
    """These sequences of a sample, and the places of their actions."""
    index = made.batch.action_index(chosen)
    scores = made.log_prob_N[index], made.entropy_N[index], made.value_N[index]
    return Sample(made.batch.select(chosen), made.estimates.select(index), *scores), index


@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradient_do_not_depend_on_cuts_or_order(name: str) -> None:
    """Micro-batches, ranks, and the order of the sequences in the batch."""
    algorithm = with_everything(name)
    made = made_for(algorithm)
    whole_loss, whole_gradient = gradient(algorithm, made, WHOLE)
    assert whole_gradient.abs().max() > 1e-3  # else the comparison is empty
    for split in SPLITS:
        part_loss, part_gradient = gradient(algorithm, made, split)
        assert part_loss.item() == pytest.approx(whole_loss.item(), abs=TOLERANCE)
        torch.testing.assert_close(part_gradient, whole_gradient, rtol=0, atol=TOLERANCE)
    turned, index = selected(made, [3, 0, 5, 1, 4, 2])
    turned_loss, turned_gradient = gradient(algorithm, turned, WHOLE)
    assert turned_loss.item() == pytest.approx(whole_loss.item(), abs=TOLERANCE)
    expected = torch.cat([part[index] for part in whole_gradient.chunk(3)])
    torch.testing.assert_close(turned_gradient, expected, rtol=0, atol=TOLERANCE)


def test_on_policy_the_ratio_is_one_bitwise_and_algorithms_agree() -> None:
    """One gradient for all under equal weights."""
    made = per_sequence(sample(LENGTHS, GROUPS, 3, shift=0.0))
    batch = replace(made.batch, old_log_prob_N=None)
    found = {}
    for name in ("grpo", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dapo", "opo"):
        weights = PRESETS["grpo"].algorithm.weights
        algorithm = PRESETS[name].algorithm.model_copy(
            update={"weights": weights, "divergence": None}
        )
        leaf = made.log_prob_N.clone().requires_grad_()
        whole = prepare(algorithm, batch, made.estimates, 16)
        out = loss(algorithm, whole, Scores(leaf, None, None, None), 0.0)
        (found[name],) = torch.autograd.grad(out.total, leaf)
        if algorithm.ratio != "none":
            assert float(out.metrics["ratio/mean"]) == pytest.approx(1.0, abs=1e-15)
            assert float(out.metrics["kl/old"]) == 0.0
            assert float(out.metrics["clip_ratio/region_mean"]) == 0.0
    for name, value in found.items():
        torch.testing.assert_close(value, found["grpo"], rtol=0, atol=1e-15, msg=name)


def test_select_keeps_targets_on_their_tokens() -> None:
    batch = sample(LENGTHS, GROUPS, 0, shift=0.1).batch
    picked = batch.select([4, 1])
    tokens = batch.tokens_T[batch.target_N].split(LENGTHS)
    assert torch.equal(picked.tokens_T[picked.target_N], torch.cat([tokens[4], tokens[1]]))
    assert picked.groups_S.tolist() == [1, 1]
    assert picked.input_lengths == (9, 3)
