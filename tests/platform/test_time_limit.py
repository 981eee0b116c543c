"""A call that does not come back is named with its stack, or ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from keel.platform.time_limit import Hung, heartbeat, place, stack_of, time_limit
from tests.platform.processes import run_python


def deaf() -> None:
    """Goes on whatever an ordinary `except` catches."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def spin() -> None:
    while True:
        pass


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize("hangs", [deaf, locked])
def test_hung_call_is_named_with_its_place(hangs: object) -> None:
    assert callable(hangs)
    name = hangs.__name__
    with (
        pytest.raises(Hung) as caught,
        time_limit("the engine", 0.2, "fix it, or raise rollout.timeout"),
    ):
        hangs()
    message = str(caught.value)
    assert message.startswith("the engine gives no answer within 0.2 s (it is in " + name)
    assert message.endswith("raise rollout.timeout")
    assert "test_time_limit.py" in caught.value.stack


def test_call_in_time_restores_the_signal_handler() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit("the engine", 600.0, "rollout.timeout"):
        during = signal.getsignal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)  # another's signal ends nothing
    assert during is not before
    assert signal.getsignal(signal.SIGALRM) is before
    with pytest.raises(ZeroDivisionError), time_limit("the engine", 600.0, "rollout.timeout"):
        1 / 0  # noqa: B018


def test_call_ending_at_its_limit_leaks_no_signal() -> None:
    """Left to its default action, SIGALRM would end this process."""
    for _ in range(500):
        try:
            with time_limit("the engine", 0.0005, "rollout.timeout"):
                for _ in range(3000):
                    pass
        except Hung:
            pass
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


HELD = """
import re
from keel.platform import time_limit
from keel.platform.calls import AsyncCall, LoopThread, call_with_time_limit
time_limit.GRACE = 0.2
time_limit.KillTimer.EVERY = 0.0
time_limit.TICK = 0.05
{block}
"""
MATCH = 're.match(r"(a+)+$", "a" * 60 + "b")'
"""Holds the interpreter's lock for longer than any limit."""


@pytest.mark.parametrize(
    "block",
    [
        f'with time_limit.time_limit("the engine", 0.2, "k", in_c=True):\n    {MATCH}',
        f"call_with_time_limit(lambda: {MATCH}, 0.2)",
        f"async def slow(): {MATCH}\nAsyncCall(slow, 0.2, LoopThread()).outcome()",
        # The inner call leaves the outer clock set.
        'with time_limit.time_limit("the engine", 0.2, "k", in_c=True):\n'
        f"    call_with_time_limit(lambda: 1, 0.1)\n    {MATCH}",
    ],
)
def test_call_holding_the_interpreter_ends_the_process(block: str) -> None:
    done = run_python(HELD.format(block=block), check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in match" in done.stderr


def test_place_is_the_innermost_line() -> None:
    stack = stack_of(threading.get_ident())
    assert place(stack).startswith("in stack_of (time_limit.py:")
    assert place("") == "nowhere to be seen"
    assert stack_of(None) == ""


def test_heartbeat_extends_the_limit() -> None:
    start = time.monotonic()
    with time_limit("the engine", 0.4, "rollout.timeout"):
        while time.monotonic() - start < 1.5:
            time.sleep(0.05)
            heartbeat()


PAUSED = """
import sys, time
from keel.platform.calls import call_with_time_limit
from keel.platform import time_limit
time_limit.TICK = 0.05
print("begun", flush=True)
outcome = call_with_time_limit(lambda: time.sleep(0.6) or "answer", 1.0)
print(outcome.value, flush=True)
"""


def test_suspended_process_does_not_expire() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().strip() == "answer"
    assert process.returncode == 0


def test_heartbeat_is_of_its_own_thread() -> None:
    """One that hangs, and was entered last, is not kept alive by another's."""
    caught: list[Hung] = []
    inside = threading.Event()

    def work() -> None:
        try:
            with time_limit("the engine", 0.5, "rollout.timeout"):
                inside.set()
                deaf()
        except Hung as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    with time_limit("the engine", 600.0, "rollout.timeout"):
        thread.start()
        assert inside.wait(30)
        for _ in range(3000):
            if not thread.is_alive():
                break
            heartbeat()
            time.sleep(0.01)
    assert len(caught) == 1


def test_expired_outer_limit_is_reported_as_such() -> None:
    reached = []
    with pytest.raises(Hung, match=r"the engine gives no answer within 0.3 s"):  # noqa: PT012
        with time_limit("the engine", 0.3, "a"), time_limit("a template", 30.0, "b"):
            spin()
        reached.append("after")
    assert reached == []


def test_async_call_ends_at_its_time_whenever_it_is_asked() -> None:
    """Its outcome may be asked for much later, after other work."""
    script = """
import asyncio, time
from keel.platform import time_limit
time_limit.GRACE = 0.5
from keel.platform.calls import AsyncCall
from keel.platform.calls import LoopThread

async def stuck():
    await asyncio.sleep(600)

async def late():
    await asyncio.sleep(1.0)
    return "late"

loop = LoopThread()
calls = [AsyncCall(one, 0.3, loop) for one in (stuck, late)]
time.sleep(3.0)  # more than the limit, the grace and the clock's second
for call in calls:
    outcome = call.outcome()
    print(outcome.timed_out, outcome.value, " in sleep" in outcome.stack)
"""
    done = run_python(script, check=False)
    assert done.stdout.splitlines() == ["True None True"] * 2, done.stderr
