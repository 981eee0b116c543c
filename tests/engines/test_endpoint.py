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
import torch

from keel.engines.endpoint import RefusedRequest, read_request
from keel.engines.native import NativeEngine
from keel.learn.batch import from_groups
from keel.models.chat import ChatEncoder
from keel.types import ProgramInput
from tests.engines.spelling import EOS, TOKENIZER, TOOLS, USER, SpellingEngine, ask, client_of, run
from tests.engines.tiny import stock_logits, tiny


def adding(stream: bool) -> Callable[[ProgramInput], None]:
    """A client that executes the tool until the policy calls it no more."""

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client:
            while True:
                messages.append(ask(client, given, messages, tools=TOOLS, stream=stream))
                if not messages[-1].get("tool_calls"):
                    return
                for call in messages[-1]["tool_calls"]:
                    total = sum(json.loads(call["function"]["arguments"]).values())
                    tool = {"role": "tool", "tool_call_id": call["id"], "content": str(total)}
                    messages.append(tool)

    return program


def two_calls(name: str, turn: int) -> str:
    call = '<tool_call>{"name": "add", "arguments": {"a": %d, "b": %d}}</tool_call>'
    number = int(name[1])
    return ["I add." + call % (20, 3), call % (23, 100 + number), f"It is {123 + number}."][turn]


@pytest.mark.parametrize("stream", [False, True])
def test_two_tool_turns_train_exactly_what_the_policy_wrote(stream: bool) -> None:
    engine = SpellingEngine(two_calls)
    groups = run(engine, adding(stream), n=2)
    trained: list[int] = []
    for number, group in enumerate(groups):
        for index, completion in enumerate(group.completions):
            calls = [engine.seen[f"{group.prompt.id}/0/{index}/{turn}"] for turn in range(3)]
            own = [token for _, made in calls for token in made.tokens.tolist()]
            trained += own
            assert completion.tokens[completion.written].tolist() == own
            scores = np.concatenate([made.log_probs for _, made in calls])
            np.testing.assert_array_equal(completion.log_probs[completion.written], scores)
            assert not completion.log_probs[~completion.written].any()
            assert group.prompt.tokens == calls[0][0]
            results = ["23", str(123 + number)]
            for (before, made), (after, _), result in zip(
                calls[:-1], calls[1:], results, strict=True
            ):
                recorded = (*before, *made.tokens.tolist())
                assert after[: len(recorded)] == recorded
                context = f"\nt:{result}<eos>\na:"
                assert TOKENIZER.decode(after[len(recorded) :]) == context
            whole = [*group.prompt.tokens, *completion.tokens.tolist()]
            assert whole == [*calls[2][0], *calls[2][1].tokens.tolist()]
            assert TOKENIZER.encode(TOKENIZER.decode(whole)) != whole  # it would drift
            texts = [turn["content"] for turn in completion.turns]
            assert texts == [
                two_calls(group.prompt.id, 0),
                "23",
                two_calls(group.prompt.id, 1),
                results[1],
                f"It is {results[1]}.",
            ]
    batch = from_groups(groups, torch.device("cpu"))
    assert batch.tokens_T[batch.target_N].tolist() == trained


def test_random_weights_keep_their_tokens_and_log_probs() -> None:
    """A random policy writes tokens that no tokenizer would: none is encoded again."""
    size = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 512, "eos_token_id": EOS}
    model = tiny("llama", **size)
    engine = NativeEngine(tiny("llama", **size), TOKENIZER)

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client:
            messages.append(ask(client, given, messages, max_tokens=40))
            messages.append({"role": "user", "content": "again <eos>"})
            ask(client, given, messages, max_tokens=40)

    drifted = 0
    for group in run(engine, program, n=3, tokens=200):
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

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client:
            messages.append(ask(client, given, messages, max_tokens=5))
            tool = {"role": "tool", "content": text, "tool_call_id": "x"}
            with pytest.raises(openai.BadRequestError, match="context_length_exceeded") as caught:
                ask(client, given, [*messages, tool])
            refusals.append(str(caught.value))
            if given.index:
                messages.append({"role": "tool", "content": "shorter", "tool_call_id": "x"})
                ask(client, given, messages, max_tokens=5)

    for group in run(SpellingEngine(two_calls), program, n=2):
        assert group.completions[0].finish == "length"
        assert group.completions[1].turns[1]["content"] == "shorter"
    assert len(refusals) == 4


def test_the_time_that_programs_take_changes_nothing() -> None:
    size = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 512, "eos_token_id": EOS}
    engine = NativeEngine(tiny("llama", **size), TOKENIZER)

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client, suppress(openai.BadRequestError):
            messages.append(ask(client, given, messages))
            time.sleep(random.random() * 0.02)
            messages.append({"role": "tool", "content": "tool says <eos> 7", "tool_call_id": "x"})
            ask(client, given, messages)

    def sampled() -> list[Any]:
        return [
            (c.tokens.tobytes(), c.log_probs.tobytes(), c.written.tobytes(), c.finish, c.turns)
            for group in run(engine, program, n=2, tokens=80)
            for c in group.completions
        ]

    assert sampled() == sampled()


