from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.rewards.judge.client import Client, _retry_after
from keel.types import KeelError
from tests.rewards.judge_made import account_of, call, group, made, rewards, scored
from tests.rewards.judge_server import Asked, Fault, JudgeServer

FIVE = {"low": 0, "high": 10}
BILLED_AND_LOST = {
    "cut off in the middle": Fault(cut=True),
    "hung up": Fault(drop=True),
    "no JSON": Fault(body='{"choices": ['),
    "an empty body": Fault(body=""),
    "another shape": Fault(body='{"choices": []}'),
    "a list": Fault(body="[1, 2]"),
    "no message": Fault(body='{"choices": [{"index": 0}]}'),
    "an error in a good answer": Fault(body='{"error": {"message": "overloaded"}}'),
    "a gateway that gave up": Fault(status=504),
    "another gateway": Fault(status=502),
    "a request timeout": Fault(status=408),
}
FREE = {
    "too many": Fault(status=429),
    "too many, with a wait": Fault(status=429, headers={"Retry-After": "0"}),
    "a conflict": Fault(status=409),
    "broken": Fault(status=500),
    "unavailable": Fault(status=503),
    "overloaded": Fault(status=529),
}
SILENT = {
    "prose": Fault(text="I like it."),
    "a word": Fault(text='"7"'),
    "another type": Fault(text='{"score": "7"}'),
    "a truth value": Fault(text='{"score": true}'),
    "off the scale": Fault(text='{"score": 11}'),
    "between": Fault(text='{"score": 7.5}'),
    "none": Fault(text='{"score": null}'),
    "another key": Fault(text='{"verdict": 7}'),
    "two at once": Fault(text='{"score": 7, "score": 3}'),
    "two objects": Fault(text='{"score": 7} {"score": 3}'),
    "not a number": Fault(text='{"score": NaN}'),
    "cut off by the limit": Fault(text='{"score": 7}', choice={"finish_reason": "length"}),
    "nothing": Fault(message={"content": None}),
    "parts": Fault(message={"content": [{"type": "text", "text": '{"score": 7}'}]}),
    "deep": Fault(text="[" * 100_000),
}


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as running:
        yield running


@pytest.mark.quick("a gateway that gave up", "no message", "a list")
@pytest.mark.parametrize("fault", BILLED_AND_LOST.values(), ids=BILLED_AND_LOST)
def test_what_may_have_been_billed_is_counted_and_asked_again(
    server: JudgeServer, fault: Fault, tmp_path: Path
) -> None:
    server.faults = [None, fault, fault]
    found = scored(server.url, tmp_path, [group(["a", "bb", "ccc"])], concurrency=1, **FIVE)
    assert rewards(found) == [0.1, 0.2, 0.3]
    assert len(server.log) == 5
    account = account_of(tmp_path)
    assert (account.answers, account.lost) == (3, 2)
    assert account.lost_cost.tokens > 0
    total = account.spent + account.lost_cost
    assert total.tokens_in >= server.billed[0]
    assert total.tokens_out >= server.billed[1]


@pytest.mark.parametrize("fault", FREE.values(), ids=FREE)
def test_what_was_not_billed_costs_nothing(
    server: JudgeServer, fault: Fault, tmp_path: Path
) -> None:
    server.faults = [fault, None, fault, fault]
    found = scored(server.url, tmp_path, [group(["a", "bb"])], concurrency=1, **FIVE)
    assert rewards(found) == [0.1, 0.2]
    assert len(server.log) == 5
    account = account_of(tmp_path)
    assert (account.answers, account.lost) == (2, 0)
    assert (account.spent.tokens_in, account.spent.tokens_out) == server.billed


def test_a_server_that_is_slow_is_given_up_and_asked_again(tmp_path: Path) -> None:
    with JudgeServer(faults=[Fault(slow=True)]) as server:
        found = scored(server.url, tmp_path, [group(["aaaa"])], timeout=1.0, **FIVE)
        assert rewards(found) == [0.4]
        # It may be at work still: the same name, so that it need not bill twice. (More than two
        # where this machine is slow too.)
        assert len(server.log) >= 2
        assert len(set(server.names)) == 1
        assert account_of(tmp_path).lost == len(server.log) - 1


