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
    Talk,
    client_of,
    run,
    talking,
)


def pair(first: Any, second: Any) -> Any:
    """One program for each prompt."""
    return lambda given: (first if given.prompt_id == "p0" else second)(given)


YES = SpellingEngine(lambda name, turn: "yes")


def wait_for_end(given: ProgramInput) -> None:
    """Until the endpoint answers another key with something else than that it is unknown."""
    with suppress(openai.NotFoundError, openai.APIConnectionError):
        while True:
            with pytest.raises(openai.AuthenticationError):
                talking(Talk.ask, key="x")(given)
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

    def program(talk: Talk) -> None:
        answer = talk.ask(tools=TOOLS)
        calls = answer.get("tool_calls", [])
        assert [one["function"]["arguments"] for one in calls] == [arguments] * len(calls)
        assert answer["content"] == (text if arguments is None else "I add.")
        assert talk.ask(USER, tools=TOOLS)["content"] == "yes"

    engine = SpellingEngine(lambda name, turn: [text, "yes"][turn])
    for group in run(engine, talking(program), tokens=8000):
        assert group.completions[0].text == f"{text}yes"


def test_a_retry_of_a_waiting_request_is_answered() -> None:
    """The other program holds the batch up until the client has tried again."""
    tried = threading.Event()

    def impatient(talk: Talk) -> None:
        for _ in range(2):
            with pytest.raises(openai.APITimeoutError):
                talk.ask(timeout=0.2)
        tried.set()
        assert talk.ask()["content"] == "yes"

    def slow(talk: Talk) -> None:
        assert tried.wait(30)
        talk.ask()

    engine = SpellingEngine(lambda name, turn: "yes")
    groups = run(engine, pair(talking(impatient), talking(slow)))
    assert len(engine.seen) == 2
    assert [len(group.completions[0].turns) for group in groups] == [1, 1]


def test_a_request_that_its_program_abandons_leaves_nothing() -> None:
    """Neither context without an answer, nor a thread that waits."""
    ended = threading.Event()

    def impatient(given: ProgramInput) -> float:
        with client_of(given) as client:
            talk = Talk(client, given)
            talk.ask()
            with pytest.raises(openai.APITimeoutError):
                talk.ask(USER, timeout=0.2)
        ended.set()
        return 1.0

    def slow(talk: Talk) -> None:
        talk.ask()
        assert ended.wait(30)
        talk.ask(USER)

    before = set(threading.enumerate())
    first, second = run(YES, pair(impatient, talking(slow)))
    assert first.completions[0].written.all()
    assert [turn["content"] for turn in first.completions[0].turns] == ["yes"]
    assert first.completions[0].columns == {"reward": 1.0}
    assert [turn["content"] for turn in second.completions[0].turns] == ["yes", "more", "yes"]
    for thread in set(threading.enumerate()) - before:
        if "process_request" in thread.name:
            thread.join(10)
            assert not thread.is_alive()


def test_a_program_that_waits_for_no_answer_is_named() -> None:
    def impatient(talk: Talk) -> None:
        with pytest.raises(openai.APITimeoutError):
            talk.ask(timeout=0.2)

    with pytest.raises(KeelError, match=r"prompt 'p0', completion 0\) waited for no answer"):
        run(YES, pair(talking(impatient), wait_for_end))


def test_an_answer_that_the_program_capped_is_not_truncated() -> None:
    """Finish "length" means that the budget of the completion is spent."""

    def program(talk: Talk) -> None:
        talk.ask(max_tokens=2)
        talk.ask(USER, max_tokens=3 if talk.given.prompt_id == "p0" else 50)

    engine = SpellingEngine(lambda name, turn: "ok" if turn == 0 else "a long answer")
    # 2 and the 12 of "\nu:more<eos>\na:" before the last
    groups = run(engine, talking(program), tokens=20)
    assert [group.completions[0].finish for group in groups] == ["stop", "length"]
    for limit, finish in ((20, "eos"), (2, "length")):
        once = talking(lambda talk, limit=limit: talk.ask(max_tokens=limit) and None)
        (first, _) = run(engine, once, tokens=limit)
        assert first.completions[0].finish == finish


