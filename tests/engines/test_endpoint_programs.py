"""What programs and the policy may do without ending a run, and what names the program that did."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import openai
import pytest

from keel.platform.time_limit import Hung
from keel.types import KeelError, ProgramInput
from tests.engines.spelling import (
    TOKENIZER,
    TOOLS,
    USER,
    SpellingEngine,
    ask,
    client_of,
    run,
)


def pair(first: Any, second: Any) -> Any:
    """One program for each prompt."""
    return lambda given: (first if given.prompt_id == "p0" else second)(given)


def wait_for_end(given: ProgramInput) -> None:
    """Until the endpoint answers another key with something else than that it is unknown."""
    other = openai.OpenAI(base_url=given.base_url, api_key="x", max_retries=0)
    with other, suppress(openai.NotFoundError, openai.APIConnectionError):
        while True:
            with pytest.raises(openai.AuthenticationError):
                ask(other, given, given.messages)
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (r'{"name": "add", "arguments": "{\"a\": 7}"}', '{"a": 7}'),
        (r'{"name": "add", "arguments": {"a": "\u00e9"}}', '{"a": "é"}'),
        (r'{"name": "add", "arguments": {"a": NaN}}', '{"a": NaN}'),
        (r'{"name": "add"}', "{}"),
        (r'{"name": "add", "arguments": "5"}', None),
        (r'{"name": "add", "arguments": "\"{}\""}', None),
        (r'{"name": "add", "arguments": [1]}', None),
        (r'{"name": "add", "arguments": {"a": "\ud83d"}}', None),
        (r'{"name": "\ud83d", "arguments": {}}', None),
        (r'{"name": 5, "arguments": {}}', None),
        (r'{"name": "add", "arguments": {"a": %s}}' % ("[" * 300 + "]" * 300), None),
        (r'{"name": "add", "arguments": {"a": %s}}' % ("[" * 3000 + "]" * 3000), None),
    ],
    ids=lambda value: (value or "text")[:50],
)
def test_any_call_of_the_policy_can_be_repeated(call: str, arguments: str | None) -> None:
    """A call of a name with an object is a tool call, any other text; a client repeats both."""
    text = f"I add.<tool_call>{call}</tool_call>"

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client:
            messages.append(ask(client, given, messages, tools=TOOLS))
            calls = messages[1].get("tool_calls", [])
            assert [one["function"]["arguments"] for one in calls] == [arguments] * len(calls)
            assert messages[1]["content"] == (text if arguments is None else "I add.")
            messages.append({"role": "user", "content": "more"})
            assert ask(client, given, messages, tools=TOOLS)["content"] == "yes"

    engine = SpellingEngine(lambda name, turn: [text, "yes"][turn])
    for group in run(engine, program, tokens=8000):
        assert group.completions[0].text == f"{text}yes"


def test_a_retry_of_a_waiting_request_is_answered() -> None:
    """The other program holds the batch up until the client has tried again."""
    tried = threading.Event()

    def impatient(given: ProgramInput) -> None:
        with client_of(given) as client:
            for _ in range(2):
                with pytest.raises(openai.APITimeoutError):
                    ask(client, given, given.messages, timeout=0.2)
            tried.set()
            assert ask(client, given, given.messages)["content"] == "yes"

    def slow(given: ProgramInput) -> None:
        assert tried.wait(30)
        with client_of(given) as client:
            ask(client, given, given.messages)

    engine = SpellingEngine(lambda name, turn: "yes")
    groups = run(engine, pair(impatient, slow))
    assert len(engine.seen) == 2
    assert [len(group.completions[0].turns) for group in groups] == [1, 1]


def test_a_request_that_its_program_abandons_leaves_nothing() -> None:
    """Neither context without an answer, nor a thread that waits."""
    ended = threading.Event()

    def impatient(given: ProgramInput) -> float:
        messages = given.messages
        with client_of(given) as client:
            messages += [ask(client, given, messages), USER]
            with pytest.raises(openai.APITimeoutError):
                ask(client, given, messages, timeout=0.2)
        ended.set()
        return 1.0

    def slow(given: ProgramInput) -> None:
        with client_of(given) as client:
            messages = [*given.messages, ask(client, given, given.messages), USER]
            assert ended.wait(30)
            ask(client, given, messages)

    before = set(threading.enumerate())
    first, second = run(SpellingEngine(lambda name, turn: "yes"), pair(impatient, slow))
    assert first.completions[0].written.all()
    assert [turn["content"] for turn in first.completions[0].turns] == ["yes"]
    assert first.completions[0].columns == {"reward": 1.0}
    assert [turn["content"] for turn in second.completions[0].turns] == ["yes", "more", "yes"]
    for thread in set(threading.enumerate()) - before:
        if "process_request" in thread.name:
            thread.join(10)
            assert not thread.is_alive()


def test_a_program_that_waits_for_no_answer_is_named() -> None:
    def impatient(given: ProgramInput) -> None:
        with client_of(given) as client, pytest.raises(openai.APITimeoutError):
            ask(client, given, given.messages, timeout=0.2)

    with pytest.raises(KeelError, match=r"prompt 'p0', completion 0\) waited for no answer"):
        run(SpellingEngine(lambda name, turn: "yes"), pair(impatient, wait_for_end))


def test_an_answer_that_the_program_capped_is_not_truncated() -> None:
    """Finish "length" means that the budget of the completion is spent."""

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client:
            messages += [ask(client, given, messages, max_tokens=2), USER]
            limit = 3 if given.prompt_id == "p0" else 50
            ask(client, given, messages, max_tokens=limit)

    engine = SpellingEngine(lambda name, turn: "ok" if turn == 0 else "a long answer")
    groups = run(engine, program, tokens=20)  # 2 and the 12 of "\nu:more<eos>\na:" before the last
    assert [group.completions[0].finish for group in groups] == ["stop", "length"]
    (first, _) = run(engine, lambda given: _capped_at(given, 20), tokens=20)
    assert first.completions[0].finish == "eos"
    (first, _) = run(engine, lambda given: _capped_at(given, 2), tokens=2)
    assert first.completions[0].finish == "length"


def _capped_at(given: ProgramInput, limit: int) -> None:
    with client_of(given) as client:
        ask(client, given, given.messages, max_tokens=limit)


def test_a_template_without_turns_keeps_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be the token that the policy wrote last."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", template)

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client:
            messages += [ask(client, given, messages, max_tokens=1), {**USER, "content": "5678"}]
            ask(client, given, messages)

    engine = SpellingEngine(lambda name, turn: "5")
    for group in run(engine, program):
        completion = group.completions[0]
        assert TOKENIZER.decode(completion.tokens[~completion.written]) == "5678"


@pytest.mark.parametrize(
    ("end", "finish"),
    [
        (lambda given, refused: None, "length"),
        (lambda given, refused: _raise(refused), "length"),
        (lambda given, refused: _raise(ValueError("the agent failed"), refused), "length"),
        (lambda given, refused: _raise(ExceptionGroup("tasks", [refused])), "length"),
        (lambda given, refused: _raise(ValueError(f"the agent said {refused}")), "length"),
        (lambda given, refused: 1 / 0, "raised ZeroDivisionError"),
        (lambda given, refused: _shorter(given), "eos"),
        (lambda given, refused: _raise(_shorter(given) or refused), "raised BadRequestError"),
    ],
    ids=["returns", "raises", "cause", "group", "text", "fault", "shorter", "later"],
)
def test_a_program_may_raise_where_no_budget_is_left(end: Any, finish: str) -> None:
    """Nothing else that it raises is ignored, and a shorter request goes on."""

    def program(given: ProgramInput) -> None:
        messages = given.messages
        with client_of(given) as client:
            messages.append(ask(client, given, messages))
            with pytest.raises(openai.BadRequestError, match="no token is left") as caught:
                ask(client, given, [*messages, {**USER, "content": "9" * 500}])
        end(given, caught.value)

    def sample() -> str:
        groups = run(SpellingEngine(lambda name, turn: "yes"), program, tokens=200)
        (found,) = {group.completions[0].finish for group in groups}
        return found

    if finish.startswith("raised"):
        with pytest.raises(KeelError, match=finish):
            sample()
    else:
        assert sample() == finish


def _raise(error: Exception, cause: Exception | None = None) -> None:
    raise error from cause


def _shorter(given: ProgramInput) -> None:
    with client_of(given) as client:
        ask(client, given, [*given.messages, USER])


def test_a_program_that_repeats_a_request_is_named() -> None:
    """Its answer stays the same, so an agent that wants another one would ask for ever."""

    def program(given: ProgramInput) -> None:
        with client_of(given) as client:
            while True:
                assert ask(client, given, given.messages)["content"] == "yes"

    with pytest.raises(KeelError, match="append a message to the conversation"):
        run(SpellingEngine(lambda name, turn: "yes"), program)


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (None, "its last one repeats the one before"),
        ([USER], "its last one was refused: messages[0] differs"),
    ],
)
def test_a_silent_program_is_named_with_its_last_request(messages: Any, line: str) -> None:
    """A program that catches the refusal, and one that waits after a repeated request."""

    def program(given: ProgramInput) -> None:
        with client_of(given) as client:
            ask(client, given, given.messages)
            with suppress(openai.BadRequestError):
                ask(client, given, messages or given.messages)
        wait_for_end(given)

    with pytest.raises(Hung) as caught:
        run(SpellingEngine(lambda name, turn: "yes"), program, timeout=1)
    assert "makes no request within 1 s" in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.parametrize("value", [True, np.float32(0.5), Fraction(1, 2)])
def test_any_real_number_is_a_reward(value: Any) -> None:
    def program(given: ProgramInput) -> Any:
        with client_of(given) as client:
            ask(client, given, given.messages)
        return value if given.prompt_id == "p0" else {"reward": value}

    groups = run(SpellingEngine(lambda name, turn: "yes"), program)
    assert [float(group.completions[0].columns["reward"]) for group in groups] == [value, value]


@pytest.mark.parametrize(
    ("program", "line", "kind"),
    [
        (lambda given: 1 / 0, "raised ZeroDivisionError", KeelError),
        (lambda given: None, "made no request", KeelError),
        (lambda given: time.sleep(3), "makes no request within 0.3 s", Hung),
    ],
)
def test_programs_that_fail_are_named(program: Any, line: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=line) as caught:
        run(SpellingEngine(lambda name, turn: "yes"), program, timeout=0.3, limit=1)
    assert "'mine:run' (prompt 'p0', completion 0)" in str(caught.value)


def test_program_that_raises_after_an_answer_is_skipped() -> None:
    def program(given: ProgramInput) -> dict[str, float]:
        with client_of(given) as client:
            ask(client, given, given.messages)
        if given.index == 1:
            raise OSError("the tool is down")
        return {"reward": 1.0}

    engine = SpellingEngine(lambda name, turn: "yes")
    groups = run(engine, program, n=3, skips=True)
    failed = ["", "OSError: the tool is down", ""]
    assert [[one.failed for one in group.completions] for group in groups] == [failed, failed]
    assert all(len(one) for group in groups for one in group.completions)
    with pytest.raises(KeelError, match="raised ZeroDivisionError"):
        run(engine, lambda given: 1 / 0, skips=True)
    with pytest.raises(KeelError, match="the tool is down"):
        run(engine, program, n=3)
