"""With their parameters at the neutral point, variants are their parents, bit for bit; and what a
user's own terms see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms.corrections import (
    CustomCorrection,
    GeometricMask,
    OutlierMask,
    Reject,
    Truncate,
)
from keel.algorithms.group_advantages import (
    GroupRelative,
    MeanRelative,
    RescaledBaseline,
    SeparatelyNormalised,
)
from keel.algorithms.masks import (
    BinaryKL,
    ClipCov,
    CustomMask,
    MaskTerm,
    OffPolicySequences,
    SecondMoment,
    TopEntropy,
    TotalVariation,
)
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import (
    Clip,
    CustomSurrogate,
    Fipo,
    Kimi,
    KLCov,
    Real,
    SurrogateTerm,
    Unclipped,
)
from keel.algorithms.weighted import Cispo, Dro, LogProb, Topr, Vespo
from keel.learn.advantages import RolloutRewards, estimate
from keel.learn.loss import limited, loss, prepare, whole_batch
from keel.learn.optimizer import in_tensors
from keel.models.head import Scores
from keel.training.rl import minibatches
from keel.types import KeelError
from tests.learn.flat import Sample, blank, per_sequence, sample

LENGTHS, GROUPS = (5, 1, 9, 3, 6), (0, 1, 0, 1, 0)
WIDE = {"floor": 0.0, "cap": 1e9}


def algorithm(**choices: Any) -> Algorithm:
    base = {"advantage": GroupRelative(), "ratio": "token", "surrogate": Clip()}
    return Algorithm(**{**base, "weights": Weights(), **choices})


def made() -> Sample:
    return per_sequence(sample(LENGTHS, GROUPS, 0, shift=0.4))


def of_loss(chosen: Algorithm, one: Sample) -> tuple[Tensor, Tensor]:
    """The loss and its gradient in the log-probabilities."""
    leaf = one.log_prob_N.clone().requires_grad_()
    batch = prepare(chosen, one.batch, one.estimates, 16, seed=3)
    if chosen.whole_batch:
        batch = whole_batch(chosen, batch, one.log_prob_N, one.entropy_N)
    out = loss(chosen, batch, Scores(leaf, one.entropy_N, None, None), 0.0)
    return out.total.detach(), torch.autograd.grad(out.total, leaf)[0]


def same(first: Algorithm, second: Algorithm, one: Sample | None = None) -> bool:
    one = made() if one is None else one
    pairs = zip(of_loss(first, one), of_loss(second, one), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


REINFORCE = Cispo(cap=1e9, floor=0.0)


@pytest.mark.parametrize(
    ("variant", "parent"),
    [
        (Fipo(low=0.2, high=0.2, floor=1.0, cap=1.0), Clip()),
        (Kimi(tau=0.0), Unclipped()),
        (KLCov(coefficient=0.0), Unclipped()),
        (Topr(threshold=-1e9), Dro(beta=0.0)),
        (Vespo(power_positive=0, rate_positive=0, power_negative=0, rate_negative=0), Dro(beta=0)),
    ],
    ids=lambda term: term.kind,
)
def test_surrogate_at_its_neutral_point_is_its_parent(
    variant: SurrogateTerm, parent: SurrogateTerm
) -> None:
    assert same(algorithm(surrogate=variant), algorithm(surrogate=parent))


def test_unpenalised_dro_is_reinforce() -> None:
    """Of the ratio of tokens, which is not in it."""
    plain = algorithm(surrogate=LogProb(), ratio="none")
    assert same(algorithm(surrogate=Dro(beta=0.0)), plain)


@pytest.mark.parametrize(
    "mask",
    [
        TotalVariation(low=1.0, high=1.0),
        BinaryKL(low=1e9, high=1e9),
        TopEntropy(share=1.0),
        OffPolicySequences(bound=1e9),
        SecondMoment(bound=1e9),
        ClipCov(floor=1e9, cap=1e9),
    ],
    ids=lambda term: term.kind,
)
@pytest.mark.parametrize("surrogate", [Clip(), REINFORCE], ids=lambda term: term.kind)
def test_mask_without_a_bound_masks_nothing(mask: MaskTerm, surrogate: SurrogateTerm) -> None:
    """Of REINFORCE's truncated weights the first two are DPPO."""
    masked = algorithm(surrogate=surrogate, masks=(mask,))
    assert same(masked, algorithm(surrogate=surrogate))
    narrow = {"low": 0.01, "high": 0.01, "share": 0.3, "bound": 0.01, "floor": 0.0, "cap": 9.0}
    fields = type(mask).model_fields
    tight = mask.model_copy(update={k: v for k, v in narrow.items() if k in fields})
    assert not same(algorithm(surrogate=surrogate, masks=(tight,)), masked)


@pytest.mark.parametrize(
    "correction",
    [GeometricMask(**WIDE), OutlierMask(**WIDE), Reject(statistic="k1", over="sum", **WIDE),
     Reject(statistic="k3", over="max", cap=1e9)],
    ids=lambda term: term.kind,
)  # fmt: skip
def test_correction_with_wide_bounds_is_none(correction: Any) -> None:
    assert same(algorithm(corrections=(correction,)), algorithm())


