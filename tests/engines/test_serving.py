"""The endpoint of `keel serve`: what it answers, to whom, and what is decoded together."""

from __future__ import annotations

import copy
import http.client
import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar
from unittest.mock import patch

import openai
import pytest

from keel.engines.endpoint.requests import (
    ChatRequest,
    RefusedRequest,
    RequestOptions,
    read_request,
)
from keel.engines.endpoint.responses import stream_events
from keel.engines.endpoint.server import Endpoint
from keel.engines.endpoint.serving import LiveResponse, LiveSequence, RequestBatcher
from keel.engines.endpoint.session import encode_request
from keel.engines.native import NativeEngine
from keel.engines.sampler import EOS as ENDED
from keel.engines.sampler import GOING
from keel.engines.scheduler import PrefixCache
from keel.models.chat import ChatEncoder, encode_prompt
from keel.platform.listen import LOOPBACK
from keel.types import Prompt, Sampling
from tests.engines.spelling import EOS, TEMPLATE, TOKENIZER, TOOLS
from tests.engines.test_compiled import model_of

T = TypeVar("T")
SIZE = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 4096, "eos_token_id": EOS}
ASKED: list[Any] = [[{"role": "user", "content": f"{n} + {n * n}?"}] for n in range(16)]


def engine_of(rows: int = 8) -> NativeEngine:
    return NativeEngine(model_of("llama", **SIZE), TOKENIZER, max_num_seqs=rows)


def serving(
    server: RequestBatcher, client: Callable[[openai.OpenAI], T], key: str = "none", **options: Any
) -> T:
    """What a client does with a server, which runs in this thread until it gets a Ctrl-C."""
    options = {"served": True, "hosts": LOOPBACK, **options}

    def run(url: str) -> T:
        try:
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as own:
                return client(own)
        finally:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with (
        ThreadPoolExecutor(1) as pool,
        Endpoint(server.submit, model="tiny", **options) as endpoint,
    ):
        outcome = pool.submit(run, endpoint.url)
        with pytest.raises(KeyboardInterrupt):
            server.run()
    return outcome.result()


def connected(own: openai.OpenAI) -> Any:
    """A connection to the server of a client."""
    return closing(http.client.HTTPConnection("127.0.0.1", own.base_url.port or 0))


def server_of(engine: NativeEngine, tokens: int = 40) -> RequestBatcher:
    return RequestBatcher(engine, ChatEncoder(TOKENIZER), "tiny", Sampling(tokens))


def text_of(client: openai.OpenAI, messages: Any, stream: bool = False, **keys: Any) -> str:
    """The first choice's text."""
    made: Any = client.chat.completions.create(
        model="tiny", messages=messages, stream=stream, **keys
    )
    if not stream:
        return made.choices[0].message.content or ""
    return "".join(one.choices[0].delta.content or "" for one in made)


def test_answers_are_the_same_alone_streamed_and_together() -> None:
    """Three settings, of which sixteen clients share three rows: calls of the engine are cut many
    times, and what was computed is kept."""
    engine = engine_of(rows=3)
    decode, take = NativeEngine.decode, PrefixCache.take
    made: list[int] = []
    computed: list[int] = []

    def noted(self: NativeEngine, *call: Any, **options: Any) -> Any:
        made[:] = options["made"]
        return decode(self, *call, **options)

    def counted(cache: PrefixCache, prompts: Any) -> Any:
        known, pages = take(cache, prompts)
        left = [len(prompt) - count for prompt, count in zip(prompts, known.tolist(), strict=True)]
        computed.extend(count for count, own in zip(left, made, strict=True) if own)
        return known, pages

    greedy, free = {"temperature": 0}, {"seed": 7, "extra_body": {"top_k": 40, "min_p": 0.01}}
    stops = {"seed": 3, "stop": ["1", "ad", "\n"]}
    settings: list[Any] = [(greedy, free, stops)[n % 3] for n in range(16)]
    prompts = [encode_prompt(Prompt("p", asked), ChatEncoder(TOKENIZER)) for asked in ASKED]
    expected = [
        engine.sample([one], 1, Sampling(40, 0.0), 0)[0].completions[0].text for one in prompts
    ]

    def client(own: openai.OpenAI) -> list[list[str]]:
        def ask(n: int, stream: bool = False) -> str:
            return text_of(own, ASKED[n], stream, **settings[n])

        with ThreadPoolExecutor(16) as pool:
            return [
                [ask(n) for n in range(16)],
                [ask(n, stream=True) for n in range(16)],
                list(pool.map(ask, range(16))),
                list(pool.map(lambda n: ask(n, stream=True), range(16))),
            ]

    with (
        patch("keel.engines.endpoint.serving.QUANTUM", 0.001),
        patch.object(NativeEngine, "decode", noted),
        patch.object(PrefixCache, "take", counted),
    ):
        alone, *others = serving(server_of(engine), client)
    assert set(computed) == {1}
    assert len(computed) > 100
    assert alone[::3] == expected[::3]
    assert others == [alone] * 3
    assert not any("1" in text or "ad" in text for text in alone[2::3])
    assert len(set(alone)) > 12


