"""Pictures of runs and of reward models; the law of over-optimisation."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis import plots
from keel.analysis.calibration import label_report, pair_report
from keel.analysis.metrics import Line, Panel, Series
from keel.analysis.plots import (
    COLOURS,
    Optimisation,
    distance,
    drawing,
    fit_law,
    law,
    length_picture,
    margin_picture,
    optimisation_of,
    over_optimisation_picture,
    plot_panel,
    reliability_picture,
    stage_curve,
)
from keel.runs.reader import Column
from keel.types import KeelError


def rows(steps: int = 40) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    made: list[dict[str, Any]] = [{"stage": "rl", "step": 0, "eval/pass@1": 0.4}]
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"stage": "rl", "step": step, "reward_std": 0.3}
        row["reward"] = step / steps + 0.05 * float(generator.normal())
        if step % 10 == 0:
            rate = 0.4 + 0.5 * step / steps
            row |= {"eval/pass@1": rate, "eval/pass@4": min(1, rate + 0.1)}
            row |= {"eval/pass@1/low": rate - 0.05, "eval/pass@1/high": rate + 0.05}
        made.append(row)
    made[3 if steps > 2 else 0]["reward"] = None
    return made


def columns(*records: dict[str, Any]) -> dict[str, Column]:
    """The metrics of records by name, NaN for None."""
    names = {name: None for record in records for name in record if name not in ("stage", "step")}
    kept = {name: [record for record in records if name in record] for name in names}
    return {
        name: Column(np.array([r["step"] for r in own]), np.array([r[name] for r in own], float))
        for name, own in kept.items()
    }


def size_and_chunks(path: Path) -> tuple[int, int, list[bytes]]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, []
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        chunks.append(content[at + 4 : at + 8])
        at += length + 12
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big"), chunks


def places(path: Path, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pixels of a colour."""
    from matplotlib.image import imread

    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    image = np.rint(imread(path)[..., :3] * 255)
    rows, columns = np.nonzero(np.abs(image - wanted).max(axis=-1) < 3)
    return rows, columns


def pixels(path: Path, colour: str) -> int:
    return len(places(path, colour)[0])


def test_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    """Also under matplotlib settings of the user's, which stay as they are."""
    import matplotlib

    stage_curve(tmp_path / "a.png", "rl", columns(*rows()), "quickstart", "seed 0")
    with matplotlib.rc_context({"figure.facecolor": "red", "lines.linewidth": 9}):
        stage_curve(tmp_path / "b.png", "rl", columns(*rows()), "quickstart", "seed 0")
        assert matplotlib.rcParams["lines.linewidth"] == 9
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    width, height, chunks = size_and_chunks(tmp_path / "a.png")
    assert (width, height) == (1280, 1120)
    # Texts and times would come in chunks of these kinds.
    assert not {b"tEXt", b"iTXt", b"zTXt", b"tIME"} & set(chunks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_stage_curve_shows_reward_spread_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    stage_curve(path, "rl", columns(*rows()), "quickstart")
    assert pixels(path, COLOURS[0]) > 3000  # reward, spread and greedy evaluations
    assert pixels(path, COLOURS[1]) > 500  # sampled evaluations
    bare = [{k: row[k] for k in row if "eval" not in k and k != "reward_std"} for row in rows()]
    stage_curve(path, "rl", columns(*bare), "quickstart")
    assert size_and_chunks(path)[:2] == (1280, 608)
    assert pixels(path, COLOURS[1]) == 0
    flat = [{**row, "reward_std": 0.0} for row in bare]
    stage_curve(path, "rl", columns(*flat), "quickstart")
    assert size_and_chunks(path)[:2] == (1280, 608)


def test_games_curve_counts_their_steps(tmp_path: Path) -> None:
    records = [
        {"step": n, "environment_steps": 50.0 * n, "episode/return": float(n)} for n in range(1, 9)
    ]
    stage_curve(tmp_path / "a.png", "q_learning", columns(*records), "dqn")
    assert pixels(tmp_path / "a.png", COLOURS[0]) > 500


@pytest.mark.quick("1", "20")
@pytest.mark.parametrize("count", [1, 2, 19, 20])
def test_short_runs_are_drawn_too(tmp_path: Path, count: int) -> None:
    stage_curve(tmp_path / "a.png", "rl", columns(*rows(count)), "short")
    assert size_and_chunks(tmp_path / "a.png")[0] == 1280


def test_a_run_without_records_has_no_picture(tmp_path: Path) -> None:
    stage_curve(tmp_path / "a.png", "rl", {}, "nothing")
    assert list(tmp_path.iterdir()) == []


def test_marked_lines_each_have_their_colour(tmp_path: Path) -> None:
    steps, line = np.arange(1, 51.0), Line("x", "x")
    series = [
        Series(line, name, steps, steps * k, steps * k - 1, steps * k + 1)
        for k, name in enumerate(("GRPO", "_GSPO", "P$P$O"), start=1)
    ]
    with drawing(tmp_path / "a.png", 4.5) as figure:
        handles = plot_panel(figure.subplots(), Panel("x", "x", "", (line,)), series, marked=True)
    assert [handle.get_label() for handle in handles] == ["GRPO", " _GSPO", r"P\$P\$O"]
    assert all(pixels(tmp_path / "a.png", colour) > 500 for colour in COLOURS[:3])
    assert pixels(tmp_path / "a.png", COLOURS[3]) == 0


def test_a_folder_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"cannot write .*No such file"):
        stage_curve(tmp_path / "x" / "a.png", "rl", columns(*rows()), "quickstart")


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


