"""What the endpoint records and trains, what it refuses, and whom it answers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import openai
import pytest

from keel.engines.endpoint.requests import RefusedRequest, read_request
from keel.engines.native import NativeEngine
from keel.models.chat import ChatEncoder
from keel.types import ProgramInput
from tests.engines.spelling import (
    EOS,
    TOKENIZER,
    TOOLS,
    USER,
    SpellingEngine,
    Talk,
    check_written,
    run,
    talking,
)
from tests.engines.tiny import stock_logits, tiny


def adding(stream: bool) -> Callable[[Talk], None]:
    """A client that executes the tool until the policy calls it no more."""

    def program(talk: Talk) -> None:
        results: list[Any] = []
        while calls := talk.ask(*results, tools=TOOLS, stream=stream).get("tool_calls"):
            results = [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": str(sum(json.loads(call["function"]["arguments"]).values())),
                }
                for call in calls
            ]

    return program


def two_calls(name: str, turn: int) -> str:
    call = '<tool_call>{"name": "add", "arguments": {"a": %d, "b": %d}}</tool_call>'
    number = int(name[1])
    return ["I add." + call % (20, 3), call % (23, 100 + number), f"It is {123 + number}."][turn]


@pytest.mark.parametrize("stream", [False, True])
def test_two_tool_turns_train_exactly_what_the_policy_wrote(stream: bool) -> None:
    engine = SpellingEngine(two_calls)
    groups = run(engine, talking(adding(stream)), n=2)
    check_written(engine, groups, turns=3)
    for number, group in enumerate(groups):
        first, last = "23", str(123 + number)
        for completion in group.completions:
            context = TOKENIZER.decode(completion.tokens[~completion.written].tolist())
            assert context == f"\nt:{first}<eos>\na:\nt:{last}<eos>\na:"
            own = [two_calls(group.prompt.id, turn) for turn in range(3)]
            texts = [turn["content"] for turn in completion.turns]
            assert texts == [own[0], first, own[1], last, own[2]]


def test_random_weights_keep_their_tokens_and_log_probs() -> None:
    """A random policy writes tokens that no tokenizer would: none is encoded again."""
    size = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 512, "eos_token_id": EOS}
    model = tiny("llama", **size)
    engine = NativeEngine(tiny("llama", **size), TOKENIZER)

    def program(talk: Talk) -> None:
        talk.ask(max_tokens=40)
        talk.ask({"role": "user", "content": "again <eos>"}, max_tokens=40)

    drifted = 0
    for group in run(engine, talking(program), n=3, tokens=200):
        for completion in group.completions:
            own = completion.tokens[completion.written].tolist()
            drifted += TOKENIZER.encode(TOKENIZER.decode(own)) != own
            tokens = [*group.prompt.tokens, *completion.tokens.tolist()]
            logits = stock_logits(model, tokens)[len(group.prompt.tokens) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(completion)), completion.tokens].numpy()
            written = completion.written
            np.testing.assert_allclose(completion.log_probs[written], expected[written], atol=1e-4)
            context = TOKENIZER.decode(completion.tokens[~written].tolist())
            assert context in ("\nu:again <eos><eos>\na:", "<eos>\nu:again <eos><eos>\na:")
    assert drifted > 0


@pytest.mark.parametrize("text", ["x" * 2_000_000, "<eos>" * 200_000])
def test_large_texts_are_refused_before_they_are_encoded(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = ChatEncoder.after

    def small(encoder: Any, messages: Any, *given: Any, **keywords: Any) -> list[int]:
        assert len(str(messages)) < 100_000
        return after(encoder, messages, *given, **keywords)

    monkeypatch.setattr(ChatEncoder, "after", small)
    refusals: list[str] = []

    def program(talk: Talk) -> None:
        talk.ask(max_tokens=5)
        tool = {"role": "tool", "content": text, "tool_call_id": "x"}
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded") as caught:
            talk.request([*talk.messages, tool])
        refusals.append(str(caught.value))
        if talk.given.index:
            talk.ask({**tool, "content": "shorter"}, max_tokens=5)

    for group in run(SpellingEngine(two_calls), talking(program), n=2):
        assert group.completions[0].finish == "length"
        assert group.completions[1].turns[1]["content"] == "shorter"
    assert len(refusals) == 4


def test_the_time_that_programs_take_changes_nothing() -> None:
    size = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 512, "eos_token_id": EOS}
    engine = NativeEngine(tiny("llama", **size), TOKENIZER)

    def program(talk: Talk) -> None:
        with suppress(openai.BadRequestError):
            talk.ask()
            time.sleep(random.random() * 0.02)
            talk.ask({"role": "tool", "content": "tool says <eos> 7", "tool_call_id": "x"})

    def sampled() -> list[Any]:
        return [
            (c.tokens.tobytes(), c.log_probs.tobytes(), c.written.tobytes(), c.finish, c.turns)
            for group in run(engine, talking(program), n=2, tokens=80)
            for c in group.completions
        ]

    assert sampled() == sampled()


def test_models_and_usage() -> None:
    def program(talk: Talk) -> None:
        assert [model.id for model in talk.client.models.list()] == [talk.given.model]
        answer = talk.client.chat.completions.create(
            model="another name", messages=talk.messages, max_tokens=2, temperature=0.3, n=1
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2

    groups = run(SpellingEngine(lambda name, turn: "yes"), talking(program))
    assert [len(group.completions[0]) for group in groups] == [2, 2]


ASKED = {"messages": [USER]}
DEEP_CALL = {"function": {"name": "add", "arguments": "[" * 9000}}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"n": 2}, "n = 2"),
        ({"stop": ["x"]}, "stop = ['x']"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"tools": ["add"]}, "tools: give a list of objects"),
        ({"messages": 5}, "messages: give a list"),
        ({"messages": []}, "end them with a message of the user"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "end them with a message of"),
        ({"messages": [{"content": "x"}]}, "messages[0]: give a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"messages": [{**USER, "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(RefusedRequest) as caught:
        read_request(json.dumps(ASKED | keys).encode())
    assert line in str(caught.value)


def test_what_is_nested_deeply_is_no_fault() -> None:
    for body in (b"[" * 100_000, b'{"messages": %s}' % (b"[" * 300 + b"]" * 300)):
        with pytest.raises(RefusedRequest, match="nested deeper than"):
            read_request(body)
    answer = {"role": "assistant", "content": "", "tool_calls": [DEEP_CALL]}
    read_request(json.dumps({"messages": [answer, USER]}).encode())


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b'{"messages": [{"role": "user"}]}', {}, 401),
        (b"{}", {"Content-Length": "-5"}, 413),
        (b"{}", {"Content-Length": "99999999999"}, 413),
    ],
)
def test_a_refused_request_changes_nothing(
    body: bytes, headers: dict[str, str], status: int
) -> None:
    def program(talk: Talk) -> None:
        request = urllib.request.Request(f"{talk.given.base_url}/chat/completions", body, headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        with caught.value as error:
            assert error.code == status
            assert json.load(error)["error"]["type"] == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match="n = 2"):
            talk.request(talk.messages, n=2)
        talk.ask()

    groups = run(SpellingEngine(lambda name, turn: "yes"), talking(program))
    assert [group.completions[0].text for group in groups] == ["yes", "yes"]


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda m: [{**m[0], "content": "x"}, *m[1:]], "messages[0] differs"),
        (lambda m: [m[0], {**m[1], "content": "yes"}, *m[2:]], "messages[1] differs"),
        (lambda m: [m[0], *m[2:]], "messages[1] differs"),
        (lambda m: [{"role": "system", "content": "x"}, *m], "messages[0] differs"),
        (lambda m: m[:1], "messages[1] differs"),
    ],
    ids=["changed", "reasoning dropped", "answer dropped", "inserted", "begun again"],
)
def test_an_edited_history_is_refused(edit: Any, line: str) -> None:
    """The third request edits what the first two said. Beginning again is a retry only while
    nothing was added."""

    def program(talk: Talk) -> None:
        assert talk.ask()["content"] == "<think>2</think>yes"
        talk.ask(USER)
        talk.messages.append(USER)
        with pytest.raises(openai.BadRequestError) as caught:
            talk.request(edit(talk.messages))
        assert line in caught.value.message
        talk.ask()

    engine = SpellingEngine(lambda name, turn: "<think>2</think>yes")
    for group in run(engine, talking(program)):
        assert len(group.completions[0].turns) == 5
        assert group.completions[0].text == "<think>2</think>yes" * 3


def test_tools_that_change_are_refused() -> None:
    def program(talk: Talk) -> None:
        talk.ask()
        with pytest.raises(openai.BadRequestError, match="tools differ"):
            talk.ask(USER, tools=TOOLS)

    run(SpellingEngine(lambda name, turn: "yes"), talking(program))


def test_a_retry_gets_the_same_answer_and_samples_nothing() -> None:
    answers: list[str] = []

    def program(talk: Talk) -> None:
        answers.extend(talk.request(talk.messages)["content"] for _ in range(3))

    numbers: Iterator[int] = iter(range(9))
    engine = SpellingEngine(lambda name, turn: f"{next(numbers)}")
    groups = run(engine, talking(program))
    assert len(engine.seen) == len(groups) == 2
    assert sorted(answers) == ["0", "0", "0", "1", "1", "1"]
    assert [len(group.completions[0].turns) for group in groups] == [1, 1]


def test_one_conversation_answers_one_request_at_a_time() -> None:
    """Requests in parallel of one program: the first is answered, the others are refused."""

    async def program(given: ProgramInput) -> None:
        async with openai.AsyncOpenAI(
            base_url=given.base_url, api_key=given.api_key, max_retries=0
        ) as client:

            async def request(text: str) -> Any:
                messages: Any = [{"role": "user", "content": text}]
                return await client.chat.completions.create(model="policy", messages=messages)

            found = await asyncio.gather(*map(request, "abc"), return_exceptions=True)
        refused = [one for one in found if isinstance(one, openai.BadRequestError)]
        assert len(refused) == 2
        for error in refused:
            assert "is being answered" in error.message or "differs" in error.message

    for group in run(SpellingEngine(lambda name, turn: "yes"), program, n=2):
        assert [completion.text for completion in group.completions] == ["yes", "yes"]


def test_keys_separate_conversations_and_end_with_them() -> None:
    given_all: list[ProgramInput] = []

    def program(talk: Talk) -> None:
        given = talk.given
        given_all.append(given)
        address = given.base_url.removeprefix("http://").removesuffix("/v1")
        assert address.startswith("127.0.0.1:")
        with pytest.raises(OSError, match=r"refused|unreachable|assign"):  # loopback only
            # Another address of this machine, which a server on all interfaces would answer.
            socket.create_connection(("127.0.0.2", int(address.partition(":")[2])), 5)
        assert given.api_key not in repr(given)
        for key in ("keel", "x" * 22):
            with pytest.raises(openai.AuthenticationError, match="no running program"):
                talking(Talk.ask, key=key)(given)
        talk.ask()

    groups = run(SpellingEngine(lambda name, turn: name), talking(program), n=2)
    texts = {completion.text for group in groups for completion in group.completions}
    assert texts == {"p0/0/0", "p0/0/1", "p1/0/0", "p1/0/1"}
    assert len({given.api_key for given in given_all}) == 4
    with pytest.raises(openai.APIConnectionError):
        talking(Talk.ask, timeout=5.0)(given_all[0])


def test_an_ended_conversation_is_closed_while_others_go_on() -> None:
    """A program that is done must not be continued with its key."""
    keys: dict[str, str] = {}

    def program(talk: Talk) -> None:
        talk.ask()
        if talk.given.prompt_id == "p0":
            keys["first"] = talk.given.api_key
            return
        talk.ask(USER)  # a batch waits until the first program has ended
        with pytest.raises(openai.AuthenticationError):
            talking(Talk.ask, key=keys["first"])(talk.given)

    groups = run(SpellingEngine(lambda name, turn: "yes"), talking(program))
    assert [len(group.completions[0].turns) for group in groups] == [1, 3]
