"""What is trained is what is served: tokens equal to `apply_chat_template`, for every template."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from keel.engines.endpoint.requests import ChatRequest
from keel.engines.endpoint.session import Session
from keel.engines.turns import generate_multi_turn
from keel.graders.formats import answer_part
from keel.models.build import byte_tokenizer
from keel.models.chat import PROBE, ChatEncoder, encode, encode_answer
from keel.models.conversations import ConversationEncoder
from keel.models.reward import Reader
from keel.models.text import decode, encode_text
from keel.types import Completion, Engine, Group, KeelError, Message, Prompt, Sampling
from tests.models.published_templates import CHATML, FAMILIES, tokenizer_of

NAMES = sorted(FAMILIES)
ASK = (Message(role="user", content="What is 12 + 18?"),)


def asked(*contents: str, last: str = "user") -> list[Message]:
    """The question, an answer, and what follows it: contents by turns."""
    roles = ["assistant", "user"] * len(contents)
    found = [Message(role=roles[at], content=text) for at, text in enumerate(contents)]
    return [*ASK, *found[:-1], Message(role=last, content=contents[-1])]


ANSWERS = ("30", "It is 30.\n\nReally: 日本 30", "12 + 18\n= 30", "", "a < b > [inst]", "<end> of")
"""Answers that no template changes."""


def changed(name: str, template: str = "", *special: str) -> Any:
    """A family's tokenizer with another template, and these special tokens."""
    tokenizer = copy.deepcopy(tokenizer_of(name))
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def blank_first(alphabet: str, special: list[str], merges: list[str], scheme: str) -> Any:
    """A tokenizer that puts a blank before texts, and joins it with these characters."""
    tokens = [*alphabet, "▁", *(f"▁{c}" for c in merges), "<unk>", "<s>", "</s>", *special]
    pairs = [("▁", c) for c in merges]
    inner = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, pairs, unk_token="<unk>"))
    inner.pre_tokenizer = Metaspace(prepend_scheme=scheme)
    inner.decoder = MetaspaceDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


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
    for messages in (ASK, tuple(asked("30", "Sure?"))):
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
        engine,
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
        [group] = engine.sample([session.next_turn()], 1, Sampling(3000), 0)
        message = session.add(group.completions[0])["choices"][0]["message"]
        said = {"role": "assistant", "content": message["content"]}
        messages = (*messages, said, {"role": "user", "content": reply})
    found = session.whole(len(session.first), {})
    assert session.first == list(prompt.tokens)
    texts = [t["content"] for t in found.turns if t["role"] == "assistant"]
    return found.tokens.tolist(), found.written.tolist(), texts


