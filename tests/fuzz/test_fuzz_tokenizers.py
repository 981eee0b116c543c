"""Odd tokenizers: no character is lost without an error, and long prompts are left out."""

from __future__ import annotations

import pytest

from keel.models.chat import Encoder
from keel.models.reward import Reader
from keel.models.text import encode_text
from keel.types import KeelError, Prompt
from tests.fuzz.tokenizers import made


def test_unknown_character_is_named_and_written_unknown_token_is_not() -> None:
    tokenizer = made("eos added")
    assert encode_text("a<unk>", "it", tokenizer)
    for text in ("aé", "<unk>é", "é<unk>"):
        with pytest.raises(KeelError, match="it holds 'é', which the tokenizer does not know"):
            encode_text(text, "it", tokenizer)
    assert Reader(tokenizer).answer("a", "<unk>", "row")
    with pytest.raises(KeelError, match="holds 'é'"):
        Reader(tokenizer).answer("a", "<unk>é", "row")
    with pytest.raises(KeelError, match="holds 'c', which"):
        encode_text("a c", "it", made("no pad"))


@pytest.mark.parametrize("name", ["bytes", "no pad", "bos is eos"])
def test_encoder_leaves_out_long_and_forgiven_prompts(name: str) -> None:
    notes: list[str] = []
    tokenizer = made(name)
    encoder = Encoder(tokenizer, 1, forgiven=["lenient"], note=notes.append)
    long = Prompt("x/1", "a b a b a b", task="lenient")
    half = Prompt("x/2", "\ud800", task="lenient")
    assert encoder(long) is None
    assert encoder(half) is None
    (note,) = notes  # the first of a task, and no other
    assert note.startswith("prompt left out, others of 'lenient' like it are counted only: ")
    assert "'x/1'" in note
    assert encoder(Prompt("y/1", "a b a b a b", task="strict")) is None
    assert len(notes) == 2
    with pytest.raises(KeelError, match="'y/2'"):
        encoder(Prompt("y/2", "\ud800", task="strict"))
    for prompt, why in ((long, "long"), (half, "bad")):
        found = encoder.wrong(prompt)
        assert found is not None
        assert found[1] == why
    assert Encoder(tokenizer, 99).wrong(Prompt("z", "a", task="strict")) is None
