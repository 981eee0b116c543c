"""What is kept, ended and reported if a reward function fails."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from keel.rewards import Scorer
from keel.rewards.outputs import Wrong
from keel.types import KeelError
from tests.rewards import functions
from tests.rewards.made import named
from tests.rewards.test_score import (  # the fixture applies here too
    BadTask,
    _let_go,  # noqa: F401
    group,
    reward,
    two_groups,
    values,
)


def async_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "keel-async"}


def test_what_a_call_that_failed_logged_is_lost() -> None:
    """An abandoned function may go on logging while the next step is scored."""
    going = threading.Event()

    def leaves(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        number = 0
        while not functions.RELEASE.is_set():
            log_extra(f"x{number}", [1] * len(completions))
            log_metric(f"x{number}", 1.0)
            number += 1
            going.set()
        return [1.0] * len(completions)

    def raises(completions: list[str], log_extra: Any) -> list[float]:
        assert going.wait(60)
        log_extra("raises", [1] * len(completions))
        raise ValueError("no")

    rewards = [named(leaves), named(raises), reward("by_length")]
    scorer = Scorer(rewards, timeout=0.3, on_error="skip")
    for step in range(2):
        scored = scorer(two_groups(), step)
        assert scored.extras == {}
        assert set(scored.metrics) == {"rewards/by_length/mean", "rewards/by_length/std"}
        assert scored.failures == {"leaves": 4, "raises": 4}


def test_function_that_cancels_itself_is_reported_as_an_error() -> None:
    async def cancels(completions: Any) -> list[float]:
        raise asyncio.CancelledError("by itself")

    with pytest.raises(KeelError, match=r"'cancels' .* raised CancelledError: by itself \(test_f"):
        Scorer([named(cancels)], timeout=60)(two_groups(), 0)


def test_function_may_call_one_completion_wrong() -> None:
    def picky(completions: list[str]) -> list[Any]:
        return [Wrong("three is too many") if len(c) == 3 else 1.0 for c in completions]

    says = r"'picky' at step 5: sample 2 \(prompt 't/train/0'\): three is too many$"
    with pytest.raises(KeelError, match=says):
        Scorer([named(picky)])(two_groups(), 5)
    skipped = Scorer([named(picky)], on_error="skip")(two_groups(), 5)
    assert values(skipped) == [[1.0, 1.0, None], [1.0]]
    assert skipped.failures == {"picky": 1}


def test_numbers_too_large_for_a_float_are_not_finite() -> None:
    for value in (10**400, [(0, 10**400)]):

        def huge(completions: list[str], value: Any = value) -> list[Any]:
            return [1.0, value]

        with pytest.raises(KeelError, match=r"sample 1 .* not (a )?finite"):
            Scorer([named(huge)])([group(["a", "b"])], 0)


def test_sample_number_counts_completions_that_a_gate_rejected() -> None:
    def fmt(completions: list[str]) -> list[float]:
        return [float(c != "a") for c in completions]

    def bad(completions: list[str]) -> list[float]:
        return [float("nan") if c == "c" else 1.0 for c in completions]

    gate = named(fmt, gate_below=1.0)
    with pytest.raises(KeelError, match=r"'bad' at step 0: sample 2 .*nan is not finite"):
        Scorer([gate, named(bad)])([group(["a", "b", "c"])], 0)
    task = named(None, "task")
    with pytest.raises(KeelError, match=r"'task' at step 0: sample 3 .*RuntimeError: oh"):
        Scorer([gate, task], {"t": BadTask("raises")})([group(["a", "a", "b", "ccc"])], 0)


def test_a_sync_error_leaves_no_async_call_waiting() -> None:
    before = async_threads()
    ended: list[str] = []
    began = threading.Event()

    async def waits(completions: Any) -> list[float]:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("waits")
        return []

    def raises(completions: Any) -> list[float]:
        assert began.wait(60)
        raise ValueError("no")

    scorer = Scorer([named(waits), named(raises)], timeout=600)
    with pytest.raises(KeelError, match=r"'raises' at step 0 .* ValueError: no"):
        scorer(two_groups(), 0)
    assert ended == ["waits"]
    # Nor one that had not begun.
    began.set()
    for _ in range(20):
        with pytest.raises(KeelError, match="'raises'"):
            scorer(two_groups(), 0)
    assert len(async_threads() - before) == 1
    scorer.close()
    assert async_threads() <= before


def test_close_ends_the_event_loop_after_the_functions() -> None:
    before = async_threads()
    closed: list[int] = []

    class Judge:
        def __init__(self, wrong: bool) -> None:
            self.wrong = wrong

        async def __call__(self, completions: list[str]) -> list[float]:
            return [1.0] * len(completions)

        def close(self) -> None:
            closed.append(len(async_threads() - before))
            if self.wrong:
                raise ValueError("cannot close")

    judges = [named(Judge(wrong), str(wrong)) for wrong in (True, False)]
    scorer = Scorer(judges)
    scorer(two_groups(), 0)
    with pytest.raises(ValueError, match="cannot close"):
        scorer.close()
    assert closed == [1, 1]
    assert async_threads() <= before


def test_call_that_times_out_is_abandoned() -> None:
    class Starts:
        def __init__(self) -> None:
            self.abandoned = threading.Event()
            self.calls = 0

        def __call__(self, completions: list[str]) -> list[float]:
            self.calls += 1
            if self.calls == 2:
                self.abandoned.wait(600)
            return [1.0] * len(completions)

        def abandon(self) -> None:
            self.abandoned.set()

    starts = Starts()
    scorer = Scorer([named(starts)], timeout=0.5, on_error="skip")
    for step in range(3):
        failed = scorer(two_groups(), step).failures
        assert failed == ({"Starts": 4} if step == 1 else {})
        assert starts.abandoned.is_set() == (step > 0)


def test_completion_whose_program_failed_is_shown_to_no_function() -> None:
    seen: list[str] = []

    def own(completions: list[str], log_extra: Any) -> list[float]:
        seen.extend(completions)
        log_extra("upper", [text.upper() for text in completions])
        return [float(len(text)) for text in completions]

    first, second = two_groups()
    failed = dataclasses.replace(first.completions[1], failed="ValueError: no")
    first = dataclasses.replace(first, completions=(first.completions[0], failed))
    gone = dataclasses.replace(second, completions=(failed,))
    gate = named(own, gate_below=0.5)
    scored = Scorer([gate], overlong_buffer=1, max_tokens=9)([first, gone], 0)
    assert seen == ["aa"]
    assert values(scored) == [[2.0, None], [None]]
    assert scored.results[1][0].components == {"own": None, "overlong": None}
    assert scored.extras["upper"] == ["AA", None, None]
    assert scored.extras["program_error"] == [None, "ValueError: no", "ValueError: no"]
    assert scored.failures == {"program": 2}
    assert scored.metrics["rewards/own/gated"] == 0.0