def test_choices_usage_and_log_probs_of_completions() -> None:
    engine = engine_of()

    def client(own: openai.OpenAI) -> Any:
        keys: Any = {"model": "tiny", "n": 2, "seed": 1, "logprobs": 0, "max_tokens": 9}
        keys["prompt"] = ["4 + 4", "12"]
        whole = own.completions.create(**keys)
        usage = {"include_usage": True}
        return whole, list(own.completions.create(**keys, stream=True, stream_options=usage))

    whole, chunks = serving(server_of(engine), client)
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == len(TOKENIZER("4 + 412").input_ids)
    assert whole.usage.completion_tokens == sum(
        len(choice.logprobs.tokens) for choice in whole.choices
    )
    for choice in whole.choices:
        own = [one.choices[0] for one in chunks[:-1] if one.choices[0].index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        scores = [score for one in own for score in one.logprobs.token_logprobs]
        assert scores == pytest.approx(choice.logprobs.token_logprobs)
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
    assert len({choice.text for choice in whole.choices}) == 4


@pytest.mark.parametrize(
    ("path", "body", "status", "line"),
    [
        ("completions", {"prompt": []}, 400, "prompt: give text"),
        ("completions", {"prompt": [1, 10**6]}, 400, "tokens from 0 to"),
        ("completions", {"prompt": "1", "logprobs": 3}, 400, "logprobs = 3"),
        ("completions", {"prompt": "1", "echo": True}, 400, "echo = True"),
        ("completions", {"prompt": "1" * 10**6}, 400, "no token is left"),
        ("chat/completions", {"temperature": -1}, 400, "temperature = -1"),
        ("chat/completions", {"temperature": "hot"}, 400, "temperature = 'hot'"),
        ("chat/completions", {"temperature": 10**400}, 400, "temperature: give a number of at"),
        ("chat/completions", {"min_tokens": 5}, 400, "min_tokens = 5"),
        ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice = 'required'"),
        ("chat/completions", {"max_tokens": True}, 400, "max_tokens = True"),
        ("chat/completions", {"n": 0}, 400, "n = 0"),
        ("chat/completions", {"stop": [1]}, 400, "stop: give"),
        ("chat/completions", {"stop": "\ud800"}, 400, "stop = "),
        ("chat/completions", {"messages": 1}, 400, "messages: give"),
        ("chat/completions", {"top_k": 1.5}, 400, "top_k = 1.5"),
        ("embeddings", {}, 404, "only /v1/chat/completions and"),
    ],
)
def test_bad_requests_get_an_error_of_openai_s_form(
    path: str, body: dict[str, Any], status: int, line: str
) -> None:
    def client(own: openai.OpenAI) -> None:
        whole = {"messages": ASKED[0], "stream": True, **body}
        with connected(own) as connection:
            connection.request("POST", f"/v1/{path}", json.dumps(whole))
            answer = connection.getresponse()
            assert answer.status == status
            error = json.load(answer)["error"]
        assert error["type"] == "invalid_request_error"
        assert line in error["message"]
        assert text_of(own, ASKED[0], max_tokens=2) is not None

    serving(server_of(engine_of()), client)


def test_an_engine_that_fails_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(engine_of())
    begin, failures = server._begin, iter([MemoryError("no room")])

    def failing(answer: Any) -> None:
        for error in failures:
            raise error
        begin(answer)

    monkeypatch.setattr(server, "_begin", failing)

    def client(own: openai.OpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match="no room"):
            text_of(own.with_options(max_retries=0), ASKED[0], max_tokens=2)
        assert text_of(own, ASKED[0], max_tokens=2) is not None

    serving(server, client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_client_frees_its_row(stream: bool) -> None:
    engine = engine_of(rows=1)
    engine.eos = ()  # it would go on for long
    server = server_of(engine, 4000)
    seen: list[LiveSequence] = []

    def client(own: openai.OpenAI) -> str:
        with connected(own) as connection:
            body = json.dumps({"messages": ASKED[0], "stream": stream})
            connection.request("POST", "/v1/chat/completions", body)
            until = time.monotonic() + 30
            while not (server.live and server.live[0].tokens) and time.monotonic() < until:
                time.sleep(0.01)
            seen.extend(server.live)
        while seen[0] in server.live and time.monotonic() < until:
            time.sleep(0.01)
        return text_of(own, ASKED[1], max_tokens=3)

    assert serving(server, client)
    (dropped,) = seen
    assert not dropped.finish
    assert 0 < len(dropped.tokens) < 4000
    assert dropped not in server.live


def test_the_length_is_that_of_the_longest_prompt() -> None:
    body = json.dumps({"prompt": ["ab", "abc"]}).encode()
    assert read_request(body, served=True, chat=False).characters == 3
    messages = [{"role": "user", "content": "ab"}] * 2
    assert read_request(json.dumps({"messages": messages}).encode()).characters == 4


def test_who_may_ask() -> None:
    def status(own: openai.OpenAI, **headers: str) -> int:
        with connected(own) as connection:
            connection.request("GET", "/v1/models", headers=headers)
            return connection.getresponse().status

    def local(own: openai.OpenAI) -> None:
        assert [one.id for one in own.models.list()] == ["tiny"]
        assert own.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            own.models.retrieve("other")
        assert status(own) == 200
        assert status(own, Host="evil.example") == 403
        assert status(own, Origin="http://evil.example") == 403

    def remote(own: openai.OpenAI) -> None:
        assert [one.id for one in own.models.list()] == ["tiny"]
        assert status(own, Host="this.machine", Authorization="Bearer secret-token") == 200
        assert status(own, Host="this.machine", Authorization="bearer secret-token") == 200
        assert status(own, Authorization="Bearer secret") == status(own) == 401

    server = server_of(engine_of())
    serving(server, local)
    serving(server, remote, key="secret-token", token="secret-token", hosts=None)


def test_keywords_of_the_chat_template_are_the_request_s() -> None:
    body = json.dumps(
        {"messages": ASKED[0], "chat_template_kwargs": {"thinks": False, "name": "Ann"}}
    ).encode()
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = TEMPLATE + "{% if thinks %}<think>{% endif %}{{ name }}"
    chat = ChatEncoder(tokenizer, {"thinks": True})
    plain = read_request(json.dumps({"messages": ASKED[0]}).encode(), served=True)
    texts = [
        tokenizer.decode(encode_request(chat, one))
        for one in (plain, read_request(body, served=True))
    ]
    assert texts[0].removesuffix("<think>") + "Ann" == texts[1]
    with pytest.raises(RefusedRequest, match=r"set prompts\.chat_template in the recipe"):
        read_request(body)
    for wrong in ({"tokenize": True}, {"chat_template": "x"}, [1]):
        body = json.dumps({"messages": ASKED[0], "chat_template_kwargs": wrong}).encode()
        with pytest.raises(RefusedRequest, match=r"of (the|a) chat template"):
            read_request(body, served=True)


TEXTS = [
    'I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> And so on.',
    '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": 1}</tool_call>',
    "1 < 2 <tool_cat> and <tool_call>no JSON</tool_call>",
    "a < b <tool_c",
]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_tool_calls_are_the_whole_message_s(text: str) -> None:
    body = {"messages": ASKED[0], "tools": TOOLS, "stream": True}
    request = read_request(json.dumps(body).encode(), served=True)
    assert request.options == RequestOptions({})
    assert isinstance(request, ChatRequest)
    answer = LiveResponse(request, "tiny")
    sequence = LiveSequence(answer, Prompt("p", "", tokens=(5,)), 0, Sampling(400), TOKENIZER)
    answer.sequences.append(sequence)
    sequence.begin()
    tokens = [*TOKENIZER(text).input_ids, EOS]
    for count in range(1, len(tokens) + 1):
        scores = [-0.5] * count
        sequence.take(tokens[:count], scores, ENDED if count == len(tokens) else GOING)
    whole = next(stream_events(answer.result()))["choices"][0]["delta"]
    content, calls, reasons = "", [], []
    for part in answer.parts(stream=True):
        assert part is not None
        (choice,) = part["choices"]
        content += choice["delta"].get("content") or ""
        calls += choice["delta"].get("tool_calls", [])
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert content == (whole["content"] or "")
    assert calls == whole.get("tool_calls", [])
    assert reasons == ["tool_calls" if calls else "stop"]
    assert bool(calls) == (text in TEXTS[:2])
