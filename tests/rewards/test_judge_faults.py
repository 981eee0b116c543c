from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.rewards.judge_questions import Cost, StoredAnswer, parse, score_question
from keel.types import KeelError
from tests.rewards.judge_made import REPLIES, account_of, group, made, scored
from tests.rewards.judge_server import Asked, Fault, JudgeServer
from tests.rewards.made import flat

pytestmark = pytest.mark.slow

FIVE = {"low": 0, "high": 10}
REPEATED = {
    "cut off in the middle": Fault(cut=True),
    "hung up": Fault(drop=True),
    "no JSON": Fault(body='{"choices": ['),
    "another shape": Fault(body='{"choices": []}'),
    "no message": Fault(body='{"choices": [{"index": 0}]}'),
    "too many": Fault(status=429),
    "overloaded": Fault(status=529),
}
SILENT = {**REPLIES["silent"], "deep": "[" * 100_000}
"""Replies without a verdict."""


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as running:
        yield running


@pytest.mark.quick("no message", "overloaded")
@pytest.mark.parametrize("fault", REPEATED.values(), ids=REPEATED)
def test_request_without_an_answer_is_repeated(
    server: JudgeServer, fault: Fault, tmp_path: Path
) -> None:
    server.faults = [None, fault]
    found = scored(server.url, tmp_path, [group(["a", "bb"])], concurrency=1, **FIVE)
    assert flat(found) == [0.1, 0.2]
    assert len(server.log) == 3
    assert server.names[1] == server.names[2]  # a server may know it and not bill it twice
    account = account_of(tmp_path)
    assert account.answers == 2
    answered = [server.log[0].billed, server.log[2].billed]
    assert account.spent.tokens == sum(map(sum, answered))


def test_a_server_that_is_slow_is_asked_again(tmp_path: Path) -> None:
    with JudgeServer(faults=[Fault(slow=True)]) as server:
        found = scored(server.url, tmp_path, [group(["aaaa"])], timeout=1.0, **FIVE)
        assert flat(found) == [0.4]
        # It may be at work still: the same name, so that it need not bill twice. (More than two
        # if this machine is slow too.)
        assert len(server.log) >= 2
        assert len(set(server.names)) == 1


def test_missing_server_ends_in_one_line(tmp_path: Path) -> None:
    with JudgeServer() as gone:
        url = gone.url
    with pytest.raises(KeelError, match=r"'judge-1' at http://.*Connection error: check the serv"):
        scored(url, tmp_path, [group(["a"])], retries=0)


def test_retries_end_and_name_what_came_last(server: JudgeServer) -> None:
    server.fault_of = lambda asked: Fault(status=500, error={"message": "out of\nmemory"})
    with pytest.raises(KeelError, match=r"Error code: 500 .*memory.*raise retries$") as caught:
        scored(server.url, None, [group(["a"])], retries=2)
    assert "\n" not in str(caught.value)
    assert len(server.log) == 3
    server.fault_of = lambda asked: Fault(body="<html>")
    with pytest.raises(KeelError, match=r"a malformed answer .*: check the server"):
        scored(server.url, None, [group(["b"])], retries=0)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (400, None, "check the options model, max_tokens, extra and without"),
        (401, None, "set api_key_env"),
        (404, "model_not_found", "check the options url and model"),
    ],
)
def test_errors_that_repeating_cannot_fix_end_at_once(
    server: JudgeServer, status: int, code: str | None, words: str
) -> None:
    server.fault_of = lambda asked: Fault(status=status, error={"message": "no", "code": code})
    with pytest.raises(KeelError, match=rf"at http.*Error code: {status} .*'no'.*: {words}"):
        scored(server.url, None, [group(["a"])])
    assert len(server.log) == 1


@pytest.mark.parametrize("text", SILENT.values(), ids=SILENT)
def test_reply_without_a_verdict_says_why(text: str) -> None:
    parsed = parse(StoredAnswer(text, "stop", "", Cost()), score_question("q", "a", low=0))
    assert parsed.value is None
    assert parsed.wrong


