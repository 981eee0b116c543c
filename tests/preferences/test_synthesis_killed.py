"""A synthesis that is killed: what was answered is in the store and is not paid again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis_options import requests_path
from keel.rewards.judge_requests import JudgeStore
from tests.preferences.synthesis_made import JUDGE, WRITER, judges, prompts_file, server
from tests.rewards.judge_server import JudgeServer
from tests.shared import ROOT

PROMPTS, CALLS = 6, 6 * 9


def command(url: str, folder: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "keel", "prefs", "synthesize", str(folder / "a.db")),
        *("--prompts", prompts_file(folder, PROMPTS), "--samples", "3", "--pairs", "3"),
        *("--model", f"{WRITER}@{url}", "--judge", f"{JUDGE}@{url}", "--max-tokens", "60"),
        *("--price", f"{WRITER}=2,8", "--price", f"{JUDGE}=1,4"),
        *("--model-set", "concurrency=4", "--judge-set", "concurrency=4", *more),
    ]


def start(url: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(url, folder, *more),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(url: str, folder: Path) -> None:
    """The same command in this process, to its end."""
    assert main(command(url, folder)[3:]) == 0


def answered(folder: Path) -> set[str]:
    """The requests with a stored answer, read without Keel."""
    with sqlite3.connect(f"file:{requests_path(folder / 'a.db')}?mode=ro", uri=True) as db:
        rows = {row[0] for row in db.execute("SELECT key FROM answers")}
    db.close()
    return rows


def kill_at(found: JudgeServer, folder: Path, number: int) -> int:
    """Kill a synthesis while requests from this number on have no answer; how many wait."""
    found.holds = lambda asked: asked >= number
    found.let_go.clear()
    running = start(found.url, folder)
    found.wait_for(lambda: len(found.log) > number)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    waiting = len(found.log) - number
    found.let_go.set()
    found.wait_for(lambda: found.active == 0)
    found.holds = lambda asked: False
    return waiting


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 7, 15, 22, 40])
def test_no_answer_is_paid_twice_after_a_kill(at: int, tmp_path: Path) -> None:
    """In the sample's completions (1), its labels (7), the rest's completions (15, 22), labels."""
    with server() as found:
        waiting = kill_at(found, tmp_path, at)
        assert 1 <= waiting <= 4
        arrived = answered(tmp_path)
        assert arrived <= set(found.names[:at])
        assert len(arrived) >= at - 4
        before = len(found.log)

        finish(found.url, tmp_path)
        repeated = set(found.names[before:]) & set(found.names[:before])
        # Only what had no answer is asked again, under its name, so that a server may know it.
        assert not repeated & arrived
        assert repeated == set(found.names[:before]) - arrived
        assert len(set(found.names)) == CALLS

        asked = len(found.log)
        finish(found.url, tmp_path)
        assert len(found.log) == asked
        check_store(tmp_path, found)


def check_counts(folder: Path) -> None:
    with PreferenceStore(folder / "a.db") as store:
        counts = store.counts()
        forecasts = list(store.costs(forecast=True))
    assert [counts[name] for name in ("prompts", "completions", "pairs", "labels")] == [
        *(PROMPTS, 3 * PROMPTS, 3 * PROMPTS, 6 * PROMPTS)
    ]
    assert [cost.unit for cost in forecasts] == ["dollars", "hours"]


def check_store(folder: Path, found: JudgeServer) -> None:
    """Everything is there once, and completions and labels hold the cost of each stored answer."""
    check_counts(folder)
    with PreferenceStore(folder / "a.db") as store:
        records = [*store.completions(), *store.labels()]
    requests = JudgeStore(requests_path(folder / "a.db"))
    account = requests.account()
    requests.close()
    spent = sum(record.cost or 0.0 for record in records)
    assert spent == pytest.approx(account.spent.dollars, rel=1e-9)
    assert account.answers == CALLS
    # To the token: a server that knows the name of a repeated request bills it once.
    assert (account.spent.tokens_in, account.spent.tokens_out) == found.billed_once


@pytest.mark.slow
def test_two_processes_repeat_only_requests_in_progress(tmp_path: Path) -> None:
    with server() as found:
        # Held until both have sent what they may: they ask for the same, and meet again and again.
        found.holds = lambda number: number < 6
        both = [start(found.url, tmp_path), start(found.url, tmp_path)]
        found.wait_for(lambda: len(found.log) >= 6)
        found.let_go.set()
        for process in both:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
        assert len(set(found.names)) == CALLS
        check_counts(tmp_path)


@pytest.mark.slow
def test_paid_answers_that_a_kill_lost_are_not_asked_again(
    tmp_path: Path,
) -> None:
    """One order of a pair is answered and the other not: no label yet, and no second payment."""
    with server() as found:
        orders: list[tuple[str, str]] = []
        one_at_a_time = threading.Lock()

        def second(number: int) -> bool:
            """Hold the second order of every pair."""
            asked = found.log[number]
            if not judges(asked):
                return False
            one, other = asked.material["first"], asked.material["second"]
            with one_at_a_time:
                orders.append((one, other))
                return (other, one) in orders

        found.holds = second
        running = start(found.url, tmp_path)
        found.wait_for(lambda: sum(map(judges, found.log)) == 4)
        found.wait_for(lambda: found.active == 2)
        names = {a.name for a in found.log if judges(a)}
        while len(names & answered(tmp_path)) < 2:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        paid = answered(tmp_path)
        with PreferenceStore(tmp_path / "a.db") as store:
            assert store.counts()["labels"] == 0
        found.let_go.set()
        found.wait_for(lambda: found.active == 0)
        found.holds = lambda number: False
        before = len(found.log)
        finish(found.url, tmp_path)
        assert not set(found.names[before:]) & paid
        check_store(tmp_path, found)
