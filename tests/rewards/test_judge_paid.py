from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.config.sources import RewardSource
from keel.rewards import Scorer, load_reward
from keel.rewards.judge import Judge
from keel.rewards.judge_questions import Cost, JudgeOptions, StoredAnswer
from keel.rewards.judge_requests import Account, JudgeStore
from keel.rewards.registry import RewardContext
from keel.types import KeelError
from tests.rewards.judge_made import account_of, call, group, made, scored
from tests.rewards.judge_server import JudgeServer
from tests.rewards.made import flat, named
from tests.shared import ROOT

pytestmark = pytest.mark.slow

SCALE = {"low": 0, "high": 10}


def keys_in(folder: Path) -> set[str]:
    """The answers in a file, read without Keel."""
    with sqlite3.connect(f"file:{folder / 'judge.sqlite'}?mode=ro", uri=True) as db:
        rows = {row[0] for row in db.execute("SELECT key FROM answers")}
    db.close()
    return rows


def child(url: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Another process that scores the forty answers."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.rewards.judge_made"),
            *(url, str(folder), json.dumps({**SCALE, "concurrency": 4, **options})),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


# ---------------------------------------------------------------- kills


@pytest.mark.quick("36")
@pytest.mark.parametrize("at", [0, 12, 36])
def test_kill_and_resume_pays_for_no_reply_twice(at: int, tmp_path: Path) -> None:
    whole = [n / 10 for _ in range(10) for n in range(4)]
    with JudgeServer() as server:
        # The four beyond `at` hang; that they came says that each of the `at` has been kept, for
        # only then is its slot free.
        server.holds = lambda number: number >= at
        killed = child(server.url, tmp_path)
        server.wait_for(lambda: len(server.log) == at + 4)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        arrived = keys_in(tmp_path)
        assert arrived == set(server.names[:at])
        assert account_of(tmp_path).answers == at
        lost = set(server.names[at:])

        server.holds = lambda number: False
        server.let_go.set()
        found = ended(child(server.url, tmp_path))
        assert found["rewards"] == whole
        again = server.names[at + 4 :]
        # The empty answer stands under ten different prompts: forty questions in all.
        assert len(again) == len(set(again)) == 40 - at
        assert not set(again) & arrived
        # What was on its way is asked under the name that it had, and reported.
        assert lost <= set(again)
        account = account_of(tmp_path)
        server.wait_for(lambda: server.active == 0)
        # To the token: a server that knows the name of a repeated request bills it once.
        assert account.answers == 40
        assert (account.spent.tokens_in, account.spent.tokens_out) == server.billed_once

        before = len(server.log)
        assert ended(child(server.url, tmp_path)) == found
        assert len(server.log) == before


@pytest.mark.slow
def test_two_processes_repeat_only_requests_in_flight(tmp_path: Path) -> None:
    with JudgeServer() as server:
        # From both ends, and held until both have started: they ask at the same time, and meet.
        server.holds = lambda number: number < 8
        both = [child(server.url, tmp_path), child(server.url, tmp_path, backwards=True)]
        server.wait_for(lambda: server.active == 8)
        server.let_go.set()
        one, other = (ended(process) for process in both)
        assert one["rewards"] == other["rewards"] == [n / 10 for _ in range(10) for n in range(4)]
        assert one["metrics"] == other["metrics"]
        # They repeat no stored answer: at most what both had on their way when they met.
        assert len(set(server.names)) == 40
        assert len(server.names) <= 40 + 2 * 4
        assert account_of(tmp_path).spent.tokens == sum(server.billed)


# ---------------------------------------------------------------- the end


def test_closing_keeps_what_was_sent_when_another_reward_failed(tmp_path: Path) -> None:
    with JudgeServer() as server:
        server.holds = lambda number: True

        def broken(*, completions: list[str]) -> list[float]:
            server.wait_for(lambda: server.active == 8)
            raise ValueError("boom")

        source = RewardSource(function="judge", options={"model": "m", "url": server.url})
        judging = load_reward(source, RewardContext(folder=tmp_path))
        assert isinstance(judging.function, Judge)
        scorer = Scorer([named(broken), judging])
        with pytest.raises(KeelError, match="boom"):
            scorer([group(["a" * n for n in range(20)])], 1)
        # The server holds what was sent; closing waits until it is let go.
        closing = threading.Thread(target=scorer.close)
        closing.start()
        while closing.is_alive() and not judging.function.asker._closing:
            closing.join(0.01)
        closing.join(0.3)
        assert closing.is_alive()
        server.let_go.set()
        closing.join()
        assert len(server.log) == 8  # the other twelve were not sent
        assert account_of(tmp_path).answers == 8
        scorer.close()  # once more does nothing


# ---------------------------------------------------------------- the cache


def test_equal_answers_are_asked_once(tmp_path: Path) -> None:
    with JudgeServer() as server:
        found = scored(server.url, tmp_path, [group(["aa", "aa", "b", "aa"])], **SCALE)
        assert flat(found) == [0.2, 0.2, 0.1, 0.2]
        assert len(server.log) == 2
        assert found.metrics["judge/asked"] == 2
        assert found.metrics["judge/tokens"] == sum(server.billed)


def test_key_holds_what_the_answer_depends_on(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {"model": "judge-2"},
        {"rubric": "is it short"},
        {"temperature": 0.5},
        {"max_tokens": 99},
        {"seed": 1},
        {"extra": {"top_p": 0.9}},
        {"structured": "json_object"},
        {"high": 9},
        {"limit_name": "max_completion_tokens"},
        {"without": ["seed"]},
    ]
    alike = [{"concurrency": 2}, {"retries": 1}, {"attempts": 3}, {"price_in": 1.0}]
    with JudgeServer() as server:
        for options in ({}, *others, *alike, *others):
            scored(server.url, tmp_path, [group(["a"])], **{**SCALE, **options})
        assert len(server.log) == len(set(server.names)) == 1 + len(others)