@pytest.mark.parametrize("text", REPLIES["verdicts"].values(), ids=REPLIES["verdicts"])
def test_verdict_is_read_whatever_is_around_it(text: str) -> None:
    parsed = parse(StoredAnswer(text, "stop", "", Cost()), score_question("q", "a", low=0))
    assert (parsed.value, parsed.wrong) == (7, "")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(text="prose"),
        Fault(text='{"score": 7}', choice={"finish_reason": "length"}),
        Fault(message={"content": None}),
        Fault(message={"content": [{"type": "text", "text": '{"score": 7}'}]}),
    ],
    ids=["prose", "cut off", "nothing", "parts"],
)
def test_reply_without_a_verdict_is_not_paid_twice(
    server: JudgeServer, fault: Fault, tmp_path: Path
) -> None:
    server.fault_of = lambda asked: fault if asked.material["answer"] == "bb" else None
    found = scored(server.url, tmp_path, [group(["a", "bb"])], **FIVE)
    assert flat(found) == [0.1, None]
    assert found.metrics["judge/unparsed"] == 0.5
    assert found.extras["judge_unparsed"][0] == ""
    assert found.extras["judge_unparsed"][1] != ""
    assert found.metrics["judge/asked"] == 3  # the second sample of bb is counted
    assert found.metrics["judge/tokens"] == sum(server.billed)
    assert flat(scored(server.url, tmp_path, [group(["a", "bb"])], **FIVE)) == [0.1, None]
    assert len(server.log) == 3


def test_second_sample_may_hold_a_verdict(server: JudgeServer) -> None:
    server.faults = [Fault(text="hm"), Fault(text='```json\n{"score": 7.0}\n```')]
    found = scored(server.url, None, [group(["a"])], attempts=3, seed=5, **FIVE)
    assert flat(found) == [0.7]
    assert [asked.body["seed"] for asked in server.log] == [5, 6]
    assert found.metrics["judge/unparsed"] == 0.0


def test_halves_of_characters_are_kept_as_question_marks(
    server: JudgeServer, tmp_path: Path
) -> None:
    half = "x\ud83d"
    server.faults = [
        Fault(text=json.dumps({"reason": half, "score": 3}, ensure_ascii=False)),
        Fault(message={"content": None, "refusal": half}),
        Fault(choice={"finish_reason": half}),
    ]
    found = scored(server.url, tmp_path, [group(["a", "bb", "ccc"])], concurrency=1, **FIVE)
    assert flat(found) == [0.3, None, 0.3]
    assert found.extras["judge_reason"][0] == "x?"
    assert found.extras["judge_unparsed"][1] == "refused: x?"
    assert account_of(tmp_path).answers == 3


@pytest.mark.parametrize(
    "fault",
    [
        Fault(message={"content": None, "refusal": "I will not."}),
        Fault(choice={"finish_reason": "content_filter"}),
        Fault(status=400, error={"message": "filtered", "code": "content_filter"}),
        Fault(status=400, error={"message": "long", "code": "context_length_exceeded"}),
    ],
)
def test_refusals_are_no_verdict_and_are_not_asked_again(
    server: JudgeServer, fault: Fault, tmp_path: Path
) -> None:
    server.fault_of = lambda asked: fault if asked.material["answer"] == "bb" else None
    for _ in range(2):
        found = scored(server.url, tmp_path, [group(["a", "bb"])], attempts=5, **FIVE)
        assert flat(found) == [0.1, None]
        assert found.extras["judge_unparsed"][1].startswith("refused: ")
    assert len(server.log) == 2


@pytest.mark.parametrize("words", REPLIES["too_long"])
def test_too_long_a_prompt_is_known_by_its_words(
    server: JudgeServer, words: str, tmp_path: Path
) -> None:
    error = {"message": words, "type": "BadRequestError", "param": None, "code": 400}
    fault = Fault(status=400, error=error)
    server.fault_of = lambda asked: fault if asked.material["answer"] == "bb" else None
    found = scored(server.url, tmp_path, [group(["a", "bb"])], **FIVE)
    assert flat(found) == [0.1, None]
    assert found.extras["judge_unparsed"][1] == "refused: context_length_exceeded"
    assert len(server.log) == 2


def test_too_high_a_limit_ends_the_run(server: JudgeServer) -> None:
    words = "'max_tokens' is too large: 8000. This model's maximum context length is 4096 tokens"
    server.fault_of = lambda asked: Fault(status=400, error={"message": words})
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(KeelError, match="check the options model, max_tokens"):
            scored(server.url, None, [group(["a"])], max_tokens=4096, limit_name=name)


def test_servers_that_know_no_schema_are_asked_in_words(
    server: JudgeServer, tmp_path: Path
) -> None:
    def plain(asked: Asked) -> Fault | None:
        if "response_format" not in asked.body:
            return None
        return Fault(status=400, error={"message": "response_format is not supported"})

    server.fault_of = plain
    found = scored(server.url, tmp_path, [group(["a", "bb", "ccc"])], concurrency=1, **FIVE)
    assert flat(found) == [0.1, 0.2, 0.3]
    assert ["response_format" in a.body for a in server.log] == [True, False, False, False]
    scored(server.url, tmp_path, [group(["a", "bb", "ccc"])], **FIVE)
    assert len(server.log) == 4  # found, though the server is not asked what it knows


