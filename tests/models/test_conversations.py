"""What is trained is what is served: tokens equal to `apply_chat_template`, for every template."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from keel.engines.endpoint.protocol import ChatRequest
from keel.engines.endpoint.session import Session
from keel.engines.multi_turn import generate_multi_turn
from keel.models.chat import ChatEncoder, encode, encode_answer
from keel.models.reward import Reader
from keel.models.text import decode, encode_text
from keel.types import Completion, Message, Prompt, Sampling
from tests.engines.scripted import ScriptedEngine
from tests.models.published_templates import CHATML, FAMILIES, tokenizer_of

NAMES = sorted(FAMILIES)
ASK = (Message(role="user", content="What is 12 + 18?"),)
ANSWERS = ("30", "It is 30.\n\nReally: 日本 30", "12 + 18\n= 30", "", "a < b > [inst]", "<end> of")
"""Answers that no template changes."""


def rendered(tokenizer: Any, messages: Any, generate: bool = False, **keywords: Any) -> list[int]:
    found = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=generate, return_dict=True, **keywords
    )
    return list(found["input_ids"])


def with_answer(name: str, answer: str) -> list[int]:
    """The conversation with the answer, as the template writes it, to the end of its turn."""
    tokenizer = tokenizer_of(name)
    tokens = rendered(tokenizer, [*ASK, Message(role="assistant", content=answer)])
    end = tokenizer.convert_tokens_to_ids(FAMILIES[name].end_of_turn)
    return tokens[: len(tokens) - tokens[::-1].index(end)]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_the_templates(name: str) -> None:
    tokenizer = tokenizer_of(name)
    talk = (*ASK, Message(role="assistant", content="30"), Message(role="user", content="Sure?"))
    for messages in (ASK, talk):
        prompt = encode(Prompt("p", messages), tokenizer, {})
        assert list(prompt.tokens) == rendered(tokenizer, messages, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_are_closed_as_the_template_closes_them(name: str, answer: str) -> None:
    """In SFT and DPO up to the end of the turn, for outcome models to the end of the text."""
    tokenizer = tokenizer_of(name)
    found = encode_answer(ASK, answer, "row", ChatEncoder(tokenizer))
    assert found.prompt + found.answer == with_answer(name, answer)
    assert Reader(tokenizer).answer(ASK, answer, "row").tokens == tuple(with_answer(name, answer))
    whole = rendered(tokenizer, [*ASK, Message(role="assistant", content=answer)])
    outcome = Reader(tokenizer, closing=True).answer(ASK, answer, "row")
    assert outcome.tokens == tuple(whole)


@pytest.mark.parametrize("name", NAMES)
def test_steps_stand_in_the_templates_turn(name: str) -> None:
    """Each step's tokens end where it ends, and the last step with the turn."""
    tokenizer = tokenizer_of(name)
    steps = ["12 + 18\n", "= 20 + 10\n", "= 30"]
    found = Reader(tokenizer).steps(ASK, steps, "row")
    assert found.tokens == tuple(with_answer(name, "".join(steps)))
    assert len(found.ends) == 3
    assert found.ends[-1] == len(found.tokens) - 1
    text = tokenizer.decode(found.tokens[found.begins : found.ends[1] + 1])
    assert text == "12 + 18\n= 20 + 10\n"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["reply", "program"])