def test_advantages_at_their_neutral_point() -> None:
    """MaxRL of groups with mean 1 and GPG of rewards that are all there are GRPO without std; one
    reward of weight 1 is GRPO, whitened."""
    reward_S = torch.tensor([0.5, 1.5, 1.75, 0.5, 0.75], dtype=torch.float64)
    judged = RolloutRewards(reward_S, components={"a": reward_S}, component_weights={"a": 1.0})

    def of(advantage: Any) -> Tensor:
        chosen, batch = algorithm(advantage=advantage), blank(LENGTHS, GROUPS)
        return prepare(chosen, batch, estimate(chosen, batch, judged), 16).advantage_N

    plain = of(GroupRelative(scale="none"))
    assert torch.equal(of(MeanRelative(epsilon=0.0)), plain)
    assert torch.equal(of(RescaledBaseline()), plain)
    assert torch.equal(of(SeparatelyNormalised()), of(GroupRelative(whiten=True)))


# ---------------------------------------------------------------- a user's own


def entropic(
    log_ratio_N: Tensor, advantage_N: Tensor, entropy_N: Tensor, groups_S: Tensor,
    lengths_S: Tensor, turn_N: Tensor, outcome_S: Tensor,
) -> Tensor:  # fmt: skip
    """A surrogate with entropy, groups, turns and rewards."""
    assert turn_N.max() == 0
    per_group = torch.bincount(groups_S)[groups_S].repeat_interleave(lengths_S)
    bonus = outcome_S.repeat_interleave(lengths_S)
    return log_ratio_N.exp() * (advantage_N + 0.1 * entropy_N.detach() / per_group + bonus)


def test_users_surrogate_sees_entropy_groups_and_rewards() -> None:
    one = made()
    batch = replace(one.batch, versions=(3,) * len(LENGTHS))
    one = replace(one, batch=batch)
    own = CustomSurrogate(function=f"{__name__}:entropic")
    size = torch.tensor([3.0, 2.0, 3.0, 2.0, 3.0]).double().repeat_interleave(batch.lengths_S)
    assert one.estimates.outcome_N is not None
    estimates = replace(
        one.estimates,
        advantage_N=one.estimates.advantage_N
        + 0.1 * one.entropy_N / size
        + one.estimates.outcome_N,
    )
    expected = of_loss(algorithm(surrogate=Unclipped()), replace(one, estimates=estimates))
    for found, wanted in zip(of_loss(algorithm(surrogate=own), one), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def most_certain(entropy_N: Tensor, log_prob_N: Tensor, old_log_prob_N: Tensor) -> Tensor:
    return entropy_N <= entropy_N.median()


def halved(weight_N: Tensor, engine_log_prob_N: Tensor, old_log_prob_N: Tensor) -> Tensor:
    return weight_N / 2


def too_short(weight_N: Tensor) -> Tensor:
    return weight_N[:1]


def test_users_mask_and_correction_see_the_whole_batch() -> None:
    one = made()
    plain = of_loss(algorithm(), one)[1]
    masked = of_loss(algorithm(masks=(CustomMask(function=f"{__name__}:most_certain"),)), one)[1]
    kept_N = one.entropy_N <= one.entropy_N.median()
    assert torch.equal(masked, plain * kept_N)
    half = CustomCorrection(function=f"{__name__}:halved")
    assert torch.equal(of_loss(algorithm(corrections=(half,)), one)[1], plain / 2)
    wrong = CustomCorrection(function=f"{__name__}:too_short")
    with pytest.raises(KeelError, match=r"algorithm\.corrections: .*too_short returned shape"):
        of_loss(algorithm(corrections=(wrong,)), one)


def test_turns_count_gaps_in_what_was_written() -> None:
    """After tool output a new turn begins; each sequence counts from 0."""
    batch = blank((4, 0, 3), (0, 0, 1))
    target_N = batch.target_N.clone()
    target_N[2:4] += 5  # tool output after the second token of the first sequence
    assert replace(batch, target_N=target_N).turn_N.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert batch.turn_N.tolist() == [0] * 7


def test_surrogate_of_groups_has_them_whole_in_a_mini_batch() -> None:
    """REAL's loss is of a whole group; other surrogates split sequences at random."""
    one = sample((2, 3, 1, 4, 2, 5), (0, 1, 0, 2, 1, 2), 0, shift=0.1)
    real = algorithm(surrogate=Real())
    for seed in range(5):
        chunks = minibatches(
            real, one.batch, one.estimates, range(6), count=2, max_tokens=9, seed=seed
        )
        places = [set(part.places) for part in chunks]
        assert all(any({a, b} <= part for part in places) for a, b in ((0, 2), (1, 4), (3, 5)))
        assert set.union(*places) == set(range(6))


def test_reward_that_is_absent_is_no_cause_of_a_bad_loss() -> None:
    one = made()
    assert one.estimates.outcome_N is not None
    outcome_N = one.estimates.outcome_N.clone()
    outcome_N[:5] = torch.nan
    estimates = replace(one.estimates, outcome_N=outcome_N)
    assert in_tensors(prepare(algorithm(), one.batch, estimates, 16)) is None


def test_share_of_cut_weights_counts_those_above_the_cap() -> None:
    """Weights that reach the cap are not cut; equal log-probabilities are not cut at all."""
    one, chosen = made(), algorithm(corrections=(Truncate(cap=1.0),))
    batch = one.batch
    assert batch.old_log_prob_N is not None
    above_N = batch.old_log_prob_N > batch.engine_log_prob_N
    assert torch.equal(limited(chosen, batch), above_N)
    same_log_probs = replace(batch, engine_log_prob_N=batch.old_log_prob_N)
    assert not limited(chosen, same_log_probs).any()
