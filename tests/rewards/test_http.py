"""The reward of a server, against a real one that answers, fails, hangs and answers wrongly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import pytest

from keel.config.sources import RewardSource
from keel.rewards.registry import load_reward
from keel.rewards.scorer import Scored, Scorer
from keel.types import KeelError
from tests.rewards.judge_made import group
from tests.rewards.made import flat


class Server(ThreadingHTTPServer):
    """Does what `script` says of the next requests, and then scores lengths."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = []
        self.requests: list[tuple[dict[str, Any], str | None]] = []
        self.lock, self.gone = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score?v=1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((body, self.headers.get("Authorization")))
            step = self.server.script.pop(0) if self.server.script else None
        if step == "hang":
            self.server.gone.wait(30)
            return
        status, content = step or (200, {"rewards": [float(len(c)) for c in body["completions"]]})
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.gone.set()
        made.shutdown()
        thread.join()


def _score(server: Server, on_error: Literal["stop", "skip"] = "stop", **options: Any) -> Scored:
    source = RewardSource(function="http", options={"url": server.url, **options})
    scorer = Scorer([load_reward(source)], timeout=20.0, on_error=on_error)
    groups = [group(["x", "xyz"], 1, answer=3, level={"n": 1}), group(["xy"], 2, answer=4)]
    with closing(scorer):
        return scorer(groups, 1)


def test_one_request_with_prompts_completions_and_columns(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SCORER", "a-secret-of-mine")
    assert flat(_score(server, api_key_env="MY_SCORER")) == [1.0, 3.0, 2.0]
    assert server.requests == [
        (
            {
                "prompts": ["question 1", "question 1", "question 2"],
                "completions": ["x", "xyz", "xy"],
                "answer": [3, 3, 4],
                "level": [{"n": 1}, {"n": 1}, None],
            },
            "Bearer a-secret-of-mine",
        )
    ]


def test_batches_are_joined_in_order(server: Server) -> None:
    assert flat(_score(server, batch_size=2)) == [1.0, 3.0, 2.0]
    assert sorted(len(body["completions"]) for body, _ in server.requests) == [1, 2]


def test_failed_requests_are_sent_again(server: Server) -> None:
    server.script = [(503, {"detail": "busy"}), "hang"]
    assert flat(_score(server, timeout=0.3)) == [1.0, 3.0, 2.0]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("script", "reason", "requests"),
    [
        ([(500, b"boom\nat line 3")] * 2, r"status 500: 'boom at line 3' \(2 requests\)", 2),
        ([(404, b"no such path")], "status 404: 'no such path': fix the server", 1),
        (["hang"] * 2, r"did not answer within 0.3 s \(2 requests\)", 2),
        ([(200, b"<html>")], r"did not answer \{\"rewards\": \[...\]\} but '<html>'", 1),
        ([(200, {"rewards": [1.0]})], "returned 1 rewards for 3 completions", 1),
        ([(200, {"rewards": [1.0, "high", 2.0]})], "'high'", 1),
        ([(200, {"rewards": [1.0, float("nan"), 2.0]})], "nan", 1),
    ],
)
def test_a_bad_server_stops_the_run_or_is_skipped(
    script: list[Any], reason: str, requests: int, server: Server
) -> None:
    server.script = list(script)
    with pytest.raises(KeelError, match=f"reward 'http' at step 1.*{reason}"):
        _score(server, timeout=0.3, retries=1)
    assert len(server.requests) == requests
    server.script = list(script)
    scored = _score(server, "skip", timeout=0.3, retries=1)
    assert scored.failures["http"] in (1, 3)
    assert None in flat(scored)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "set one of url and url_env"),
        ({"url": "ftp://x"}, "ftp://x is not a valid address"),
        ({"url_env": "NOT_SET_HERE"}, "the environment variable 'NOT_SET_HERE' is not set"),
        ({"url": "http://x", "retires": 1}, "did you mean 'retries'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(KeelError, match=reason):
        load_reward(RewardSource(function="http", options=options))


def test_a_secret_address_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_URL", "http://127.0.0.1:9/hidden-path")
    reward = load_reward(RewardSource(function="http", options={"url_env": "MY_URL", "retries": 0}))
    with closing(Scorer([reward])) as scorer, pytest.raises(KeelError, match=r"\$MY_URL") as error:
        scorer([group(["x"])], 1)
    assert "hidden" not in str(error.value)
