from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keel.analysis import plots
from keel.analysis.calibration import label_report, pair_report
from keel.analysis.plots import (
    COLOURS,
    Optimisation,
    length_picture,
    margin_picture,
    over_optimisation_picture,
    reliability_picture,
)
from tests.analysis.test_plots import pixels, places


def data(n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    d = generator.normal(0.7, 1.5, n)
    return d, (generator.random(n) < 1 / (1 + np.exp(-d))).astype(np.float64)


def run(label: str, points: int, furthest: float = 36.0) -> Optimisation:
    generator = np.random.default_rng(points)
    kl = np.linspace(0, furthest, points)
    d = np.sqrt(kl)
    gold = 0.3 + d * (0.25 - 0.13 * np.log(np.where(d > 0, d, 1)))
    return Optimisation(label, kl, d - 1, gold + generator.normal(0, 0.01, points))


def columns_of(path: Path, colour: str) -> np.ndarray:
    """The columns of the pixels of a colour, above the key below the axes."""
    rows, columns = places(path, colour)
    return columns[rows < 640]


def test_bins_without_predictions_break_the_line(tmp_path: Path) -> None:
    """Predictions near 0.55 and near 0.95: no line leads over the bins between."""
    d = np.array([0.2] * 40 + [3.0] * 40)
    right = np.array([1.0, 0.0] * 20 + [1.0] * 40)
    reliability_picture(pair_report(d, right), tmp_path / "gap.png", "Pairs")
    columns = columns_of(tmp_path / "gap.png", COLOURS[0])
    assert np.diff(np.unique(columns)).max() > 400
    reliability_picture(pair_report(*data()), tmp_path / "whole.png", "Pairs")
    columns = columns_of(tmp_path / "whole.png", COLOURS[0])
    assert np.diff(np.unique(columns)).max() < 400


def test_reliability_shows_bins_and_their_sizes(tmp_path: Path) -> None:
    d, p = data()
    path = tmp_path / "a.png"
    for report in (pair_report(d, p), label_report(d, p)):
        reliability_picture(report, path, "Validation")
        assert pixels(path, COLOURS[0]) > 3000  # points, lines, whiskers
        assert pixels(path, COLOURS[5]) > 30_000  # bars
    reliability_picture(pair_report([3.0], [1]), path, "One pair")
    assert 0 < pixels(path, COLOURS[0]) < 3000
    reliability_picture(label_report([], []), path, "None")
    assert pixels(path, COLOURS[0]) == pixels(path, COLOURS[5]) == 0


def test_margins_show_the_wrong_side_in_its_own_colour(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    d = np.linspace(-1, 3, 41)
    margin_picture(pair_report(d, np.ones(41)), path, "Margins")
    right, wrong = pixels(path, COLOURS[0]), pixels(path, COLOURS[1])
    assert right > 2 * wrong > 20_000
    margin_picture(pair_report(-d, np.ones(41)), path, "Margins")
    assert pixels(path, COLOURS[1]) > pixels(path, COLOURS[0])
    margin_picture(pair_report([0.0, 0.0, 1.0], [1, 1, 1]), path, "Even")
    assert pixels(path, COLOURS[0]) > 10_000
    assert pixels(path, COLOURS[1]) < 1000  # even is not wrong
    margin_picture(pair_report([0.5], [0.5]), path, "Ties only")
    assert pixels(path, COLOURS[0]) < 1000


def test_over_optimisation_draws_gold_and_proxy_of_each_run(tmp_path: Path) -> None:
    path, other = tmp_path / "a.png", tmp_path / "b.png"
    over_optimisation_picture([run("β = 0", 60), run("β = 0.1", 30, 9.0)], path, "Gold")
    first, second = (pixels(path, colour) for colour in COLOURS[:2])
    assert first > 2000
    assert second > 1000
    columns = columns_of(path, COLOURS[1])  # a quarter of the way: left of the middle
    assert 80 < columns.min() < columns.max() < 700
    kl = np.arange(3.0)
    over_optimisation_picture([Optimisation("x", kl, kl, -kl)], path, "Gold")
    for proxy, gold in ((kl, kl**2), (kl**2, -kl)):
        over_optimisation_picture([Optimisation("x", kl, proxy, gold)], other, "Gold")
        assert path.read_bytes() != other.read_bytes()


@pytest.mark.parametrize(("points", "drawn"), [(0, False), (3, False), (5, True)])
def test_law_is_drawn_if_the_points_determine_it(
    points: int, drawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "a.png", tmp_path / "b.png"
    over_optimisation_picture([run("x", points)], path, "Few")
    monkeypatch.setattr(plots, "fit_law", lambda *_: None)
    over_optimisation_picture([run("x", points)], plain, "Few")
    assert (path.read_bytes() != plain.read_bytes()) is drawn


def test_bars_by_length_stand_as_high_as_the_accuracy(tmp_path: Path) -> None:
    path, longer = tmp_path / "a.png", np.arange(-20.0, 20.0)
    always, never = (
        pair_report(np.ones(40), np.ones(40), longer),
        pair_report(-np.ones(40), np.ones(40), longer),
    )
    length_picture(always, path, "All right")
    high = pixels(path, COLOURS[5])
    length_picture(never, path, "All wrong")
    assert pixels(path, COLOURS[5]) < 1000 < high / 50
