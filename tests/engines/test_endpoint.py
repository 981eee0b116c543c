"""Programs that talk to the policy over HTTP: what is recorded, and what is refused."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from keel.engines.endpoint.programs import ProgramConfig, sample_with_program
from keel.engines.native import NativeEngine
from keel.models.build import byte_tokenizer
from keel.models.chat import ChatEncoder
from keel.platform.loop_thread import LoopThread
from keel.platform.time_limit import Hung
from keel.types import Completion, Group, KeelError, ProgramInput, Prompt, Sampling
from tests.engines.scripted import ScriptedEngine
from tests.engines.tiny import tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
TOKENIZER = byte_tokenizer(512)
TOKENIZER.chat_template = TEMPLATE
EOS = TOKENIZER.eos_token_id
PROMPTS = [Prompt(f"p{at}", [{"role": "user", "content": f"{at}+1?"}]) for at in range(3)]


def post(given: ProgramInput, messages: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    body = json.dumps({"model": given.model, "messages": messages, **keys}).encode()
    headers = {"Authorization": f"Bearer {given.api_key}"}
    url = urllib.request.Request(f"{given.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)["choices"][0]["message"]


def two_turns(given: ProgramInput) -> None:
    messages = given.messages
    messages.append(post(given, messages))
    time.sleep(random.random() * 0.02)
    messages.append({"role": "tool", "content": "tool says <eos> 7", "tool_call_id": "x"})
    post(given, messages)


def sample(engine: Any, program: Any, n: int = 2, tokens: int = 80, **keys: Any) -> list[Group]:
    keys = {"limit": 4, "timeout": 60.0, **keys}
    config = ProgramConfig(name="mine:run", function=program, **keys)
    return sample_with_program(
        engine,
        PROMPTS,
        n,
        Sampling(tokens),
        3,
        program=config,
        chat=ChatEncoder(TOKENIZER),
        loop=LoopThread(),
    )


def engine() -> NativeEngine:
    options = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 512, "eos_token_id": EOS}
    return NativeEngine(tiny("llama", **options), TOKENIZER)


def plain(groups: list[Group]) -> list[tuple[Any, ...]]:
    def one(c: Completion) -> tuple[Any, ...]:
        return c.tokens.tobytes(), c.log_probs.tobytes(), c.written.tobytes(), c.finish, c.turns

    return [(g.prompt.tokens, *map(one, g.completions)) for g in groups]


def test_time_changes_nothing() -> None:
    def program(given: ProgramInput) -> None:
        try:
            two_turns(given)
        except urllib.error.HTTPError as error:
            error.close()

    once = plain(sample(engine(), program))
    assert plain(sample(engine(), program, limit=4)) == once


def hangs(given: ProgramInput) -> None:
    time.sleep(5)


@pytest.mark.parametrize(
    ("program", "line", "kind"),
    [
        (lambda given: 1 / 0, "raised ZeroDivisionError", KeelError),
        (lambda given: None, "made no request", KeelError),
        (hangs, "makes no request within 0.3 s", Hung),
    ],
)
def test_programs_that_fail_are_named(program: Any, line: str, kind: type[Exception]) -> None:
    scripted = ScriptedEngine(lambda prompt, index: "yes", TOKENIZER)
    with pytest.raises(kind, match=line) as caught:
        sample(scripted, program, timeout=0.3, limit=1)
    assert "'mine:run' (prompt 'p0', completion 0)" in str(caught.value)


def test_program_that_raises_after_an_answer_is_skipped() -> None:
    def program(given: ProgramInput) -> dict[str, float]:
        post(given, given.messages)
        if given.index == 1:
            raise OSError("the tool is down")
        return {"reward": 1.0}

    scripted = ScriptedEngine(lambda prompt, index: "yes", TOKENIZER)
    groups = sample(scripted, program, n=3, skips=True)
    failed = "OSError: the tool is down"
    assert [[one.failed for one in group.completions] for group in groups] == [
        ["", failed, ""] for _ in PROMPTS
    ]
    assert all(len(one) for group in groups for one in group.completions)
    with pytest.raises(KeelError, match="raised ZeroDivisionError"):
        sample(scripted, lambda given: 1 / 0, skips=True)
    with pytest.raises(KeelError, match="the tool is down"):
        sample(scripted, program, n=3)