def test_requests_without_an_answer_keep_their_name_and_useless_answers_change_it(
    server: JudgeServer,
) -> None:
    server.faults = [Fault(drop=True), Fault(status=500), Fault(body="{"), Fault(cut=True)]
    reward = made(server.url, **FIVE)
    assert call(reward, ["aa"]) == [0.2]
    reward.close()
    first, *others = server.names
    key = first.removesuffix("-0")
    assert len(key) == 64
    assert others == [f"{key}-0", f"{key}-0", f"{key}-1", f"{key}-1"]


def test_a_server_that_is_not_there_ends_in_one_line(tmp_path: Path) -> None:
    with JudgeServer() as gone:
        url = gone.url
    with pytest.raises(KeelError, match=r"gave no answer in 3 attempts, last the connection"):
        scored(url, tmp_path, [group(["a"])], retries=2)
    reward = made(url, tmp_path)
    assert reward.account().lost == 0  # nothing was asked
    reward.close()


def test_retries_end_and_name_what_came_last(server: JudgeServer) -> None:
    server.fault_of = lambda asked: Fault(status=500, error={"message": "out of\nmemory"})
    with pytest.raises(KeelError) as caught:
        scored(server.url, None, [group(["a"])], retries=2)
    assert "in 3 attempts, last HTTP 500: out of memory: " in str(caught.value)
    assert "raise retries" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(server.log) == 3


def test_on_error_skip_leaves_the_completions_without_a_reward(server: JudgeServer) -> None:
    server.fault_of = lambda asked: Fault(status=503)
    found = scored(server.url, None, [group(["a", "b"])], retries=0, on_error="skip")
    assert rewards(found) == [None, None]
    assert found.failures == {"judge": 2}


def test_waits_grow_and_are_the_same_each_time(server: JudgeServer) -> None:
    server.fault_of = lambda asked: Fault(status=500)
    seen: list[list[float]] = []
    for _ in range(2):
        reward = made(server.url, backoff=2.0, retries=5)
        waits: list[float] = []

        async def sleep(seconds: float, into: list[float] = waits) -> None:
            into.append(seconds)

        reward.asker.sleep = sleep
        with pytest.raises(KeelError):
            call(reward, ["a"])
        reward.close()
        seen.append(waits)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 5
    for wait, whole in zip(seen[0], (2, 4, 8, 16, 32), strict=True):
        assert whole / 2 <= wait < whole
    assert len({wait / whole for wait, whole in zip(seen[0], (2, 4, 8, 16, 32), strict=True)}) == 5


def test_retry_after_is_waited_for(server: JudgeServer) -> None:
    server.faults = [Fault(status=429, headers={"Retry-After": "7"})]
    reward = made(server.url, backoff=0.5)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    reward.asker.sleep = sleep
    call(reward, ["a"])
    reward.close()
    assert len(waits) == 1
    assert 7.0 <= waits[0] < 7.25


def test_waits_as_dates_and_as_nonsense() -> None:
    assert _retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert _retry_after({"retry-after": "Wed, 21 Oct 2115 07:28:00 GMT"}) > 1e9
    assert _retry_after({"retry-after": "soon"}) == 0.0
    assert _retry_after({"retry-after": "Mon, 01 Jan 0001 00:00:00 -0000"}) == 0.0
    assert _retry_after({"retry-after": "nan"}) == 0.0
    assert _retry_after({"retry-after": "-3"}) == 0.0
    assert _retry_after({}) == 0.0


def test_a_server_that_wants_rest_for_an_hour_ends_the_run(server: JudgeServer) -> None:
    server.faults = [Fault(status=429, headers={"Retry-After": "3600"})]
    with pytest.raises(KeelError, match="asks to wait 3600 s"):
        scored(server.url, None, [group(["a"])])
    assert len(server.log) == 1


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (
            400,
            None,
            r"refuses the request \(HTTP 400: no\): check the options model, max_tokens, extra",
        ),
        (401, None, r"HTTP 401: no\): set api_key_env"),
        (403, None, r"HTTP 403: no\): set api_key_env"),
        (301, None, r"HTTP 301: no\): check the options url and model"),
        (404, "model_not_found", r"HTTP 404: no\): check the options url and model"),
        (422, None, r"HTTP 422: no\): check"),
        (429, "insufficient_quota", r"has no money left \(HTTP 429: no\)"),
    ],
)
def test_errors_that_repeating_cannot_fix_end_at_once(
    server: JudgeServer, status: int, code: str | None, words: str, tmp_path: Path
) -> None:
    server.fault_of = lambda asked: Fault(status=status, error={"message": "no", "code": code})
    with pytest.raises(KeelError, match=words):
        scored(server.url, tmp_path, [group(["a"])])
    assert len(server.log) == 1
    assert account_of(tmp_path).lost == 0


