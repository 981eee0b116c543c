"""The pace of work from a few timings."""

from __future__ import annotations

import time

import pytest

from keel.preflight.throughput import Pace, pace_of, seconds_of


def test_a_pass_costs_and_each_row_adds() -> None:
    pace = Pace(fixed=2.0, each=0.5)
    assert pace.seconds(10) == 7.0
    assert pace.seconds(10, at_once=4) == 11.0
    assert pace.seconds(0) == 0.0


def test_the_two_are_told_apart() -> None:
    """Sleeps are never shorter than asked, and longer by what a busy machine does: hence a half."""
    pace = pace_of(lambda rows: time.sleep(0.05 + 0.01 * rows), 20)
    assert pace.seconds(20) == pytest.approx(0.25, rel=0.5)
    assert 0.005 < pace.each < 0.02


def test_a_first_time_that_was_slow_does_not_count() -> None:
    calls = []
    assert seconds_of(lambda: calls.append(1), first=1.5) < 1.0
    assert len(calls) == 2


def test_what_takes_long_is_not_done_again() -> None:
    calls: list[int] = []
    pace = pace_of(calls.append, 10, first=30.0)
    assert calls == []
    assert pace == Pace(0.0, 3.0)