def gold_at(d: float, start: float, alpha: float, beta: float) -> float:
    return start + (d * (alpha - beta * math.log(d)) if d > 0 else 0.0)


@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-1, 1),
    st.lists(st.integers(0, 400), min_size=4, max_size=12, unique=True),
)
def test_the_law_is_found_again(start: float, alpha: float, beta: float, at: list[int]) -> None:
    d = [k / 20 for k in at]
    gold = [gold_at(x, start, alpha, beta) for x in d]
    found = fit_law(d, gold)
    assert found is not None
    # The condition of the three columns at such distances is below 1e5, squared nowhere.
    assert found.tolist() == pytest.approx((start, alpha, beta), abs=1e-8)
    assert law(d, found) == pytest.approx(gold, abs=1e-9)


def test_too_few_points_determine_nothing() -> None:
    assert fit_law([], []) is None
    assert fit_law([0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]) is None
    assert fit_law([0, 1, 2, 3], [0, 1, 2, math.nan]) is None
    assert fit_law([0, 1, 2, math.inf], [0, 1, 2, 3]) is None
    assert fit_law([0, 1, 2, 3], [0, 1, 2, 3]) is not None
    # Four distances that differ by rounding alone.
    assert fit_law(1 + np.arange(4) * 1e-15, [0, 1, 2, 3]) is None


def test_distance_is_the_root_of_kl() -> None:
    assert distance([0, 4, 2.25, -0.01]).tolist() == [0, 2, 1.5, 0]


def test_a_run_becomes_points() -> None:
    """Two proxies by their weights; a row that lacks one of the values is no point."""
    rows: list[dict[str, float]] = [
        {"kl/sequence": 0.0, "rewards/a/mean": 1.0, "rewards/b/mean": 3.0, "rewards/g/mean": 0.5},
        {"kl/sequence": 1.0, "rewards/a/mean": 2.0, "rewards/g/mean": 0.6},
        {"kl/sequence": 4.0, "rewards/a/mean": 2.0, "rewards/b/mean": 5.0, "rewards/g/mean": 0.7},
    ]
    found = optimisation_of(rows, {"a": 2.0, "b": 0.5}, "g", "name")
    assert found is not None
    assert found.label == "name"
    assert found.divergence_P.tolist() == [0.0, 4.0]
    assert found.proxy_P.tolist() == [3.5, 6.5]
    assert found.gold_P.tolist() == [0.5, 0.7]
    assert optimisation_of(rows, {"absent": 1.0}, "g", "name") is None