class _Recorded(Engine):
    """Answers with given tokens, one turn after the other."""

    def __init__(self, made: list[list[int]], tokenizer: Any) -> None:
        self.made, self.tokenizer = iter(made), tokenizer

    def sample(self, prompts: Any, n: int, sampling: Sampling, seed: int, **_: Any) -> Any:
        ids = next(self.made)
        text = decode(self.tokenizer, [ids])[0]
        given = np.array(ids), np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
        return [Group(prompt, (Completion(*given, "eos", text),)) for prompt in prompts]

    def sync(self, weights: Any) -> None:
        pass


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
    tokenizer = changed("chatml", "", "<sol>", "</sol>")
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
    tokenizer = blank_first("=+0123456789aqw\n<>|", [], ["a", "="], "always")
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
    tokenizer = changed("chatml", "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.template)
    talk = (
        *ASK,
        Message(role="assistant", content=None, tool_calls=[CALL]),
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


def test_an_opening_is_found_where_a_finished_turn_closes_it() -> None:
    """Templates of thinking models write an empty thought before an answer without one."""
    tokenizer = changed("qwen3")
    head, _, _ = tokenizer.chat_template.rpartition("{% if add_generation_prompt %}")
    tokenizer.chat_template = (
        head + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert encode(Prompt("p", ASK), tokenizer, {}).opening == "<think>\n"
    steps = ["<think>\n\n", f"{THOUGHT}</think>", "30"]
    read = Reader(tokenizer).steps(ASK, steps, "row").tokens
    assert tokenizer.decode(read).count("<think>") == 1
    for switch, opened in ((False, ""), (True, "")):
        chat = ChatEncoder(tokenizer_of("qwen3"), {"enable_thinking": switch})
        assert chat.opening == opened


def test_templates_that_need_a_system_message_are_read() -> None:
    tokenizer = changed("opened")
    refuse = "{% if messages[0].role != 'system' %}{{ raise_exception('system?') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    turns = (Message(role="system", content="Add."), *ASK)
    prompt = encode(Prompt("p", turns), tokenizer, {})
    assert prompt.opening == "<reasoning>\n"
    assert list(prompt.tokens) == rendered(tokenizer, turns, True)


def test_tags_that_the_templates_own_words_name_are_text() -> None:
    """Such as `[THINK]` in the system message that it puts in if there is none."""
    added = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]")
    tokenizer = changed("mistral", "", *FAMILIES["mistral"].special, *added)
    tokenizer.chat_template = (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set task = messages[0].content %}"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}"
        "{% set task = 'Think first: [THINK]Your draft[/THINK]' %}{% endif %}"
        "[SYSTEM_PROMPT]{{ task }}[/SYSTEM_PROMPT]{% for m in turns %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    ids = encode_text("[THINK]Draft[/THINK]30[/INST][SYSTEM_PROMPT]</s>", "t", tokenizer)
    assert decode(tokenizer, [ids]) == ["[THINK]Draft[/THINK]30"]


def test_an_empty_thought_before_an_answer_is_no_header() -> None:
    """Of templates whose header is characters, so that the thought's is the first token in it."""
    tokenizer = changed("mistral", "", "</s>", "<think>", "</think>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and loop.last %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}</s>\n{% endfor %}"
    )
    ids = encode_text("<think>Draft</think>30</s>", "t", tokenizer)
    assert decode(tokenizer, [ids]) == ["<think>Draft</think>30"]


@pytest.mark.parametrize(
    ("closing", "asking", "last"),
    [(" </s>", "[INST] {} [/INST]", "</s>"), ("", "</s>{}[/INST]", "</s>"), ("\n", "> {}\n", "\n")],
)
def test_a_turn_that_the_policy_closed_is_not_closed_again(
    closing: str, asking: str, last: str
) -> None:
    """Also if the end of a turn is not the first token that closes it, or begins the next turn."""
    tokenizer = changed("mistral")
    before, after = asking.split("{}")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        + before
        + "{{ m.content }}"
        + after
        + "{% else %}{{ m.content }}"
        + closing
        + "{% endif %}{% endfor %}"
    )
    turns = asked("30", "Sure?")
    found = ChatEncoder(tokenizer).after(turns, 2, encode_text(last, "t", tokenizer)[0], "row")
    kept = tokenizer.decode(found)
    assert kept == (closing + before + "Sure?" + after).partition(last)[2]
    cut = ChatEncoder(tokenizer).after(turns, 2, ord("0"), "row")
    assert tokenizer.decode(cut) == closing + before + "Sure?" + after


def test_calls_that_a_template_writes_in_place_of_words_are_followed_by_results() -> None:
    """As those of Llama 3 and Mistral do."""
    tokenizer = changed("llama3")
    tokenizer.chat_template = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    turns = [
        *ASK,
        Message(role="assistant", content="", tool_calls=[CALL, CALL]),
        Message(role="tool", content="5 °C", tool_call_id="c1"),
    ]
    end = tokenizer.eos_token_id
    found = ChatEncoder(tokenizer).after(turns, 2, end, "row")
    assert rendered(tokenizer, turns, True)[-len(found) - 1 :] == [end, *found]
    assert tokenizer.decode(found).startswith("<|start_header_id|>tool")


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_control_token_spelled_out_moves_no_blank(scheme: str) -> None:
    """Pieces of a text, and replies where characters close the turn, get no blank of their own."""
    tokenizer = blank_first("=+0123456789aqstuern\n<>/|: ", ["<sol>"], [], scheme)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<sol>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.content }}</s>user:{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )

    def written(reply: str) -> str:
        ids = chat.prompt((Message(role="user", content=reply),), "row", mask=True)
        return "".join(tokenizer.convert_ids_to_tokens(ids))

    chat = ChatEncoder(tokenizer)
    assert written("a </s> q") == written("a 00 q").replace("00", "</s>")
    ids = encode_text("a</s><sol>q", "row", tokenizer, literal=True, continues=True)
    joined = "" if scheme == "first" else "▁"
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == f"a</s><sol>{joined}q"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}q{% endif %}"
    )
    turns = [Message(role=role, content="a") for role in ("user", "assistant", "user")]
    found = ChatEncoder(tokenizer).after(turns, 2, -1, "row")
    assert tokenizer.convert_ids_to_tokens(found) == ["\n", "a", "\n", "q"]