def test_three_turns_read_as_the_template_writes_them(name: str, case: str) -> None:
    """The policy's tokens stay, and what comes between them is the template's."""
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    chat = ChatEncoder(tokenizer)
    words = ["go north", "go east", "found it"]
    replies = ["north wall", "a door <b>"]
    opening = chat.opening
    close = "</think>" if "<think>" in opening else "</reasoning>"
    turns = [f"so{close}{word}" if opening else word for word in words]
    if name == "gpt-oss":
        turns = [f"<|channel|>final<|message|>{word}" for word in words]
    end = tokenizer.convert_tokens_to_ids(family.end_of_turn)
    prompt = encode(Prompt("p", ASK, task="maze"), tokenizer, {})
    made = [[*encode_text(turn, "t", tokenizer), end] for turn in turns]
    if case == "reply":
        tokens, written, texts = _by_replies(prompt, made, replies, chat)
    else:
        tokens, written, texts = _by_requests(prompt, made, replies, chat)
    assert [t for t, w in zip(tokens, written, strict=True) if w] == [
        t for ids in made for t in ids
    ]
    assert texts == [decode(tokenizer, [ids])[0] for ids in made]
    expected = [*prompt.tokens, *made[0]]
    talk: list[Message] = [*ASK]
    for word, reply, ids in zip(words, replies, made[1:], strict=False):
        talk += [Message(role="assistant", content=word), Message(role="user", content=reply)]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        between = text.rpartition(word)[2]
        if family.end_of_turn == "<|return|>":  # a recorded token, which history closes otherwise
            between = between.removeprefix("<|end|>")
        else:
            between = between.removeprefix(family.end_of_turn)
        if family.end_of_turn in family.strips:
            between = between.lstrip()
        expected += [*tokenizer(between, add_special_tokens=False)["input_ids"], *ids]
    assert [*prompt.tokens, *tokens] == expected


def _by_replies(prompt: Prompt, made: list[list[int]], replies: list[str], chat: ChatEncoder):
    class Maze:
        name = "maze"

        def reply(self, prompt: Prompt, text: str) -> str | None:
            return next((r for r in replies if r not in text), None)

    engine = _Recorded(made, chat.tokenizer)
    [group] = generate_multi_turn(
        engine,  # type: ignore[arg-type]
        [prompt],
        1,
        Sampling(3000),
        0,
        tasks={"maze": Maze()},  # type: ignore[dict-item]
        chat=chat,
        max_turns=3,
    )
    [found] = group.completions
    assert [t["content"] for t in found.turns if t["role"] == "environment"] == replies
    texts = [t["content"] for t in found.turns if t["role"] == "assistant"]
    return found.tokens.tolist(), found.written.tolist(), texts


def _by_requests(prompt: Prompt, made: list[list[int]], replies: list[str], chat: ChatEncoder):
    engine = _Recorded(made, chat.tokenizer)
    session = Session(prompt, "p/0", chat, 3000, None)
    messages: tuple[dict[str, Any], ...] = tuple(dict(turn) for turn in ASK)
    for reply in [*replies, None]:
        session.prepare(ChatRequest(messages))
        [group] = engine.sample([session.asked], 1, Sampling(3000), 0)
        message = session.add(group.completions[0])["choices"][0]["message"]
        said = {"role": "assistant", "content": message["content"]}
        messages = (*messages, said, {"role": "user", "content": reply})
    found = session.completion(len(session.first), {})
    assert session.first == list(prompt.tokens)
    texts = [t["content"] for t in found.turns if t["role"] == "assistant"]
    return found.tokens.tolist(), found.written.tolist(), texts


class _Recorded(ScriptedEngine):
    """Answers with given tokens, one turn after the other."""

    def __init__(self, made: list[list[int]], tokenizer: Any) -> None:
        super().__init__(lambda prompt, index: "", tokenizer)
        self.made = iter(made)

    def sample(self, prompts: Any, n: int, sampling: Sampling, seed: int) -> Any:
        ids = next(self.made)
        groups = super().sample(prompts, n, sampling, seed)
        return [replace(g, completions=(_completion(ids, self.tokenizer),)) for g in groups]


def _completion(ids: list[int], tokenizer: Any) -> Completion:
    n = len(ids)
    return Completion(
        np.array(ids), np.zeros(n, np.float32), np.ones(n, bool), "eos", decode(tokenizer, [ids])[0]
    )


THOUGHT = "12 + 18 is 30."