def test_how_json_is_asked_for(server: JudgeServer) -> None:
    keys = {"extra": {"top_p": 0.9}, "without": ["temperature"], "max_tokens": 77, "seed": 3}
    for structured in ("json_schema", "json_object", "text"):
        scored(server.url, None, [group(["a"])], structured=structured, **FIVE, **keys)
    schema, word, nothing = (asked.body.pop("response_format", None) for asked in server.log)
    del server.log[0].body["messages"]
    assert server.log[0].body == {"model": "judge-1", "top_p": 0.9, "max_tokens": 77, "seed": 3}
    inside = schema["json_schema"]["schema"]
    assert schema["type"] == "json_schema"
    assert inside["properties"]["score"] == {"type": "integer", "enum": list(range(11))}
    assert inside["required"] == ["reason", "score"]
    assert word == {"type": "json_object"}
    assert nothing is None


@pytest.mark.parametrize(
    "usage",
    [
        *(None, [1]),
        {"prompt_tokens": "9", "completion_tokens": 1},
        {"prompt_tokens": -1},
    ],
)
def test_without_usage_the_worst_case_is_paid(server: JudgeServer, usage: Any) -> None:
    server.faults = [Fault(usage=usage)]
    found = scored(server.url, None, [group(["a"])], max_tokens=100, **FIVE)
    sent = sum(len(m["content"].encode()) for m in server.log[0].body["messages"])
    assert flat(found) == [0.1]
    assert found.metrics["judge/tokens"] > sent + 100


def test_cancelled_call_keeps_the_replies_in_progress(tmp_path: Path) -> None:
    """The reward is given up, its requests are not: their answers come and are kept."""
    with JudgeServer() as server:
        server.holds = lambda number: True
        reward = made(server.url, tmp_path, concurrency=2, **FIVE)
        five = ["a", "bb", "ccc", "dddd", "eeeee"]

        async def run() -> None:
            asking = asyncio.create_task(reward(prompts=["q"] * 5, completions=five))
            await asyncio.to_thread(server.wait_for, lambda: server.active == 2)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

        asyncio.run(run())
        server.let_go.set()
        reward.close()
        assert len(server.log) == 2  # the other three were not sent
        reward = made(server.url, tmp_path, **FIVE)
        assert account_of(tmp_path).answers == 2
        scores = asyncio.run(reward(prompts=["q"] * 5, completions=five))
        assert scores == [0.1, 0.2, 0.3, 0.4, 0.5]
        assert len(server.log) == 5
        reward.close()


def test_fatal_error_stops_further_requests_and_keeps_replies(tmp_path: Path) -> None:
    """A fatal error comes while another request is on its way: that one's answer is kept."""
    with JudgeServer() as server:
        server.holds = lambda number: number == 0

        def fatal(asked: Asked) -> Fault | None:
            return Fault(status=404) if len(server.log) > 1 else None

        def let_go() -> None:
            server.wait_for(lambda: len(server.log) > 1 and server.active == 1)
            server.let_go.set()

        threading.Thread(target=let_go, daemon=True).start()
        server.fault_of = fatal
        groups = [group(["a" * n for n in range(1, 11)])]
        with pytest.raises(KeelError, match="Error code: 404"):
            scored(server.url, tmp_path, groups, concurrency=2, **FIVE)
        assert account_of(tmp_path).answers == 1
        assert len(server.log) <= 2 + 2  # at most one more for each of the two slots


# ---------------------------------------------------------------- the key


def test_a_key_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(KeelError, match="NO_SUCH_KEY holds no API key: set it"):
        made("http://127.0.0.1:9/v1", api_key_env="NO_SUCH_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(KeelError, match="OPENAI_API_KEY holds no API key"):
        made(None)


def test_key_in_place_of_its_name_is_not_repeated() -> None:
    for slip in ("sk-proj-SECRET123", "SECRET 123", "9SECRET"):
        with pytest.raises(KeelError, match="the NAME of a") as caught:
            made("http://127.0.0.1:9/v1", api_key_env=slip)
        assert "SECRET" not in str(caught.value)


def test_openai_key_is_sent_to_no_other_server(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, "sk-theirs")
    scored(server.url, None, [group(["a"])], **FIVE)
    assert "theirs" not in str(server.log[0].headers)
    assert "authorization" not in server.log[0].headers


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://", ""])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(KeelError, match="is not a valid address: write http://HOST"):
        made(url)
