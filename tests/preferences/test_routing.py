"""Labels bought from a judge and from people, against every way of spending the budget."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from keel.preferences.acquisition import PairBeliefs, gaussian_uncertainty, variance_reduction
from keel.preferences.routing import Labeller, best_labellers, label_gains, route_labels

JUDGE, PEOPLE = Labeller("judge", 0.01, 0.75), Labeller("people", 0.5, 0.95)


def beliefs() -> PairBeliefs:
    mean, factor = np.array([0.0, 1.0, -3.0]), np.array([[2.0], [0.5], [1.0]])
    return PairBeliefs(mean, factor, gaussian_uncertainty(mean, factor[:, 0] ** 2))


def test_gains_are_those_of_each_labellers_accuracy() -> None:
    known = beliefs()
    entropies = label_gains(known, [JUDGE, PEOPLE])
    variances = label_gains(known, [JUDGE, PEOPLE], variance=True)
    for row, one in enumerate([JUDGE, PEOPLE]):
        mean, spread = known.difference_C, known.variance_C
        expected = gaussian_uncertainty(mean, spread, one.accuracy).epistemic_C
        np.testing.assert_array_equal(entropies[row], expected)
        lowered = variance_reduction(mean, spread, one.accuracy)
        np.testing.assert_array_equal(variances[row], lowered)
    assert (entropies[1] > entropies[0]).all()
    assert (label_gains(known, [Labeller("coin", 1.0, 0.5)]) < 1e-12).all()


def test_best_labeller_is_the_best_a_dollar() -> None:
    labeller, ratio = best_labellers(np.array([[1.0, 4.0], [3.0, 5.0]]), [1.0, 2.0])
    assert labeller.tolist() == [1, 0]
    assert ratio.tolist() == [1.5, 4.0]


@pytest.mark.parametrize("seed", range(20))
def test_routing_is_within_one_step_of_the_best(seed: int) -> None:
    """Every assignment of 5 pairs to no labeller or one of 3."""
    generator = np.random.default_rng(seed)
    price = np.array([0.1, 0.5, 1.3])
    gain = np.sort(generator.uniform(size=(3, 5)), axis=0)
    budget = float(generator.uniform(0.1, 4))
    best = 0.0
    for choice in product(range(-1, 3), repeat=5):
        if sum(price[c] for c in choice if c >= 0) <= budget:
            best = max(best, sum(gain[c, i] for i, c in enumerate(choice) if c >= 0))
    found = route_labels(gain, price, budget)
    assert found.spent == pytest.approx(price[found.labeller].sum())
    assert found.spent <= budget * (1 + 1e-12)
    assert len(set(found.index.tolist())) == len(found.index)
    np.testing.assert_array_equal(found.gain, gain[found.labeller, found.index])
    assert best - gain.max() <= found.gain.sum() <= best + 1e-12


def test_more_money_goes_to_people_and_a_useless_labeller_gets_none() -> None:
    gain = np.array([[1.0] * 4, [2.0] * 4, [0.5] * 4])  # judge, people, dear and worse
    price = [0.1, 0.5, 0.7]
    counts = {
        budget: np.bincount(route_labels(gain, price, budget).labeller, minlength=3).tolist()
        for budget in (0.05, 0.4, 0.8, 1.2, 99.0)
    }
    assert counts == {
        0.05: [0, 0, 0],
        0.4: [4, 0, 0],
        0.8: [3, 1, 0],
        1.2: [2, 2, 0],
        99.0: [0, 4, 0],
    }


def test_a_labeller_off_the_hull_is_no_step() -> None:
    """The middle one adds less a dollar than going on to the dearest, which comes before the other
    pair; step by step through it, the other pair would come first."""
    gain = np.array([[1.0, 0.5], [1.1, 0.5], [3.0, 0.5]])
    found = route_labels(gain, [1.0, 2.0, 3.0], 3.0)
    assert found.index.tolist() == [0]
    assert found.labeller.tolist() == [2]
    found = route_labels(gain, [1.0, 2.0, 3.0], 2.0)
    assert found.index.tolist() == [0, 1]
    assert found.labeller.tolist() == [0, 0]


def test_slopes_that_rise_by_rounding_are_taken_in_order() -> None:
    """Gains in proportion to prices: the budget pays for the dearest of each pair."""
    price = np.array([0.1, 0.3, 0.7])
    found = route_labels(price[:, None] * np.random.default_rng(0).uniform(size=200), price, 140.1)
    assert found.labeller.tolist() == [2] * 200


def test_free_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        route_labels(np.ones((1, 1)), [0.0], 1.0)