def test_a_template_without_turns_keeps_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be the token that the policy wrote last."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", template)

    def program(talk: Talk) -> None:
        talk.ask(max_tokens=1)
        talk.ask({**USER, "content": "5678"})

    for group in run(SpellingEngine(lambda name, turn: "5"), talking(program)):
        completion = group.completions[0]
        assert TOKENIZER.decode(completion.tokens[~completion.written]) == "5678"


@pytest.mark.parametrize(
    ("end", "finish"),
    [
        (lambda talk, refused: None, "length"),
        (lambda talk, refused: _raise(refused), "length"),
        (lambda talk, refused: _raise(ValueError("the agent failed"), refused), "length"),
        (lambda talk, refused: _raise(ExceptionGroup("tasks", [refused])), "length"),
        (lambda talk, refused: _raise(ValueError(f"the agent said {refused}")), "length"),
        (lambda talk, refused: 1 / 0, "raised ZeroDivisionError"),
        (lambda talk, refused: talk.ask(USER) and None, "eos"),
        (lambda talk, refused: talk.ask(USER) and _raise(refused), "raised BadRequestError"),
    ],
    ids=["returns", "raises", "cause", "group", "text", "fault", "shorter", "later"],
)
def test_a_program_may_raise_where_no_budget_is_left(end: Any, finish: str) -> None:
    """Nothing else that it raises is ignored, and a shorter request goes on."""

    def program(talk: Talk) -> None:
        talk.ask()
        with pytest.raises(openai.BadRequestError, match="no token is left") as caught:
            talk.request([*talk.messages, {**USER, "content": "9" * 500}])
        end(talk, caught.value)

    if finish.startswith("raised"):
        with pytest.raises(KeelError, match=finish):
            run(YES, talking(program), tokens=200)
    else:
        groups = run(YES, talking(program), tokens=200)
        assert {group.completions[0].finish for group in groups} == {finish}


def _raise(error: Exception, cause: Exception | None = None) -> None:
    raise error from cause


def test_a_program_that_repeats_a_request_is_named() -> None:
    """Its answer stays the same, so an agent that wants another one would ask for ever."""

    def program(talk: Talk) -> None:
        while True:
            assert talk.request(talk.messages)["content"] == "yes"

    with pytest.raises(KeelError, match="append a message to the conversation"):
        run(YES, talking(program))


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (None, "its last one repeats the one before"),
        ([USER], "its last one was refused: messages[0] differs"),
    ],
)
def test_a_silent_program_is_named_with_its_last_request(messages: Any, line: str) -> None:
    """A program that catches the refusal, and one that waits after a repeated request."""

    def program(talk: Talk) -> None:
        first = talk.given.messages
        talk.request(first)
        with suppress(openai.BadRequestError):
            talk.request(messages or first)
        wait_for_end(talk.given)

    with pytest.raises(Hung) as caught:
        run(YES, talking(program), timeout=1)
    assert "makes no request within 1 s" in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.parametrize("value", [True, np.float32(0.5), Fraction(1, 2)])
def test_any_real_number_is_a_reward(value: Any) -> None:
    def program(talk: Talk) -> Any:
        talk.ask()
        return value if talk.given.prompt_id == "p0" else {"reward": value}

    groups = run(YES, talking(program))
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
        run(YES, program, timeout=0.3, limit=1)
    assert "'mine:run' (prompt 'p0', completion 0)" in str(caught.value)


def test_program_that_raises_after_an_answer_is_skipped() -> None:
    def program(talk: Talk) -> dict[str, float]:
        talk.ask()
        if talk.given.index == 1:
            raise OSError("the tool is down")
        return {"reward": 1.0}

    groups = run(YES, talking(program), n=3, skips=True)
    failed = ["", "OSError: the tool is down", ""]
    assert [[one.failed for one in group.completions] for group in groups] == [failed, failed]
    assert all(len(one) for group in groups for one in group.completions)
    with pytest.raises(KeelError, match="raised ZeroDivisionError"):
        run(YES, lambda given: 1 / 0, skips=True)
    with pytest.raises(KeelError, match="the tool is down"):
        run(YES, talking(program), n=3)
