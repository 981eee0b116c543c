from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.analysis.metrics import Line, Panel, Series
from keel.analysis.plots import COLOURS, drawing, plot_panel, stage_curve
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
