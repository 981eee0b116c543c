from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from keel.analysis.progress import Lines, curve, sparkline, watching
from keel.runs.callbacks import RunControl, RunState


def test_a_log_has_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(seconds: float) -> list[str]:
        """The steps that are shown of 20 which take `seconds` each."""
        shown = Lines(Console(width=80))
        state = RunState(Path(), "rl", "rl", 0, 20, RunControl(print))
        shown.on_stage(state)
        for step in range(1, 21):
            monkeypatch.setattr(time, "monotonic", lambda now=step * seconds: now)
            shown.on_record(replace(state, step=step))
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]

    assert lines(0.1) == ["1/20", "20/20"]
    assert lines(2.0) == ["1/20", "4/20", "7/20", "10/20", "13/20", "16/20", "19/20", "20/20"]
    assert len(lines(5.0)) == 20


def test_a_log_has_the_step_before_a_note_and_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    with watching(Console(width=80)) as shown:
        state = RunState(Path(), "rl", "rl", 0, 20, RunControl(print))
        for step in range(1, 8):
            shown.on_record(replace(state, step=step))
            if step == 4:
                shown.on_note("the entropy is low")
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["1/20", "4/20", "entropy", "7/20"]


def test_a_sparkline_runs_from_lowest_to_highest() -> None:
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 2, math.nan, 3]) == "▁▅ █"
    assert sparkline([4, 4, 4]) == "▄▄▄"
    assert sparkline([math.nan, math.inf]) == "  "
    assert sparkline([]) == ""


def test_a_long_sparkline_averages_neighbours() -> None:
    assert sparkline([0, 2, 0, 2, 7, 9, 7, 9], width=4) == "▁▁██"
    assert sparkline([0, math.nan, math.nan, math.nan, 1, 1], width=3) == "▁ █"


def test_a_rising_curve() -> None:
    drawn = curve([0, 1, 2, 3], width=8, height=4)
    assert drawn.splitlines() == [
        # 16 × 16 dots: a straight diagonal, one dot a column.
        "3 ┤      ⡠⠊",
        "  ┤    ⡠⠊",
        "  ┤  ⡠⠊",
        "0 ┤⡠⠊",
        "  └────────",
        "   1      4",
    ]


def test_a_spike_between_columns_is_not_lost() -> None:
    values = np.zeros(400)
    values[201] = 1.0
    rows = curve(values, width=10, height=4).splitlines()
    assert rows[0].strip("1 ┤") != ""
    assert sum(row.count("⡇") + row.count("⢸") for row in rows[1:3]) == 2


def test_a_constant_and_a_single_point_are_drawn() -> None:
    flat = curve([0.5, 0.5, 0.5], width=4, height=5).splitlines()
    assert flat[2] == " 0.5 ┤⠤⠤⠤⠤"
    assert flat[0].startswith("0.75 ┤")
    assert flat[4].startswith("0.25 ┤")
    lone = curve([7.0], width=4, height=3)
    assert sum(0x2800 < ord(sign) < 0x2900 for sign in lone) == 1


def test_what_is_not_finite_is_left_out() -> None:
    gap = curve([1, math.nan, 3], width=6, height=3)
    assert [line.rstrip() for line in gap.splitlines()[::2]] == ["3 ┤    ⡠⠊", "1 ┤⡠⠊", "   1    3"]
    assert curve([math.nan]) == "(nothing to draw yet)"
    assert curve([]) == "(nothing to draw yet)"
