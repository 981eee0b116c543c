from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from keel.models.chat import Encoder, encode
from keel.types import KeelError, Prompt

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if mode is defined %}{{ mode }} {% endif %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "system", "user", "assistant", "hi", "you", "slow"]


def tokenizer(frame: str = "$A", template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of words, which puts `frame` round plain text."""
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(
        single=frame, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("frame", "tokens"),
    [("$A", (7, 8)), ("<s> $A", (1, 7, 8)), ("<s> $A </s>", (1, 7, 8)), ("$A </s>", (7, 8))],
)
def test_plain_text_keeps_bos_and_never_ends_in_eos(frame: str, tokens: tuple[int, ...]) -> None:
    prompt = Prompt("p", "hi you", {"n": 1}, "task")
    encoded = encode(prompt, tokenizer(frame), {})
    assert encoded == Prompt("p", "hi you", {"n": 1}, "task", tokens)
    assert prompt.tokens == ()


def test_plain_text_is_the_users_turn_where_there_is_a_chat_template() -> None:
    made = tokenizer("<s> $A", TEMPLATE)
    turn = ({"role": "user", "content": "hi you"},)
    asked = encode(Prompt("p", "hi you"), made, {})
    assert asked.tokens == encode(Prompt("p", turn), made, {}).tokens == (5, 7, 8, 6)  # type: ignore[arg-type]
    assert asked.content == turn
    raw = encode(Prompt("p", "hi you"), made, {}, raw=True)
    assert (raw.content, raw.tokens) == ("hi you", (1, 7, 8))


def test_an_encoder_reads_the_plain_prompts_of_raw_tasks_as_they_stand() -> None:
    encoder = Encoder(tokenizer("<s> $A", TEMPLATE), raw=["text"])
    for task, tokens in (("text", (1, 7)), ("talk", (5, 7, 6))):
        encoded = encoder(Prompt("p", "hi", task=task))
        assert encoded is not None
        assert encoded.tokens == tokens


def test_messages_go_through_the_template_with_its_arguments() -> None:
    content = ({"role": "system", "content": "you"}, {"role": "user", "content": "hi"})
    made = tokenizer(template=TEMPLATE)
    prompt = Prompt("p", content)  # type: ignore[arg-type]
    assert encode(prompt, made, {}).tokens == (4, 8, 5, 7, 6)
    assert encode(prompt, made, {"mode": "slow"}).tokens == (4, 8, 5, 7, 9, 6)
    # The template writes its own special tokens.
    framed = tokenizer("<s> $A </s>", TEMPLATE)
    assert encode(prompt, framed, {}).tokens == (4, 8, 5, 7, 6)


def user(content: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": content},)


@pytest.mark.parametrize(
    ("content", "template", "says"),
    [
        (user("hi"), None, "has no chat template: set model.chat_template"),
        ("", None, "no tokens"),
        ((), TEMPLATE, "no messages"),
        ((*user("hi"), {"role": "assistant", "content": "x"}), TEMPLATE, "the assistant's turn"),
        (user("hi"), "{{ raise_exception('only systems') }}", "only systems"),
        (user("hi"), "{{ 1 / }}", "the chat template fails"),
        ("hi there", None, "which the tokenizer does not know"),
    ],
)
def test_what_cannot_be_encoded_is_named(content: object, template: str | None, says: str) -> None:
    with pytest.raises(KeelError) as error:
        encode(Prompt("data/train/3", content), tokenizer(template=template), {})  # type: ignore[arg-type]
    assert says in str(error.value)
    assert "data/train/3" in str(error.value)
    assert "\n" not in str(error.value)


def test_too_long_prompts_are_left_out() -> None:
    encoder = Encoder(tokenizer(), max_tokens=3)
    kept = encoder(Prompt("p", "hi you hi"))
    assert kept is not None
    assert kept.tokens == (7, 8, 7)
    assert encoder(Prompt("p", "hi you hi you")) is None
    assert Encoder(tokenizer())(Prompt("p", "hi " * 500)) is not None