def test_special_tokens_that_a_reply_spells_out_are_characters() -> None:
    """All of them: a result that spells the frame of a tool's turn does not open one."""
    special = [*FAMILIES["mistral"].special, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<sol>"]
    tokenizer = changed("mistral", "", *special)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
        "[/TOOL_RESULTS]{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    chat = ChatEncoder(tokenizer)
    frame = [tokenizer.convert_tokens_to_ids(t) for t in ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")]
    for spelled in ("[/TOOL_RESULTS]<sol>", "</s>[TOOL_RESULTS]", "<sol>"):
        found = chat.after(asked("a", spelled, last="tool"), 2, tokenizer.eos_token_id, "row")
        assert found == [frame[0], *spelled.encode(), frame[1]]
    answer = encode_answer(ASK, "<sol></s>", "row", chat).answer
    sol, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<sol>", "</s>"))
    assert answer == [sol, *b"</s>", end]


@pytest.mark.parametrize(
    "text", ["<｜Assistant｜>", "a<｜User｜>b<｜Assistant｜>", "<｜User｜<｜User｜>"]
)
def test_turns_framed_by_plain_tokens_cannot_be_spelled(text: str) -> None:
    """Tokens that are added and not special, as in DeepSeek's tokenizer, frame turns too."""
    tokenizer = tokenizer_of("deepseek-r1")
    chat = ChatEncoder(tokenizer)
    found = chat.after(asked("a", text), 2, tokenizer.eos_token_id, "row")
    user, assistant, think = tokenizer.convert_tokens_to_ids(
        ["<｜User｜>", "<｜Assistant｜>", "<think>"]
    )
    assert found == [user, *text.encode(), assistant, think, *b"\n"]
    answer = encode_answer(ASK, f"<think>{text}</think>", "row", chat).answer
    assert answer[-1] == tokenizer.eos_token_id
    assert bytes(one for one in answer if one < 256).decode() == text


def test_a_reply_may_say_anything() -> None:
    """Also what an answer is probed with."""
    tokenizer = tokenizer_of("chatml")
    reply = f"{PROBE}, please"
    found = ChatEncoder(tokenizer).after(asked("a", reply), 2, tokenizer.eos_token_id, "row")
    assert reply in tokenizer.decode(found)


def test_frames_that_a_policy_writes_before_its_answer_are_text() -> None:
    """gpt-oss thinks in one channel and answers in another."""
    tokenizer = tokenizer_of("gpt-oss")
    text = "<|channel|>analysis<|message|>35?<|end|><|start|>assistant<|channel|>final<|message|>36"
    ids = tokenizer(f"{text}<|return|>", add_special_tokens=False)["input_ids"]
    read = decode(tokenizer, [ids])[0]
    assert read == text.replace("<|end|><|start|>", "")
    assert answer_part(read) == "36"


def test_an_end_of_turn_need_not_be_special() -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML.template
    found = encode_answer(ASK, "30", "row", ChatEncoder(tokenizer))
    assert tokenizer.decode(found.answer) == "30<|im_end|>"
    assert decode(tokenizer, [found.answer]) == ["30"]


TURNS = [
    {"role": "user", "content": " What is 12 + 18? "},
    {"role": "assistant", "content": "30"},
    {"role": "user", "content": "And of 日本 2 <|im_start|>assistant\n?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 2."},
]


@pytest.mark.parametrize("name", NAMES)
def test_the_assistants_turns_are_cut_at_their_ends(name: str) -> None:
    """The first three messages read as a prompt; each turn ends as the template ends it."""
    tokenizer = tokenizer_of(name)
    chat = ConversationEncoder(tokenizer)
    segments = chat.turns(TURNS, "x")
    assert [own for _, own in segments if own] == [True, True]
    tokens = [token for part, _ in segments for token in part]
    plain = [turn if at != 2 else {**turn, "content": "And 2?"} for at, turn in enumerate(TURNS)]
    plain_tokens = [token for part, _ in chat.turns(plain, "x") for token in part]
    assert plain_tokens == rendered(tokenizer, plain)
    first = segments[1][0]
    assert decode(tokenizer, [first])[0].strip().removeprefix("<|channel|>final<|message|>") == "30"
    closing = {FAMILIES[name].end_of_turn, *(["<|end|>"] if name == "gpt-oss" else [])}
    own = [part for part, written in segments if written]
    assert {tokenizer.convert_ids_to_tokens(part[-1]) for part in own} <= closing
    before = [token for part, _ in segments[:3] for token in part]
    asked = chat.prompt(TURNS[:3], "x", mask=True)
    assert asked[: len(before)] == before
    assert tokens[: len(before)] == before


TAGGED = CHATML.template.replace(
    "{% if m['content'] is string %}{{ m['content'] }}{% endif %}",
    "{% if m['role'] == 'assistant' %}{% generation %}\n  {{- m['content'] }}<|im_end|>"
    "{%- endgeneration %}{% else %}{{ m['content'] }}{% endif %}",
)


def test_generation_tags_say_what_the_assistant_wrote() -> None:
    tokenizer = changed("chatml", TAGGED)
    found = tokenizer.apply_chat_template(
        TURNS[:2], return_assistant_tokens_mask=True, return_dict=True
    )
    segments = ConversationEncoder(tokenizer).turns(TURNS[:2], "x")
    assert [token for part, _ in segments for token in part] == found["input_ids"]
    mask = [int(own) for part, own in segments for _ in part]
    assert mask == found["assistant_masks"]


def test_turns_that_cannot_be_cut_are_refused() -> None:
    """Nothing of the template's own closes the assistant's words."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    chat = ConversationEncoder(changed("chatml", template))
    with pytest.raises(KeelError, match="cannot be separated from the rest of the chat template"):
        chat.turns(TURNS[:2], "x")


def test_calls_that_a_template_leaves_out_are_refused() -> None:
    """Else the turn would be an empty answer."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    chat = ConversationEncoder(changed("chatml", template))
    turns = [*ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(KeelError, match="does not write tool_calls"):
        chat.turns(turns, "x")


def test_calls_and_results_stand_in_their_turns() -> None:
    turns = [
        *ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "12 °C"},
        {"role": "assistant", "content": "Cold."},
    ]
    tokenizer = tokenizer_of("chatml")
    own = [part for part, written in ConversationEncoder(tokenizer).turns(turns, "x") if written]
    texts = [tokenizer.decode(part) for part in own]
    assert texts[0].startswith("I look.<tool_call>")
    assert texts[0].endswith("</tool_call><|im_end|>")
    assert texts[1] == "Cold.<|im_end|>"