def test_cache_may_be_anywhere(tmp_path: Path) -> None:
    with JudgeServer() as server:
        for _ in range(2):
            scored(server.url, None, [group(["a"])], **SCALE)
        assert len(server.log) == 2
        for _ in range(2):
            path = tmp_path / "far" / "paid.db"
            scored(server.url, None, [group(["a"])], cache=str(path), **SCALE)
        assert len(server.log) == 3
        assert path.exists()


def test_cache_of_a_recipe_is_relative_to_its_file(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'extends = "tiny"\n[[rewards.functions]]\nfunction = "judge"\n'
        'options = { model = "m", url = "http://127.0.0.1:9/v1", cache = "paid.db" }\n'
    )
    (source,) = load_recipe(recipe).stages[0].sampling.rewards.functions  # type: ignore[union-attr]
    assert source.options["cache"] == str(tmp_path / "paid.db")


# ---------------------------------------------------------------- how many at a time


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_bounds_the_requests_at_a_time(concurrency: int) -> None:
    with JudgeServer() as server:
        server.holds = lambda number: number < concurrency
        answers = [group(["a" * n for n in range(10)])]
        done: list[Any] = []
        thread = threading.Thread(
            target=lambda: done.append(
                scored(server.url, None, answers, concurrency=concurrency, **SCALE)
            )
        )
        thread.start()
        server.wait_for(lambda: server.active == concurrency)
        server.let_go.set()
        thread.join()
        assert flat(done[0]) == [n / 10 for n in range(10)]
        assert server.peak == concurrency


# ---------------------------------------------------------------- the budget


def test_the_budget_is_hard(tmp_path: Path) -> None:
    """The server has not been owed more than the budget; and it is used."""
    prices = {"price_in": 2.0, "price_out": 8.0, "max_tokens": 60}
    with JudgeServer() as server:
        groups = [group(["a" * n for n in range(10)], at) for at in range(8)]
        with pytest.raises(
            KeelError, match=r"budget = 0.02 dollars is used up: \$0.0\d+ \(\d+ tok"
        ):
            scored(server.url, tmp_path, groups, budget=0.02, **prices, **SCALE)
        tokens_in, tokens_out = server.billed
        owed = (tokens_in * 2.0 + tokens_out * 8.0) / 1e6
        assert 0.01 < owed <= 0.02
        assert account_of(tmp_path).spent.dollars == pytest.approx(owed, rel=1e-12)
        asked = len(server.log)
        # Restarted, it is remembered: what is kept is free, and nothing more is asked.
        with pytest.raises(KeelError, match="is used up"):
            scored(server.url, tmp_path, groups, budget=0.02, **prices, **SCALE)
        assert len(server.log) == asked
        found = scored(server.url, tmp_path, groups, budget=5.0, **prices, **SCALE)
        assert None not in flat(found)


def test_budget_waits_for_requests_in_progress() -> None:
    """Worst cases of requests under way are waited for, not refused."""
    with JudgeServer() as server:
        keys = {"max_tokens": 1000, "concurrency": 8, **SCALE}
        answers = ["a" * n for n in range(8)]
        call_once = made(server.url, **keys)
        call(call_once, answers)
        spent = call_once.asker.store.account().spent.tokens
        call_once.close()
        body = server.log[0].body
        one = JudgeOptions(model="m", max_tokens=1000).worst(body).tokens
        assert 8 * one > spent + one + 64  # or there would be nothing to wait for
        reward = made(server.url, budget_tokens=spent + one + 64, **keys)
        assert call(reward, answers) == [n / 10 for n in range(8)]
        reward.close()


def test_the_budget_in_tokens(tmp_path: Path) -> None:
    with JudgeServer() as server:
        words = r"budget_tokens = 50 is used up: \$0 \(0 tokens\) spent, .* may need .*: raise"
        with pytest.raises(KeelError, match=words):
            scored(server.url, tmp_path, [group(["a"])], budget_tokens=50, **SCALE)
        assert server.log == []


def test_worst_case_bounds_the_tokens() -> None:
    """A token a byte, the schema with it, and the frame of the chat template."""
    body = {"messages": [{"role": "user", "content": "žluťoučký"}], "response_format": None}
    options = JudgeOptions(model="m", max_tokens=10, price_in=1.0, price_out=2.0)
    worst = options.worst(body)
    assert worst.tokens_in >= len("žluťoučký".encode()) + 64
    assert worst.tokens_out == 10
    assert worst.dollars == pytest.approx((worst.tokens_in + 20) / 1e6)
    shaped = {**body, "response_format": {"type": "json_object"}}
    assert options.worst(shaped).tokens_in > worst.tokens_in


def test_first_of_two_answers_stays_and_both_count(tmp_path: Path) -> None:
    one, other = JudgeStore(tmp_path / "a.db"), JudgeStore(tmp_path / "a.db")
    cost = Cost(7, 3, 0.25)
    one.add("k", "m", StoredAnswer("one", "stop", "", cost))
    other.add("k", "m", StoredAnswer("other", "stop", "", cost))
    assert one.find("k") == other.find("k") == StoredAnswer("one", "stop", "", cost)
    assert one.account() == Account(1, Cost(14, 6, 0.5))
    one.close()
    other.close()