@pytest.mark.quick("off the scale", "prose", "nothing")
@pytest.mark.parametrize("fault", SILENT.values(), ids=SILENT)
def test_reply_without_a_verdict_is_none_and_is_not_paid_twice(
    server: JudgeServer, fault: Fault, tmp_path: Path
) -> None:
    server.fault_of = lambda asked: fault if asked.material["answer"] == "bb" else None
    found = scored(server.url, tmp_path, [group(["a", "bb"])], **FIVE)
    assert rewards(found) == [0.1, None]
    assert found.metrics["judge/unparsed"] == 0.5
    assert found.extras["judge_unparsed"][0] == ""
    assert found.extras["judge_unparsed"][1] != ""
    assert found.metrics["judge/asked"] == 3  # the second draw of bb is counted
    assert found.metrics["judge/tokens"] == sum(server.billed)
    again = scored(server.url, tmp_path, [group(["a", "bb"])], **FIVE)
    assert rewards(again) == [0.1, None]
    assert len(server.log) == 3  # nothing is paid for twice


def test_second_sample_may_hold_a_verdict(server: JudgeServer) -> None:
    server.faults = [Fault(text="hm"), Fault(text='```json\n{"score": 7.0}\n```')]
    found = scored(server.url, None, [group(["a"])], attempts=3, seed=5, **FIVE)
    assert rewards(found) == [0.7]
    assert [asked.body["seed"] for asked in server.log] == [5, 6]
    assert found.metrics["judge/unparsed"] == 0.0


def test_thoughts_before_the_answer_are_passed_over(server: JudgeServer) -> None:
    server.faults = [Fault(text='<think>{"score": 1}</think>\n{"score": 9}')]
    assert rewards(scored(server.url, None, [group(["a"])], **FIVE)) == [0.9]


@pytest.mark.parametrize("frame", ["{}", "```json\n{}\n```", "<think>hm {{</think>\n{}"])
def test_a_reason_may_hold_the_mark_of_thoughts(server: JudgeServer, frame: str) -> None:
    reason = "no mark here" if "think" in frame else "it ends on </think>, badly"
    reported = json.dumps({"reason": reason, "score": 3})
    server.faults = [Fault(text=frame.format(reported))]
    found = scored(server.url, None, [group(["a"])], attempts=1, **FIVE)
    assert rewards(found) == [0.3]
    assert found.extras["judge_reason"] == [reason]


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
    assert rewards(found) == [0.3, None, 0.3]
    assert found.extras["judge_reason"][0] == "x?"
    assert found.extras["judge_unparsed"][1] == "refused: x?"
    account = account_of(tmp_path)
    assert (account.answers, account.lost) == (3, 0)


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
        assert rewards(found) == [0.1, None]
        assert found.extras["judge_unparsed"][1].startswith("refused: ")
    assert len(server.log) == 2


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens",
        "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
        "the request exceeds the available context size, try increasing it",
        "Requested tokens (2285) exceed context window of 2048",
        "prompt is too long: 208310 tokens > 200000 maximum",
        "'max_tokens' is too large: 512. This model's maximum context length is 8192 tokens and "
        "your request has 8000 input tokens",
    ],
)
def test_too_long_a_prompt_is_known_by_its_words(
    server: JudgeServer, words: str, tmp_path: Path
) -> None:
    error = {"message": words, "type": "BadRequestError", "param": None, "code": 400}
    fault = Fault(status=400, error=error)
    server.fault_of = lambda asked: fault if asked.material["answer"] == "bb" else None
    found = scored(server.url, tmp_path, [group(["a", "bb"])], **FIVE)
    assert rewards(found) == [0.1, None]
    assert found.extras["judge_unparsed"][1] == "refused: context_length_exceeded"
    assert len(server.log) == 2