@pytest.mark.parametrize(
    ("name", "tag"), [("opened", "reasoning"), ("deepseek-r1", "think"), ("qwen3", "think")]
)
def test_thoughts_are_opened_once_and_kept(name: str, tag: str) -> None:
    """By the prompt if the template opens one there, else by the answer."""
    tokenizer = tokenizer_of(name)
    chat = ChatEncoder(tokenizer)
    prompt = encode(Prompt("p", ASK), tokenizer, {})
    written = f"{THOUGHT}\n</{tag}>\n\n30"
    whole = f"<{tag}>\n{written}"
    assert prompt.opening == ("" if name == "qwen3" else f"<{tag}>\n")
    asked = tokenizer.decode(prompt.tokens)
    end = FAMILIES[name].end_of_turn
    for answer in (whole, *([written] if prompt.opening else [])):
        found = encode_answer(ASK, answer, "row", chat)
        text = tokenizer.decode(found.prompt + found.answer)
        assert text == asked + (written if prompt.opening else whole) + end
        read = Reader(tokenizer).steps(ASK, answer.splitlines(keepends=True), "row")
        assert tokenizer.decode(read.tokens) == text


def test_special_tokens_that_a_policy_writes_are_text() -> None:
    """Only what frames a turn is left out."""
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<sol>", "</sol>"]})
    chat = ChatEncoder(tokenizer)
    ids = encode_text("So <sol>25</sol>", "t", tokenizer)
    end = tokenizer.eos_token_id
    assert decode(tokenizer, [[*ids, end, tokenizer.pad_token_id]]) == ["So <sol>25</sol>"]
    answered = encode_answer(ASK, "So <sol>25</sol>", "row", chat)
    assert answered.answer == [*ids, end]
    spelled = encode_answer(ASK, "<sol>2<|im_end|></sol>", "row", chat)
    assert spelled.answer.count(end) == 1
    assert spelled.answer[0] == ids[3]


def test_a_blank_in_front_is_not_the_answers() -> None:
    """Of tokenizers that put one before every text: answers, steps and replies."""
    alphabet = [*"=+0123456789aqw\n<>|", "▁", "▁a", "▁=", "<unk>", "<s>", "</s>"]
    inner = Tokenizer(BPE({t: i for i, t in enumerate(alphabet)}, [("▁", "a"), ("▁", "=")]))
    inner.pre_tokenizer = Metaspace(prepend_scheme="always")
    inner.decoder = MetaspaceDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    eq, five = (tokenizer.convert_tokens_to_ids(t) for t in ("=", "5"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("=5", add_special_tokens=False).input_ids) == [
        "▁=",
        "5",
    ]
    end = tokenizer.eos_token_id
    chat = ChatEncoder(tokenizer)
    assert encode_answer("q", "=5", "row", chat).answer == [eq, five, end]
    assert Reader(tokenizer).answer("q", "=5", "row").tokens[-3:] == (eq, five, end)
    steps = Reader(tokenizer).steps("q", ["=5\n", "=5"], "row").tokens
    newline = tokenizer.convert_tokens_to_ids("\n")
    assert steps[-6:] == (eq, five, newline, eq, five, end)


def test_tools_and_calls_reach_the_template() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.template
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    talk = (
        *ASK,
        Message(role="assistant", content=None, tool_calls=[call]),
        Message(role="tool", content="5 °C", tool_call_id="c1", name="weather"),
    )
    tools = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
    prompt = encode(Prompt("p", talk, tools=tools), tokenizer, {})
    assert list(prompt.tokens) == rendered(tokenizer, talk, True, tools=list(tools))
    text = tokenizer.decode(prompt.tokens)
    assert text.startswith('[{"type": "function"')
    assert '"Oslo"' in text
    read = Reader(tokenizer).answer(talk, "Cold.", "row", tools)
    assert read.tokens[: len(prompt.tokens)] == prompt.tokens
