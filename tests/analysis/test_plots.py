from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.analysis import plots
from keel.analysis.plots import COLOURS, Curve, column, compare_curves, reward_curve, smooth
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
    made[3]["reward"] = None
    return made


def size_and_chunks(path: Path) -> tuple[int, int, list[bytes]]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, []
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        chunks.append(content[at + 4 : at + 8])
        at += length + 12
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big"), chunks


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        reward_curve(tmp_path / f"{name}.png", rows(), "quickstart", "seed 0")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    width, height, chunks = size_and_chunks(tmp_path / "a.png")
    assert (width, height) == (1280, 1120)
    # Texts and times would come in chunks of these kinds.
    assert not {b"tEXt", b"iTXt", b"zTXt", b"tIME"} & set(chunks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_the_users_matplotlib_settings_change_nothing(tmp_path: Path) -> None:
    import matplotlib

    reward_curve(tmp_path / "a.png", rows(), "quickstart")
    with matplotlib.rc_context({"figure.facecolor": "red", "lines.linewidth": 9}):
        reward_curve(tmp_path / "b.png", rows(), "quickstart")
        assert matplotlib.rcParams["lines.linewidth"] == 9
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def pixels(path: Path, colour: str) -> int:
    from matplotlib.image import imread

    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    image = np.rint(imread(path)[..., :3] * 255)
    return int((np.abs(image - wanted).max(axis=-1) < 3).sum())


def test_the_picture_shows_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    reward_curve(path, rows(), "quickstart")
    reward, greedy, sampled = (pixels(path, colour) for colour in COLOURS[:3])
    assert reward > 1000
    assert greedy > 1000
    assert sampled > 500
    assert pixels(path, COLOURS[4]) > 300  # the spread within groups
    # Without evaluation, the reward and its spread.
    bare = [{key: row[key] for key in row if "eval" not in key} for row in rows()]
    reward_curve(path, bare, "quickstart")
    assert size_and_chunks(path)[:2] == (1280, 800)
    assert pixels(path, COLOURS[0]) > 1000
    assert pixels(path, COLOURS[1]) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 19, 20])
def test_short_runs_are_drawn_too(tmp_path: Path, count: int) -> None:
    reward_curve(tmp_path / "a.png", rows(40)[: count + 1], "short")
    assert size_and_chunks(tmp_path / "a.png")[0] == 1280


def test_a_run_with_nothing_measured_says_so(tmp_path: Path) -> None:
    reward_curve(tmp_path / "a.png", [], "nothing")
    assert pixels(tmp_path / "a.png", COLOURS[0]) == 0


def test_columns_leave_gaps_out() -> None:
    reward = column(rows(), "reward")
    assert len(reward.steps) == 39
    assert 3 not in reward.steps
    assert reward.low is None
    accuracy = column(rows(), "eval/pass@1", "greedy")
    assert accuracy.label == "greedy"
    assert accuracy.steps.tolist() == [0, 10, 20, 30, 40]
    assert accuracy.low is not None
    assert np.isnan(accuracy.low[0])  # no interval was written there
    assert accuracy.low[1] == pytest.approx(0.475)


def test_smoothing_is_a_moving_mean() -> None:
    values = np.array([1.0, 2, 6, 3, 8])
    expected = [(1 + 2) / 2, (1 + 2 + 6) / 3, (2 + 6 + 3) / 3, (6 + 3 + 8) / 3, (3 + 8) / 2]
    assert smooth(values, 3) == pytest.approx(expected, rel=1e-12)
    assert smooth(values, 1).tolist() == values.tolist()
    assert smooth(values, 99) == pytest.approx([4.0] * 5, rel=1e-12)


def test_comparison_draws_every_curve(tmp_path: Path) -> None:
    steps = np.arange(1, 51.0)
    curves = [
        Curve(name, steps, steps * k, steps * k - 1, steps * k + 1)
        for k, name in enumerate(("GRPO", "GSPO", "PPO"), start=1)
    ]
    path = tmp_path / "a.png"
    compare_curves(path, curves, "Sorting", ylabel="accuracy", subtitle="5 seeds")
    assert all(pixels(path, colour) > 500 for colour in COLOURS[:3])
    assert pixels(path, COLOURS[3]) == 0
    compare_curves(path, [], "Nothing", ylabel="accuracy")
    assert pixels(path, COLOURS[0]) == 0


def test_curves_must_fit() -> None:
    with pytest.raises(ValueError, match="low has 1 entries for 2 steps"):
        Curve("x", np.arange(2.0), np.arange(2.0), np.zeros(1), np.zeros(2))


def test_a_plot_leaves_what_another_process_writes(tmp_path: Path) -> None:
    other = tmp_path / ".tmp-a.png"
    other.write_text("half")
    reward_curve(tmp_path / "a.png", rows(), "quickstart")
    assert other.read_text() == "half"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"cannot write .*No such file"):
        reward_curve(tmp_path / "x" / "a.png", rows(), "quickstart")


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    load = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(KeelError, match="pip install matplotlib"):
        plots.reward_curve(tmp_path / "a.png", [], "x")