def test_too_high_a_limit_is_no_matter_of_one_text(server: JudgeServer) -> None:
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
    assert rewards(found) == [0.1, 0.2, 0.3]
    assert ["response_format" in a.body for a in server.log] == [True, False, False, False]
    scored(server.url, tmp_path, [group(["a", "bb", "ccc"])], **FIVE)
    assert len(server.log) == 4  # found, though the server is not asked what it knows


def test_how_json_is_asked_for(server: JudgeServer) -> None:
    for structured in ("json_schema", "json_object", "text"):
        scored(server.url, None, [group(["a"])], structured=structured, **FIVE)
    schema, word, nothing = (asked.body.get("response_format") for asked in server.log)
    inside = schema["json_schema"]["schema"]
    assert schema["type"] == "json_schema"
    assert inside["properties"]["score"] == {"type": "integer", "enum": list(range(11))}
    assert inside["required"] == ["reason", "score"]
    assert word == {"type": "json_object"}
    assert nothing is None


@pytest.mark.parametrize(
    "usage",
    [
        *(None, {}, [1]),
        {"prompt_tokens": "9", "completion_tokens": 1},
        {"prompt_tokens": -1},
    ],
)
def test_without_usage_the_worst_case_is_paid(server: JudgeServer, usage: Any) -> None:
    server.faults = [Fault(usage=usage)]
    found = scored(server.url, None, [group(["a"])], max_tokens=100, **FIVE)
    sent = sum(len(m["content"].encode()) for m in server.log[0].body["messages"])
    assert rewards(found) == [0.1]
    assert found.metrics["judge/tokens"] > sent + 100


def test_a_call_that_runs_out_of_time_keeps_what_was_on_its_way(tmp_path: Path) -> None:
    """The reward is given up, its requests are not: their answers come and are kept."""
    with JudgeServer() as server:
        server.holds = lambda number: True
        reward = made(server.url, tmp_path, concurrency=2, **FIVE)

        async def run() -> None:
            asking = asyncio.create_task(
                reward(prompts=["q"] * 5, completions=["a", "bb", "ccc", "dddd", "eeeee"])
            )
            await asyncio.to_thread(server.wait_for, lambda: server.active == 2)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

        asyncio.run(run())
        server.let_go.set()
        reward.close()
        assert len(server.log) == 2  # the other three were not sent
        reward = made(server.url, tmp_path, **FIVE)
        assert (reward.account().answers, reward.account().lost) == (2, 0)
        assert call(reward, ["a", "bb", "ccc", "dddd", "eeeee"]) == [0.1, 0.2, 0.3, 0.4, 0.5]
        assert len(server.log) == 5
        reward.close()


