"""Running moments, and the numbers that they normalise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keel.control.normalise import EPSILON, LIMIT, Moments

Reals = npt.NDArray[np.float64]


def moments(*parts: Reals) -> Moments:
    made = Moments(parts[0].shape[1])
    for part in parts:
        made.add(part)
    return made


def rows(count: int) -> Reals:
    """Of very different means and deviations: a sum of squares would lose five digits here."""
    return np.random.default_rng(0).normal([3.0, -200.0, 0.0], [2.0, 0.1, 50.0], (count, 3))


def test_parts_make_the_moments_of_the_whole() -> None:
    x = rows(102)
    running = moments(*np.split(x, [7, 8, 38])).running
    # float64 in either order: some hundred roundings of 1e-16 each.
    np.testing.assert_allclose(running.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(running.var, x.var(0), rtol=1e-12)
    assert running.count == len(x)


def test_numbers_are_centred_scaled_and_cut() -> None:
    x = rows(1000)
    made = moments(x)
    deviation = np.sqrt(x.var(0) + EPSILON)
    normal = made.normal(x)
    assert normal.dtype == np.float32
    # float32 holds 1 to 6e-8; the numbers here are up to 4.
    np.testing.assert_allclose(normal, (x - x.mean(0)) / deviation, atol=1e-6)
    far = x.mean(0) + np.outer([-50, -9.5, 9.5, 50], deviation)
    cut = np.outer([-LIMIT, -9.5, 9.5, LIMIT], np.ones(3))
    np.testing.assert_allclose(made.normal(far), cut, rtol=1e-6)
    # Rewards keep their sign: they are scaled, and not centred.
    near = np.outer([-9.5, 0.0, 9.5], deviation)
    np.testing.assert_allclose(made.scaled(near), near / deviation, rtol=1e-6)
    assert made.scaled(50 * deviation).tolist() == [LIMIT] * 3


def test_without_a_deviation_they_stay_finite() -> None:
    x = rows(5)
    for before in (Moments(3).normal, Moments(3).scaled):
        np.testing.assert_array_equal(before(x), x.astype(np.float32))
    constant = moments(np.full((9, 1), 2.0))
    assert constant.normal(np.array([[2.0], [3.0]])).tolist() == [[0.0], [LIMIT]]
