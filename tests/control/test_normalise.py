"""Running moments, the numbers that they normalise, and the returns that rewards are scaled by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from keel.control.normalise import EPSILON, LIMIT, Moments

Reals = npt.NDArray[np.float64]


def rows(count: int, seed: int) -> Reals:
    """Of very different means and deviations: a sum of squares would lose five digits here."""
    return np.random.default_rng(seed).normal([3.0, -200.0, 0.0], [2.0, 0.1, 50.0], (count, 3))


@pytest.mark.parametrize("sizes", [(100,), (1, 99), (1, 1, 1, 1), (7, 0, 30, 1, 64)])
def test_parts_make_the_moments_of_the_whole(sizes: tuple[int, ...]) -> None:
    x = rows(sum(sizes), 0)
    moments = Moments.of(3)
    for part in np.split(x, np.cumsum(sizes)[:-1]):
        moments = moments.with_(part)
    # float64 in either order: some hundred roundings of 1e-16 each.
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, x.var(0), rtol=1e-12)
    assert moments.count == len(x)


def test_of_nothing_yet() -> None:
    moments = Moments.of(3)
    assert (moments.mean.tolist(), moments.variance.tolist()) == ([0, 0, 0], [1, 1, 1])
    x = rows(5, 1)
    np.testing.assert_array_equal(moments.normal(x), x.astype(np.float32))
    np.testing.assert_array_equal(moments.scaled(x), x.astype(np.float32))
    assert moments.with_(np.zeros((0, 3))) is moments


def test_numbers_are_centred_scaled_and_cut() -> None:
    x = rows(1000, 2)
    moments = Moments.of(3).with_(x)
    deviation = np.sqrt(x.var(0) + EPSILON)
    normal = moments.normal(x)
    assert normal.dtype == np.float32
    # float32 holds 1 to 6e-8; the numbers here are up to 4.
    np.testing.assert_allclose(normal, (x - x.mean(0)) / deviation, atol=1e-6)
    far = x.mean(0) + np.outer([-50, -9.5, 9.5, 50], deviation)
    cut = np.outer([-LIMIT, -9.5, 9.5, LIMIT], np.ones(3))
    np.testing.assert_allclose(moments.normal(far), cut, rtol=1e-6)
    # Rewards keep their sign: they are scaled, and not centred.
    near = np.outer([-9.5, 0.0, 9.5], deviation)
    np.testing.assert_allclose(moments.scaled(near), near / deviation, rtol=1e-6)
    assert moments.scaled(50 * deviation).tolist() == [LIMIT] * 3


def test_a_constant_stays_finite() -> None:
    moments = Moments.of(1).with_(np.full((9, 1), 2.0))
    assert moments.normal(np.full((2, 1), 2.0)).tolist() == [[0.0], [0.0]]
    assert moments.normal(np.array([[3.0]])).tolist() == [[LIMIT]]


# ---------------------------------------------------------------- discounted returns