def test_request_of_a_cancelled_call_keeps_its_slot(tmp_path: Path) -> None:
    """The limit is on what the server sees, whoever asked."""
    with JudgeServer() as server:
        server.holds = lambda number: number == 0
        reward = made(server.url, tmp_path, concurrency=1, **FIVE)

        async def run() -> list[float | None]:
            first = asyncio.create_task(reward(prompts=["q"], completions=["a"]))
            await asyncio.to_thread(server.wait_for, lambda: server.active == 1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            second = asyncio.create_task(reward(prompts=["q"], completions=["bb"]))
            # Long enough to be sent, were it let; where it is not, time does not matter.
            await asyncio.wait([second], timeout=0.5)
            server.let_go.set()
            return await second

        assert asyncio.run(run()) == [0.2]
        assert server.peak == 1
        assert reward.account().answers == 2
        reward.close()


def test_fatal_error_stops_further_requests_and_keeps_replies(tmp_path: Path) -> None:
    """A fatal error comes while another request is on its way: that one's answer is kept."""
    with JudgeServer() as server:
        server.holds = lambda number: number == 0

        def fatal(asked: Asked) -> Fault | None:
            return Fault(status=404) if len(server.log) > 1 else None

        def let_go_after(number: int) -> None:
            server.wait_for(lambda: len(server.log) > 1 and server.active == 1)
            server.let_go.set()

        threading.Thread(target=let_go_after, args=(1,), daemon=True).start()
        server.fault_of = fatal
        groups = [group(["a" * n for n in range(1, 11)])]
        with pytest.raises(KeelError, match="HTTP 404"):
            scored(server.url, tmp_path, groups, concurrency=2, **FIVE)
        account = account_of(tmp_path)
        assert (account.answers, account.lost) == (1, 0)
        assert len(server.log) <= 2 + 2  # at most one more for each of the two slots


# ---------------------------------------------------------------- the key


def test_the_key_is_sent_and_stands_nowhere(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("DEBUG")
    key = "sk-very-secret-1234567890"
    monkeypatch.setenv("MY_KEY", key)

    def tell(asked: Asked) -> str:
        return json.dumps({"reason": f"you sent {asked.headers['authorization']}", "score": 3})

    server.verdict = tell
    found = scored(server.url, tmp_path, [group(["a"])], api_key_env="MY_KEY", **FIVE)
    assert server.log[0].headers["authorization"] == f"Bearer {key}"
    assert found.extras["judge_reason"] == ["you sent Bearer [key]"]
    words = {"message": f"wrong key {key}"}
    server.faults = [Fault(status=401, error=words)]
    with pytest.raises(KeelError, match=r"wrong key \[key\]\): check the key in MY_KEY") as caught:
        scored(server.url, tmp_path, [group(["b"])], api_key_env="MY_KEY", **FIVE)
    assert key not in repr(caught.value)
    assert key not in caplog.text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert key.encode() not in path.read_bytes()


def test_a_key_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(KeelError, match="NO_SUCH_KEY holds no API key: set it"):
        made("http://127.0.0.1:9/v1", api_key_env="NO_SUCH_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(KeelError, match="OPENAI_API_KEY holds no API key"):
        Client(None, None, 1.0)


def test_key_in_place_of_its_variables_name_is_not_repeated() -> None:
    for slip in ("sk-proj-SECRET123", "SECRET 123", "9SECRET"):
        with pytest.raises(KeelError, match="the NAME of a") as caught:
            made("http://127.0.0.1:9/v1", api_key_env=slip)
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-1\nsk-SECRET", "sk-SECRET…"])
def test_a_key_that_no_header_can_carry(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(KeelError, match="MY_KEY holds characters that no header") as caught:
        made("http://127.0.0.1:9/v1", api_key_env="MY_KEY")
    assert "SECRET" not in str(caught.value)


def test_a_key_that_is_a_word_of_the_answer_leaves_it_whole(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "score")
    assert rewards(scored(server.url, None, [group(["a"])], api_key_env="MY_KEY", **FIVE)) == [0.1]
    monkeypatch.setenv("MY_KEY", "finish_reason")  # a key of the envelope, not of the answer
    found = scored(server.url, None, [group(["bb"])], api_key_env="MY_KEY", **FIVE)
    assert rewards(found) == [0.2]


def test_malformed_replies_do_not_show_the_key(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "12345678")  # the shortest that is cut out
    for body in ("{12345678", '{"12345678": 1}'):
        server.faults = [Fault(body=body)]
        with pytest.raises(KeelError, match=r"\[key\]") as caught:
            scored(server.url, None, [group(["a"])], api_key_env="MY_KEY", retries=0)
        assert "1234" not in str(caught.value)
    server.faults = [Fault(message={"content": None, "refusal": "no, 12345678"})]
    found = scored(server.url, None, [group(["a"])], api_key_env="MY_KEY", **FIVE)
    assert found.extras["judge_unparsed"] == ["refused: no, [key]"]


def test_a_key_of_openai_is_sent_to_no_other_server(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-theirs")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-theirs")
    scored(server.url, None, [group(["a"])], **FIVE)
    assert "theirs" not in str(server.log[0].headers)
    assert "authorization" not in server.log[0].headers


def test_invalid_addresses_are_refused() -> None:
    with pytest.raises(KeelError, match="url = 'localhost:8000' is no address"):
        made("localhost:8000")
    for url in ("http://[::1/v1", "http://localhost:port/v1", "ftp://localhost", ""):
        with pytest.raises(KeelError, match="is no address"):
            made(url)
