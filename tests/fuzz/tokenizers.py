"""Odd tokenizers, and what must hold of a text that they encode."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from keel.models.build import byte_tokenizer, character_tokenizer
from keel.models.chat import Encoder
from keel.models.reward import Reader
from keel.models.text import decode
from keel.types import KeelError, Prompt
from tests.fuzz.held import OK, REFUSED, Fault, Outcome, one_line

CONTEXT = 64
LETTERS = "".join(map(chr, range(32, 127)))
CHATS = {
    "none": None,
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "raises": "{{ raise_exception('no') }}",
    "loops": "{% for i in range(20000) %}a{% endfor %}",
    "too far": "{% for i in range(10 ** 9) %}a{% endfor %}",
    "nothing": "",
    "special": "{% for m in messages %}<eos>{{ m.content }}<pad>{% endfor %}<eos>",
    "broken": "{% for m in messages %}{{ m.nothing.at.all }}",
    "escapes": "{{ messages.__class__.__mro__ }}",
}


def _whole(tokenizer: Tokenizer, **special: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )


def _words(*words: str, unk: str | None = "<unk>") -> Tokenizer:
    names = [*([unk] if unk else []), "<pad>", "<eos>", "<s>", *words]
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unk or "<none>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def _pieces() -> Tokenizer:
    letters = {c: n for n, c in enumerate(["<unk>", "<eos>", *LETTERS, "he", "hel"])}
    return Tokenizer(
        models.BPE(letters, [("h", "e"), ("he", "l")], unk_token="<unk>", fuse_unk=True)
    )


def _unigram() -> Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        ("<eos>", 0.0),
        ("<pad>", 0.0),
        *((c, -3.0) for c in "▁" + LETTERS),
        ("an", -2.0),
    ]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def _closed(tokenizer: Tokenizer, before: str, after: str) -> Tokenizer:
    ids = [(t, tokenizer.token_to_id(t)) for t in {before, after} if t]
    single = [t for t in (before, "$A", after) if t]
    tokenizer.post_processor = processors.TemplateProcessing(" ".join(single), special_tokens=ids)
    return tokenizer


MADE = {
    "bytes": lambda: byte_tokenizer(CONTEXT),
    "characters": lambda: character_tokenizer(LETTERS + "é€", CONTEXT),
    "no pad": lambda: _whole(_words("a", "b"), eos_token="<eos>", unk_token="<unk>"),
    "pad is eos": lambda: _whole(
        _unigram(), eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    ),
    "no eos": lambda: _whole(_pieces(), unk_token="<unk>"),
    "no unk": lambda: _whole(_words("a", "b", unk=None), eos_token="<eos>", pad_token="<pad>"),
    "nothing": lambda: _whole(_words("a", "b", unk=None)),
    "eos added": lambda: _whole(
        _closed(_unigram(), "", "<eos>"), eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ),
    "bos is eos": lambda: _whole(
        _closed(_pieces(), "<eos>", "<eos>"),
        bos_token="<eos>",
        eos_token="<eos>",
        unk_token="<unk>",
    ),
    "unk is eos": lambda: _whole(
        _pieces(), eos_token="<unk>", unk_token="<unk>", pad_token="<unk>"
    ),
}
LOSSLESS = ("bytes", "characters")


@cache
def made(name: str, chat: str = "none") -> Any:
    """One of the tokenizers, with one of the chat templates."""
    tokenizer = MADE[name]()
    tokenizer.chat_template = CHATS[chat]
    return tokenizer


def encoded(name: str, chat: str, content: Any, answer: str, steps: list[str]) -> Outcome:
    """A prompt and answers to it become tokens that decode, or one line states why not."""
    tokenizer = made(name, chat)
    made_of = 0
    try:
        prompt = Encoder(tokenizer)(Prompt("p", content))
        assert prompt is not None
        _tokens(tokenizer, prompt.tokens)
        made_of += 1
    except KeelError as error:
        one_line(error)
    for text, read in (
        (answer, lambda reader: reader.answer("a", answer, "row")),
        ("".join(steps), lambda reader: reader.steps("a", steps, "row")),
        (answer, lambda reader: reader.split(content, answer, "\n", "row")),
    ):
        try:
            found = read(Reader(tokenizer, CONTEXT))
        except KeelError as error:
            one_line(error)
            continue
        made_of += 1
        _tokens(tokenizer, found.tokens)
        if not all(0 <= end < len(found.tokens) for end in found.ends):
            raise Fault(f"ends {found.ends} of {len(found.tokens)} tokens")
        read_back = decode(tokenizer, [found.tokens[found.begins :]])[0]
        # A template without a generation prompt leaves the header of the turn to the answer.
        header = "assistant: " if chat == "plain" else ""
        if name in LOSSLESS and read_back.removeprefix(header) != text.removeprefix(header):
            raise Fault(f"{text!r} is read as {read_back!r}")
    return Outcome(OK if made_of else REFUSED)


def _tokens(tokenizer: Any, tokens: tuple[int, ...]) -> None:
    if not tokens or not all(isinstance(t, int) and 0 <= t < len(tokenizer) for t in tokens):
        raise Fault(f"tokens {tokens[:20]!r}")
    decode(tokenizer, [tokens])
