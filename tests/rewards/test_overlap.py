"""A step judged while it is drawn says what it says when it is judged at its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from keel.config.sources import RewardSource
from keel.rewards import Scored, Scorer, load_reward
from keel.rewards.calls import PARTS
from keel.rewards.registry import NamedReward, RewardContext
from keel.types import Group, KeelError, Prompt
from tests.data.made import completion
from tests.platform.processes import eventually
from tests.rewards.judge_server import JudgeServer, longer, score
from tests.rewards.made import named

WAIT = 60.0
"""Seconds after which a test that hangs fails."""


def groups(many: int = 12) -> list[Group]:
    """Groups of three; every third prompt has a column of its own."""
    made = []
    for at in range(many):
        columns: dict[str, Any] = {"number": at} | ({"third": at} if at % 3 == 2 else {})
        texts = ["x" * (1 + (at * k) % 5) for k in (1, 2, 3)]
        prompt = Prompt(f"t/train/{at}", f"say {at}", columns, "t")
        made.append(Group(prompt, tuple(completion(text) for text in texts)))
    return made


def overlapped(scorer: Scorer, step: Sequence[Group], order: Sequence[int]) -> Scored:
    """What the scorer says of groups that are handed over in an order of their own."""
    with scorer.overlapping([group.prompt for group in step], 3) as overlap:
        for at in order:
            overlap.add(at, step[at])
        return scorer.results(step, overlap.finish())


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("keel-overlap")]


def same(one: Scored, other: Scored) -> None:
    assert one.results == other.results
    assert one.metrics == other.metrics
    assert list(one.extras.items()) == list(other.extras.items())
    assert one.failures == other.failures


def length(completions: list[str], log_extra: Any) -> list[float]:
    log_extra("first", [text[:1] for text in completions])
    return [float(len(text)) for text in completions]


async def later(completions: list[str], number: list[int], log_extra: Any) -> list[float]:
    await asyncio.sleep(0.001 * (len(completions[0]) % 3))
    log_extra("number", number)
    return [n / 7 + len(text) for n, text in zip(number, completions, strict=True)]


def short(completions: list[str]) -> list[float | None]:
    return [None if len(text) == 5 else float(len(text) < 4) for text in completions]


def optional_column(completions: list[str], third: Any = "never seen") -> list[float]:
    assert third != "never seen"
    return [0.0 if one is None else 1.0 for one in third]


def partly_wrong(completions: list[str]) -> list[float]:
    return [float("nan") if len(text) == 3 else 1.0 for text in completions]


MANY = [
    named(length, normalise="batch"),
    named(later, weight=0.5, normalise="group", clip=(0.0, 4.0)),
    named(short, gate_below=0.5, gated_reward=-1.0),
    named(optional_column),
]
SHUFFLED = [7, 0, 3, 11, 1, 2, 10, 4, 9, 6, 5, 8]


@pytest.mark.parametrize("order", [range(12), range(11, -1, -1), SHUFFLED])
def test_overlap_does_not_depend_on_the_order_of_groups(order: Sequence[int]) -> None:
    functions = [*MANY, named(partly_wrong)]
    scorer = Scorer(functions, overlong_buffer=3, max_tokens=6, on_error="skip")
    at_its_end = scorer(groups(), 3)
    assert len(at_its_end.metrics) > 8
    assert at_its_end.failures["partly_wrong"] > 1
    same(overlapped(scorer, groups(), order), at_its_end)
    assert threads() == []
    scorer.close()


@pytest.mark.parametrize("many", [0, 1, 8, 17])
def test_parts_are_of_equal_size_and_in_order(many: int) -> None:
    seen: list[list[int]] = []

    def remembers(number: list[int]) -> list[float]:
        seen.append(number)
        return [0.0] * len(number)

    step = groups(many)
    overlapped(Scorer([named(remembers)]), step, range(many - 1, -1, -1))
    assert [n for part in seen for n in part] == [n for n in range(many) for _ in range(3)]
    assert len(seen) <= PARTS
    assert len({len(part) for part in seen[:-1]}) <= 1
    assert many < 8 or len(seen) > PARTS // 2


def test_wrong_value_is_named_by_its_place() -> None:
    def wrong_at_seven(number: list[int]) -> list[float]:
        return [float("nan") if n == 7 else 1.0 for n in number]

    scorer = Scorer([named(wrong_at_seven)])
    with pytest.raises(KeelError) as whole:
        scorer(groups(), 3)
    with pytest.raises(KeelError) as part:
        overlapped(scorer, groups(), SHUFFLED)
    assert "sample 21 (prompt 't/train/7')" in str(whole.value)
    assert str(part.value) == str(whole.value)
    assert threads() == []


def test_task_without_verdicts_is_reported_of_the_whole_step() -> None:
    """Silence about one part is none about the step."""

    class Quiet:
        name = "t"

        def score(self, prompt: Prompt, completion: Any) -> float | None:
            return 1.0 if prompt.id.endswith("/11") else None

    step = groups()
    scorer = Scorer((), {"t": Quiet()})  # type: ignore[dict-item]
    same(overlapped(scorer, step, SHUFFLED), scorer(step, 3))
    with pytest.raises(KeelError, match="cannot tell what an answer is worth"):
        overlapped(scorer, step[:11], range(11))


def test_numbers_of_several_calls_weigh_by_their_completions() -> None:
    """Nine groups make parts of two, and one of one."""

    def logs(
        completions: list[str], number: list[int], log_metric: Any, log_summary: Any
    ) -> list[float]:
        if number[0] == 0:
            log_metric("once", 5.0)
        log_metric("mean", float(np.mean([len(text) for text in completions])))
        log_summary(number, lambda found: {"different": len(set(found))})
        return [0.0] * len(completions)

    scorer = Scorer([named(logs)])
    whole, parts = scorer(groups(9), 3), overlapped(scorer, groups(9), range(9))
    assert parts.metrics["once"] == 5.0
    assert parts.metrics["mean"] == pytest.approx(whole.metrics["mean"], rel=1e-12)
    assert parts.metrics["different"] == whole.metrics["different"] == 9.0


@pytest.mark.parametrize("mode", ["rubric", "pairwise"])
def test_overlapped_judge_gives_the_same_rewards_and_costs(mode: str) -> None:
    def made(url: str) -> NamedReward:
        keys = {"model": "m", "url": url, "mode": mode, "price_in": 0.3, "price_out": 0.7}
        return load_reward(RewardSource(function="judge", options=keys), RewardContext())

    found = []
    for order in (None, SHUFFLED):
        with JudgeServer(score if mode == "rubric" else longer) as server:
            scorer = Scorer([made(server.url)])
            step = groups()
            found.append(scorer(step, 3) if order is None else overlapped(scorer, step, order))
            scorer.close()
    assert found[0].metrics["judge/dollars"] > 0
    same(found[1], found[0])


# ---------------------------------------------------------------- at the same time


def test_parts_are_asked_before_the_last_group_is_there() -> None:
    """The coroutine of the first part begins, and waits, before the second group is handed over."""
    began, drawn = threading.Event(), threading.Event()
    active: list[int] = []

    async def waits(completions: list[str], number: list[int]) -> list[float]:
        active.append(number[0])
        began.set()
        while not drawn.is_set():
            await asyncio.sleep(0.002)
        return [0.0] * len(completions)

    step = groups(4)
    scorer = Scorer([named(waits)])
    with scorer.overlapping([group.prompt for group in step], 3) as overlap:
        for at, group in enumerate(step):
            overlap.add(at, group)
            assert began.wait(WAIT)
        assert eventually(lambda: len(active) == 4)  # all of them wait side by side
        drawn.set()
        overlap.finish()
    assert active == [0, 1, 2, 3]


def test_sync_functions_are_called_one_at_a_time() -> None:
    inside: list[int] = []
    most: list[int] = []

    def slow(completions: list[str]) -> list[float]:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return [0.0] * len(completions)

    gate = named(slow, "gate", gate_below=-1.0)
    overlapped(Scorer([gate, named(slow)]), groups(), range(12))
    assert max(most) == 1
    assert len(most) == 12  # six parts of two groups, asked twice each


# ---------------------------------------------------------------- what goes wrong


def test_failure_ends_the_sampling_and_is_raised() -> None:
    calls: list[int] = []

    def falls(number: list[int]) -> list[float]:
        calls.append(number[0])
        if number[0] == 2:
            raise RuntimeError("the grader fell over")
        return [0.0] * len(number)

    step = groups(6)
    scorer = Scorer([named(falls)])

    def draw() -> None:
        with scorer.overlapping([group.prompt for group in step], 3) as overlap:
            for at in range(3):
                overlap.add(at, step[at])
            assert eventually(lambda: overlap._error is not None)
            overlap.add(3, step[3])
            raise AssertionError("it goes on drawing")

    with pytest.raises(KeelError, match=r"'falls' at step 3 .*the grader fell over"):
        draw()
    assert calls == [0, 1, 2]
    assert threads() == []


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_error_of_the_sampling_gives_up_running_calls(kind: str) -> None:
    """Far within the reward's own time: nothing of it is left but the thread that hangs."""
    began, release = threading.Event(), threading.Event()
    cancelled = threading.Event()

    def hangs(completions: list[str]) -> list[float]:
        began.set()
        release.wait(WAIT)
        return [0.0] * len(completions)

    async def waits(completions: list[str]) -> list[float]:
        began.set()
        try:
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [0.0] * len(completions)

    step = groups(3)
    reward = named(hangs if kind == "function" else waits)
    scorer = Scorer([reward], timeout=10 * WAIT)
    start = time.monotonic()

    def draw() -> None:
        with scorer.overlapping([group.prompt for group in step], 3) as overlap:
            overlap.add(0, step[0])
            overlap.add(1, step[1])
            assert began.wait(WAIT)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw()
    assert time.monotonic() - start < WAIT / 2  # a tenth of a second is what it takes
    assert threads() == []
    assert kind == "function" or cancelled.wait(WAIT)
    release.set()
    scorer.close()


@pytest.mark.slow
def test_blocked_event_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One coroutine blocks the loop that all of them share."""
    monkeypatch.setattr("keel.platform.calls.NOTICE", 1.0)
    release = threading.Event()

    async def blocks(number: list[int]) -> list[float]:
        if number[0] == 0:
            release.wait(WAIT)
        return [0.0] * len(number)

    scorer = Scorer([named(blocks)], timeout=1.0, on_error="skip")
    failed = overlapped(scorer, groups(2), [0, 1]).failures
    assert failed["blocks"] >= 3
    release.set()
    assert scorer(groups(2)[1:], 4).failures == {}
    scorer.close()
