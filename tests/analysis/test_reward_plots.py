from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from keel.analysis.calibration import label_report, pair_report
from keel.analysis.plots import COLOURS, INK
from keel.analysis.reward_plots import (
    Optimisation,
    length_picture,
    margin_picture,
    over_optimisation_picture,
    reliability_picture,
)
from keel.types import KeelError
from tests.analysis.test_plots import pixels, size_and_chunks


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


def places(path: Path, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pixels of a colour, above the key below the axes."""
    from matplotlib.image import imread

    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    image = np.rint(imread(path)[:640, :, :3] * 255)
    rows, columns = np.nonzero(np.abs(image - wanted).max(axis=-1) < 3)
    return rows, columns


def test_bins_without_predictions_break_the_line(tmp_path: Path) -> None:
    """Predictions near 0.55 and near 0.95: no line leads over the bins between."""
    d = np.array([0.2] * 40 + [3.0] * 40)
    right = np.array([1.0, 0.0] * 20 + [1.0] * 40)
    reliability_picture(pair_report(d, right), tmp_path / "gap.png", "Pairs")
    _, columns = places(tmp_path / "gap.png", COLOURS[0])
    assert np.diff(np.unique(columns)).max() > 400
    reliability_picture(pair_report(*data()), tmp_path / "whole.png", "Pairs")
    _, columns = places(tmp_path / "whole.png", COLOURS[0])
    assert np.diff(np.unique(columns)).max() < 400


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    report = pair_report(*data())
    for name in ("a", "b"):
        reliability_picture(report, tmp_path / f"r{name}.png", "Pairs")
        margin_picture(report, tmp_path / f"m{name}.png", "Pairs")
        over_optimisation_picture([run("β = 0", 40)], tmp_path / f"o{name}.png", "Gold")
    for kind, height in (("r", 960), ("m", 720), ("o", 800)):
        one, two = (tmp_path / f"{kind}{name}.png" for name in "ab")
        assert one.read_bytes() == two.read_bytes()
        width, found, chunks = size_and_chunks(one)
        assert (width, found) == (1280, height)
        assert not {b"tEXt", b"iTXt", b"zTXt", b"tIME"} & set(chunks)
    assert len(list(tmp_path.iterdir())) == 6  # nothing half written is left


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


def test_reliability_says_the_figures_unless_told_otherwise(tmp_path: Path) -> None:
    d, p = data()
    own, printed = tmp_path / "own.png", tmp_path / "other.png"
    reliability_picture(pair_report(d, p), own, "Pairs")
    accuracy = pair_report(d, p).accuracy
    text = (
        f"200 pairs: accuracy {100 * accuracy.mean:.1f} % (95 %: {100 * accuracy.low:.1f}–"
        f"{100 * accuracy.high:.1f}), log loss {pair_report(d, p).log_loss:.3f}, "
        f"Brier {pair_report(d, p).brier:.3f}, ECE {pair_report(d, p).ece:.3f}"
    )
    reliability_picture(pair_report(d, p), printed, "Pairs", text)
    assert own.read_bytes() == printed.read_bytes()
    reliability_picture(pair_report(d, p), printed, "Pairs", "epoch 2")
    assert own.read_bytes() != printed.read_bytes()
    tied = pair_report([*d, 1.0], [*p, 0.5])
    reliability_picture(tied, own, "Pairs")
    text = text.replace("200 pairs", "201 pairs (1 tied)")
    for name in ("log_loss", "brier", "ece"):
        before, after = (getattr(report, name) for report in (pair_report(d, p), tied))
        text = text.replace(f"{before:.3f}", f"{after:.3f}")
    reliability_picture(tied, printed, "Pairs", text)
    assert own.read_bytes() == printed.read_bytes()


def test_margins_show_the_wrong_side_in_its_own_colour(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    d = np.linspace(-1, 3, 41)
    margin_picture(pair_report(d, np.ones(41)), path, "Margins")
    right, wrong = pixels(path, COLOURS[0]), pixels(path, COLOURS[1])
    assert right > 2 * wrong > 20_000
    margin_picture(pair_report(-d, np.ones(41)), path, "Margins")
    assert pixels(path, COLOURS[1]) > pixels(path, COLOURS[0])
    # Apart from the two there are a key's patches and nothing else of a colour.
    margin_picture(pair_report([1.0, 2.0], [1, 1]), path, "All right")
    assert pixels(path, COLOURS[1]) < 1000
    margin_picture(pair_report([0.0, 0.0, 1.0], [1, 1, 1]), path, "Even")
    assert pixels(path, COLOURS[0]) > 10_000
    assert pixels(path, COLOURS[1]) < 1000  # even is not wrong
    margin_picture(pair_report([0.5], [0.5]), path, "Ties only")
    assert pixels(path, COLOURS[0]) < 1000


def test_margins_say_what_is_even_and_what_lies_beyond(tmp_path: Path) -> None:
    message, silent = tmp_path / "a.png", tmp_path / "b.png"
    report = pair_report([0.0, *np.linspace(-1, 1, 60), 1e4], np.ones(62))
    assert report.margins.beyond == 1
    margin_picture(report, message, "Margins")
    for left_out in (
        {"beyond": 0},
        {"at_zero": 0.0, "below": report.margins.below + report.margins.at_zero},
    ):
        margins = dataclasses.replace(report.margins, **left_out)
        margin_picture(dataclasses.replace(report, margins=margins), silent, "Margins")
        assert message.read_bytes() != silent.read_bytes()
        assert pixels(message, INK) > pixels(silent, INK)


def test_over_optimisation_draws_every_run_and_the_law(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.png", tmp_path / "b.png"
    curves = [run("β = 0", 60), run("β = 0.1", 30, 9.0)]
    over_optimisation_picture(curves, path, "Gold")
    first, second = (pixels(path, colour) for colour in COLOURS[:2])
    assert first > 2000
    assert second > 1000
    over_optimisation_picture(curves, plain, "Gold", fit=False)
    # The thin line: few pixels of the full colour, for it is dotted and smoothed.
    assert path.read_bytes() != plain.read_bytes()
    over_optimisation_picture(curves, plain, "Gold", same_unit=True)
    assert path.read_bytes() != plain.read_bytes()
    # Gold and proxy are each drawn.
    base, kl = tmp_path / "first.png", np.arange(5.0)
    over_optimisation_picture([Optimisation("x", kl, kl, -kl)], base, "Gold", fit=False)
    for proxy, gold in ((kl, kl**2), (kl**2, -kl)):
        over_optimisation_picture([Optimisation("x", kl, proxy, gold)], plain, "Gold", fit=False)
        assert base.read_bytes() != plain.read_bytes()
    # Far from each other, they need an axis each to be seen to move.
    far = [Optimisation("x", kl, kl + 1e4, kl)]
    for same, middle in ((False, True), (True, False)):
        over_optimisation_picture(far, plain, "Gold", same_unit=same, fit=False)
        rows, _ = places(plain, COLOURS[0])
        assert bool(((rows > 250) & (rows < 450)).any()) is middle
    _, columns = places(path, COLOURS[1])  # a quarter of the way: left of the middle
    assert 80 < columns.min() < columns.max() < 700


def test_whiskers_are_wilsons(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    reliability_picture(pair_report([3.0], [1]), path, "One pair")
    rows, columns = places(path, COLOURS[0])
    # One of one is right: from 21 % to 100 % of an axis of some 560 pixels.
    tall = rows[columns > 1100]  # right of the legend
    assert 420 < np.ptp(tall) < 480


def test_the_law_is_drawn_only_where_points_determine_it(tmp_path: Path) -> None:
    drawn, plain = tmp_path / "a.png", tmp_path / "b.png"
    for points in (0, 1, 3):
        curve = [run("short", points)]
        over_optimisation_picture(curve, drawn, "Few")
        over_optimisation_picture(curve, plain, "Few", fit=False)
        assert drawn.read_bytes() == plain.read_bytes()
    over_optimisation_picture([run("long", 5)], drawn, "Few")
    over_optimisation_picture([run("long", 5)], plain, "Few", fit=False)
    assert drawn.read_bytes() != plain.read_bytes()
    over_optimisation_picture([], drawn, "None")


def test_gaps_and_negative_estimates_are_borne(tmp_path: Path) -> None:
    kl = np.array([-0.01, np.nan, 1.0, 2.0, 3.0, 4.0])
    gold = np.array([0.1, 0.2, np.nan, 0.4, 0.4, 0.3])
    path = tmp_path / "a.png"
    over_optimisation_picture([Optimisation("gaps", kl, kl, gold)], path, "Gaps")
    assert pixels(path, COLOURS[0]) > 1000
    # One gap among many points does not spoil the moving mean.
    whole, gap = run("whole", 60), run("gap", 60)
    gap.gold_P[30] = np.nan
    over_optimisation_picture([whole], path, "Whole")
    before = pixels(path, COLOURS[0])
    over_optimisation_picture([gap], path, "Gap")
    assert pixels(path, COLOURS[0]) > 0.9 * before
    with pytest.raises(ValueError, match="gold_P has 1 entries for 6 divergences"):
        Optimisation("x", kl, kl, gold[:1])


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x" / "a.png"
    with pytest.raises(KeelError, match=r"cannot write .*No such file"):
        margin_picture(pair_report([1.0], [1]), path, "Margins")
    with pytest.raises(KeelError, match=r"cannot write .*No such file"):
        reliability_picture(pair_report([1.0], [1]), path, "Pairs")
    with pytest.raises(KeelError, match=r"cannot write .*No such file"):
        over_optimisation_picture([], path, "Gold")


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
