"""A conversation in the terminal: its turns, what is dropped, and text that arrives in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from keel.cli.chat import _Shown
from keel.engines.chat import Chat
from keel.engines.native import NativeEngine
from keel.models.chat import ChatEncoder
from keel.models.text import GrowingText, decode
from keel.types import KeelError, Prompt, Sampling
from tests.engines.spelling import EOS, TOKENIZER
from tests.engines.test_compiled import model_of

CONTEXT = 200
GREEDY = Sampling(20, 0.0)


def engine_of() -> NativeEngine:
    size = {"vocab_size": len(TOKENIZER), "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
    return NativeEngine(model_of("llama", **size), TOKENIZER)


def test_turns_are_encoded_whole_and_the_oldest_dropped() -> None:
    engine, encoder = engine_of(), ChatEncoder(TOKENIZER)
    system = {"role": "system", "content": "Be brief."}
    messages: list[Any] = []
    gone = 0
    with engine.conversation() as source:
        chat = Chat(source, encoder, GREEDY, system="Be brief.")
        for number in range(9):
            messages.append({"role": "user", "content": f"What is {number} + {number}?"})
            pieces: list[str] = []
            reply = chat.ask(messages[-1]["content"], pieces.append)
            gone += reply.dropped
            tokens = encoder.prompt([system, *messages[gone:]], "it", mask=True)
            assert len(tokens) <= CONTEXT * 7 / 8
            prompt = Prompt("p", "", tokens=tuple(tokens))
            (group,) = engine.sample([prompt], 1, replace(GREEDY), 0)
            assert reply.text == group.completions[0].text == "".join(pieces)
            assert reply.finish == group.completions[0].finish
            messages.append({"role": "assistant", "content": reply.text})
        assert gone > 0
        with pytest.raises(KeelError, match=r"context is 200: shorten it"):
            chat.ask("1" * 300, pieces.append)
        assert not chat.ask("again", pieces.append).dropped % 2


def test_a_stopped_answer_stays_in_the_conversation() -> None:
    engine = engine_of()
    with engine.conversation() as source:
        chat = Chat(source, ChatEncoder(TOKENIZER), Sampling(100, 0.0))
        pieces: list[str] = []
        reply = chat.ask("Go on", pieces.append, lambda: len("".join(pieces)) > 5)
        assert reply.finish is None
        assert 5 < len(reply.text) < 60
        assert chat._turns[1] == {"role": "assistant", "content": reply.text}
        chat.reset()
        assert not chat._turns


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
@example([TOKENIZER.convert_tokens_to_ids("Ġ"), EOS, 200, 200] * 50)
def test_growing_text_is_the_text(tokens: list[int]) -> None:
    growing = GrowingText(TOKENIZER)
    pieces = [growing.add([token]) for token in tokens]
    assert "".join(pieces) + growing.end() == decode(TOKENIZER, [tokens])[0]


def test_growing_text_keeps_blanks_before_words() -> None:
    """Tokenizers with a blank in each word's token drop that of the first."""
    words = ["▁on", "e", "▁two", "▁", "s"]
    inner = Tokenizer(token_models.BPE({word: at for at, word in enumerate(words)}, []))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    growing = GrowingText(tokenizer)
    shown = "".join(growing.add([token]) for token in (0, 1, 2, 4, 2, 3, 4))
    assert shown == decode(tokenizer, [[0, 1, 2, 4, 2, 3, 4]])[0] == "one twos two s"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="añ€🙂 \n", max_size=12))
def test_growing_text_shows_whole_characters(text: str) -> None:
    growing = GrowingText(TOKENIZER)
    shown = ""
    for token in TOKENIZER(text).input_ids:
        shown += growing.add([token])
        assert text.startswith(shown)
    assert shown == text


def test_thoughts_are_dim_and_controls_visible() -> None:
    text = "a<b <think>2\x1b[31m+2\nis 4</think>\nIt is 4 <th"
    for size in (1, 3, 100):
        shown = _Shown(thinks=False)
        parts = [shown.add(text[at : at + size]) for at in range(0, len(text), size)]
        whole = "".join(parts) + shown.add("", last=True)
        dim = "\x1b[2m<think>2\\x1b[31m+2\nis 4</think>\x1b[0m"
        assert whole == f"a<b {dim}\nIt is 4 <th"
    assert _Shown(thinks=True).add("x", last=True) == "\x1b[2mx\x1b[0m"