def test_models_and_usage() -> None:
    def program(given: ProgramInput) -> None:
        with client_of(given) as client:
            assert [model.id for model in client.models.list()] == [given.model]
            answer = client.chat.completions.create(
                model="another name", messages=given.messages, max_tokens=2, temperature=0.3, n=1
            )
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 2

    groups = run(SpellingEngine(lambda name, turn: "yes"), program)
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
    def program(given: ProgramInput) -> None:
        request = urllib.request.Request(f"{given.base_url}/chat/completions", body, headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        with caught.value as error:
            assert error.code == status
            assert json.load(error)["error"]["type"] == "invalid_request_error"
        with client_of(given) as client:
            with pytest.raises(openai.BadRequestError, match="n = 2"):
                ask(client, given, given.messages, n=2)
            ask(client, given, given.messages)

    groups = run(SpellingEngine(lambda name, turn: "yes"), program)
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

    def program(given: ProgramInput) -> None:
        messages = list(given.messages)
        with client_of(given) as client:
            messages.append(ask(client, given, messages))
            assert messages[-1]["content"] == "<think>2</think>yes"
            messages.append(USER)
            messages.append(ask(client, given, messages))
            messages.append(USER)
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, given, edit(messages))
            assert line in caught.value.message
            ask(client, given, messages)

    engine = SpellingEngine(lambda name, turn: "<think>2</think>yes")
    for group in run(engine, program):
        assert len(group.completions[0].turns) == 5
        assert group.completions[0].text == "<think>2</think>yes" * 3


def test_tools_that_change_are_refused() -> None:
    def program(given: ProgramInput) -> None:
        messages = list(given.messages)
        with client_of(given) as client:
            messages += [ask(client, given, messages), USER]
            with pytest.raises(openai.BadRequestError, match="tools differ"):
                ask(client, given, messages, tools=TOOLS)

    run(SpellingEngine(lambda name, turn: "yes"), program)


def test_a_retry_gets_the_same_answer_and_samples_nothing() -> None:
    answers: list[str] = []

    def program(given: ProgramInput) -> None:
        with client_of(given) as client:
            answers.extend(ask(client, given, given.messages)["content"] for _ in range(3))

    numbers: Iterator[int] = iter(range(9))
    engine = SpellingEngine(lambda name, turn: f"{next(numbers)}")
    groups = run(engine, program)
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

    def program(given: ProgramInput) -> None:
        given_all.append(given)
        address = given.base_url.removeprefix("http://").removesuffix("/v1")
        assert address.startswith("127.0.0.1:")
        with pytest.raises(OSError, match=r"refused|unreachable|assign"):  # loopback only
            # Another address of this machine, which a server on all interfaces would answer.
            socket.create_connection(("127.0.0.2", int(address.partition(":")[2])), 5)
        assert given.api_key not in repr(given)
        for key in ("keel", "x" * 22):
            other = openai.OpenAI(base_url=given.base_url, api_key=key, max_retries=0)
            with other, pytest.raises(openai.AuthenticationError, match="no running program"):
                ask(other, given, given.messages)
        with client_of(given) as client:
            ask(client, given, given.messages)

    groups = run(SpellingEngine(lambda name, turn: name), program, n=2)
    texts = {completion.text for group in groups for completion in group.completions}
    assert texts == {"p0/0/0", "p0/0/1", "p1/0/0", "p1/0/1"}
    assert len({given.api_key for given in given_all}) == 4
    with client_of(given_all[0], timeout=5.0) as client, pytest.raises(openai.APIConnectionError):
        ask(client, given_all[0], given_all[0].messages)


def test_an_ended_conversation_is_closed_while_others_go_on() -> None:
    """A program that is done must not be continued with its key."""
    keys: dict[str, str] = {}

    def program(given: ProgramInput) -> None:
        with client_of(given) as client:
            ask(client, given, given.messages)
            if given.prompt_id == "p0":
                keys["first"] = given.api_key
                return
            messages = [*given.messages, {"role": "assistant", "content": "yes"}, USER]
            ask(client, given, messages)  # a batch waits until the first program has ended
            late = openai.OpenAI(base_url=given.base_url, api_key=keys["first"], max_retries=0)
            with late, pytest.raises(openai.AuthenticationError):
                ask(late, given, given.messages)

    groups = run(SpellingEngine(lambda name, turn: "yes"), program)
    assert [len(group.completions[0].turns) for group in groups] == [1, 3]
