"""A round of selection: beliefs from the labelled pairs, whether they hold, and what to label next.

Suffixes: `_C` pairs, `_H` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logit

from keel.analysis.calibration import PredictiveReport, predictive_report
from keel.analysis.statistics import Array, Interval
from keel.preferences.acquisition import (
    Method,
    PairBeliefs,
    ensemble_beliefs,
    laplace_beliefs,
)
from keel.preferences.posterior import (
    HeadPosterior,
    head_ensemble,
    laplace_posterior,
    likeliest_posterior,
)

PRECISION_PAIRS = 5_000
"""Labelled pairs, at most, by which the prior precision is chosen."""
HELD_OUT, FEWEST = 5, 20
"""One prompt of so many is held out; fewer labelled pairs than that tell nothing to either side."""
NEAR = 0.95
"""The |cosine| from which on two pairs are near-copies."""
SAMPLED, AMONG = 500, 10_000
"""Pairs whose near-copies are counted, and among how many."""
REDUNDANT = 0.5
"""The share of pairs with near-copies from which on a batch is chosen by uncertainty."""


@dataclass(frozen=True, slots=True)
class UncertaintyPlan:
    """How the uncertainty is computed: Laplace's posterior, or `members` bootstrapped heads."""

    members: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """How the pairs are chosen, and why so."""

    method: Method
    reason: str


@dataclass(frozen=True, slots=True)
class HeldOutCheck:
    """What beliefs from some labelled pairs are worth on others, whose prompts they have not seen.

    `learned` and `held_out` are their numbers.
    """

    learned: int
    held_out: int
    report: PredictiveReport

    @property
    def accuracy(self) -> Interval:
        """How often the likelier answer is the better one."""
        return self.report.pairs.accuracy


def pool_beliefs(
    feature_CH: Array, label_C: Array, pool_CH: Array, plan: UncertaintyPlan
) -> PairBeliefs:
    """What the labelled pairs tell about a pool; of no labelled pair, what the prior says.

    The prior precision is the one with the highest evidence, on at most `PRECISION_PAIRS` pairs.
    """
    posterior = _posterior(feature_CH, label_C, plan.seed)
    if not plan.members:
        return laplace_beliefs(posterior, pool_CH)
    heads_MH = head_ensemble(
        feature_CH, label_C, posterior.prior_precision, plan.members, plan.seed
    )
    return ensemble_beliefs(heads_MH @ pool_CH.T)


def held_out_check(
    feature_CH: Array, label_C: Array, prompts: Sequence[str], plan: UncertaintyPlan
) -> HeldOutCheck | None:
    """Beliefs from four fifths of the prompts against the labels of the last fifth.

    None where there are fewer than `FEWEST` labelled pairs, or too few prompts, for that.
    """
    names = sorted(set(prompts))
    shuffled = np.random.default_rng([plan.seed, 1]).permutation(len(names))
    apart = {names[n] for n in shuffled[: len(names) // HELD_OUT]}
    held = np.array([prompt in apart for prompt in prompts], dtype=bool)
    if len(prompts) < FEWEST or not held.any():
        return None
    beliefs = pool_beliefs(feature_CH[~held], label_C[~held], feature_CH[held], plan)
    # The log-odds of the predictive probability; the quadrature has rounded it to 0 or 1 at most.
    predictive = logit(np.clip(beliefs.uncertainty.probability_C, 1e-12, 1 - 1e-12))
    clusters = [prompt for prompt in prompts if prompt in apart]
    report = predictive_report(beliefs.difference_C, predictive, label_C[held], clusters)
    return HeldOutCheck(int((~held).sum()), int(held.sum()), report)


def near_copies(feature_CH: Array, seed: int = 0) -> float:
    """The share of a pool's pairs that have a near-copy in it, on a sample; 0 of an empty pool.

    A near-copy has features of a |cosine| of `NEAR` or more: a pair turned round is one too. Pairs
    without features (equal answers) are left out.
    """
    length_C = np.linalg.norm(feature_CH, axis=1)
    kept = np.random.default_rng([seed, 2]).permutation(np.flatnonzero(length_C > 0))[:AMONG]
    unit_CH = feature_CH[kept] / length_C[kept, None]
    cosine = np.abs(unit_CH[:SAMPLED] @ unit_CH.T)
    return float(((cosine >= NEAR).sum(axis=1) > 1).mean()) if kept.size else 0.0


def choose_method(asked: Method | None, copies: float | None) -> MethodChoice:
    """The method that was asked for, or else the one whose gain over random is measured."""
    if asked is not None:
        return MethodChoice(asked, "asked for")
    share = 0.0 if copies is None else copies
    found = f"{100 * share:.0f} % of the pool's pairs have a near-copy in it"
    if share >= REDUNDANT:
        return MethodChoice("d_optimal", f"{found}, and d_optimal counts near-copies once")
    return MethodChoice(
        "random",
        f"{found}, and only where half or more have one was a gain over random labels measured",
    )


def hints(labelled: int, check: HeldOutCheck | None) -> list[str]:
    """What cannot be known from so few labels or from such features."""
    if not labelled:
        return ["no pair is labelled: nothing is known but the features; label some at random"]
    if check is None:
        return [
            f"{labelled} labelled pairs are too few to check the uncertainty on held-out ones: "
            f"label {FEWEST} or more, of several prompts"
        ]
    accuracy = check.accuracy
    if not accuracy.n:
        return ["every held-out pair is a tie: ties do not show which answer is better"]
    if not accuracy.low > 0.5:
        return [
            f"the features do not show which answer of a held-out pair is better (accuracy "
            f"{100 * accuracy.mean:.0f} % [{100 * accuracy.low:.0f}, {100 * accuracy.high:.0f}]): "
            "choose at random, or give a better model"
        ]
    return []


def _posterior(feature_CH: Array, label_C: Array, seed: int) -> HeadPosterior:
    if not len(label_C):
        return laplace_posterior(feature_CH, label_C, 1.0)
    if len(label_C) <= PRECISION_PAIRS:
        return likeliest_posterior(feature_CH, label_C)
    some = np.random.default_rng([seed, 3]).permutation(len(label_C))[:PRECISION_PAIRS]
    precision = likeliest_posterior(feature_CH[some], label_C[some]).prior_precision
    return laplace_posterior(feature_CH, label_C, precision)
