"""The random streams: known answers, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest

from keel.engines.sampler import AHEAD, Uniforms, occurrences, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
        ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
        (
            "243f6a8885a308d313198a2e03707344",
            "a4093822299f31d0",
            "d16cfe0994fdcceb5001e42024126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    """Test vectors of the authors' Random123 library for philox4x32-10."""

    def words(text: str) -> np.ndarray:
        return np.array([int(text[i : i + 8], 16) for i in range(0, len(text), 8)], np.uint64)

    assert philox(words(counter), words(key)).tolist() == words(expected).tolist()


def numbers(ids: list[str], n: int, seed: int, sequence: int, count: int = 80) -> list[float]:
    uniforms = Uniforms(ids, n, seed)
    each = (uniforms.take(np.array([sequence]), np.array([place])) for place in range(count))
    return [float(number[0, 0]) for number in each]


def test_numbers_depend_on_their_stream_and_place_only() -> None:
    base = numbers(["a"], 1, 0, 0)
    assert base == numbers(["b", "a"], 3, 0, 3)  # other company, same name
    others = [
        numbers(["a"], 1, 1, 0),
        numbers(["b"], 1, 0, 0),
        numbers(["a", "a"], 1, 0, 1),
        numbers(["a"], 2, 0, 1),
    ]
    assert len({number for one in [base, *others] for number in one}) == 5 * 80


def test_numbers_do_not_depend_on_who_asks_when() -> None:
    """Rows that entered at different times are at different places of their blocks, and some are
    asked for ahead: all that are taken, or a part of them."""
    uniforms = Uniforms(["a", "b"], 2, 7)
    places = np.zeros(4, dtype=np.int64)
    taken: list[list[float]] = [[] for _ in range(4)]
    rng = np.random.default_rng(0)
    while (places < 200).any():
        rows = np.flatnonzero((rng.random(4) < 0.6) & (places < 200))
        asked = int(rng.integers(1, AHEAD + 1))
        used = int(rng.integers(1, asked + 1))
        for row, drawn in zip(rows, uniforms.take(rows, places[rows], asked).T, strict=True):
            taken[row].extend(drawn[:used].tolist())
        places[rows] += used
    expected = [numbers(["a", "b"], 2, 7, row, len(taken[row])) for row in range(4)]
    assert taken == expected


def test_numbers_are_uniform() -> None:
    uniforms = Uniforms([str(i) for i in range(500)], 4, 3)
    sequences = np.arange(2000)
    drawn = np.concatenate([uniforms.take(sequences, np.full(2000, t))[0] for t in range(20)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 40,000 numbers: the mean has a standard error of 0.0014, a tenth's share of 0.0015.
    assert drawn.mean() == pytest.approx(0.5, abs=0.006)
    shares = np.histogram(drawn, bins=10, range=(0, 1))[0] / len(drawn)
    np.testing.assert_allclose(shares, 0.1, atol=0.006)
    neighbours = drawn.reshape(20, 2000)
    # Correlation of 38,000 pairs has a standard error of 0.005.
    assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 0.02


def test_occurrences_count_what_came_before() -> None:
    assert occurrences(["a", "b", "a", "a", "b"]) == [0, 0, 1, 2, 1]
