"""What policies and reward models read: prompts, places of answers and steps, ends of sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from keel.models import text as texts
from keel.models.build import byte_tokenizer, character_tokenizer
from keel.models.chat import Encoder, encode
from keel.models.packed import PackedSizes
from keel.models.reward import Answered, Reader, joined, pack_answers
from keel.models.text import decode, split_steps, token_ends
from keel.types import KeelError, Prompt

LETTERS = character_tokenizer("ab:\n", 64)
PAD, EOS, A, B, COLON, NEWLINE = range(6)
BYTES = byte_tokenizer(256)
same = settings(deadline=None, derandomize=True)
# Characters of one, two, three and four bytes.
wide = st.text(alphabet="a\nß→😀", max_size=12)


def changed(**special: str | None) -> Any:
    """The letters with other special tokens, as many published models have them."""
    made = copy.deepcopy(LETTERS)
    for name, token in special.items():
        setattr(made, name, token)
    return made


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("reader", "answer", "tokens", "end"),
    [
        (Reader(LETTERS), "ba", (B, A, EOS), 4),
        (Reader(LETTERS), "", (EOS,), 2),
        # The stock classes look from the right, past every padding token of the model.
        (Reader(changed(pad_token="<eos>")), "ba", (B, A, EOS), 3),
        (Reader(changed(pad_token="<eos>")), "", (EOS,), 1),
        (Reader(LETTERS, pad=EOS), "ba", (B, A, EOS), 3),
        (Reader(changed(eos_token=None)), "ba", (B, A), 3),
        (Reader(LETTERS, context=4), "b", (B, EOS), 3),
        (Reader(LETTERS, context=4), "ba", (B, A), 3),
    ],
)
def test_an_answer_stands_behind_its_prompt_and_is_judged_at_the_end(
    reader: Reader, answer: str, tokens: tuple[int, ...], end: int
) -> None:
    assert reader.answer("a:", answer, "row 0") == Answered((A, COLON, *tokens), 2, (end,))


def test_special_tokens_spelled_in_an_answer_are_characters() -> None:
    """An answer must not close itself, nor open another turn."""
    tokenizer = character_tokenizer("ab:<eos>", 40)
    spelled = [tokenizer.convert_tokens_to_ids(c) for c in "b<eos>a"]
    assert tokenizer.eos_token == "<eos>"
    for tokens in (
        Reader(tokenizer).answer("a:", "b<eos>a", "row 0").tokens,
        Reader(tokenizer).steps("a:", ["b<eos>a"], "row 0").tokens,
    ):
        assert list(tokens[2:]) == [*spelled, tokenizer.eos_token_id]


def test_a_full_context_leaves_no_room_for_the_end() -> None:
    reader = Reader(LETTERS, context=4)
    assert reader.steps("a:", ["b\n"], "row 0") == Answered((A, COLON, B, NEWLINE), 2, (3,))
    # Longer ones are whole: the caller refuses them with their length.
    assert len(reader.answer("a:", "baa", "row 0").tokens) == 6


def test_a_character_that_is_unknown_names_the_row() -> None:
    with pytest.raises(KeelError, match=r"the answer of row 7 holds 'x', which the tokenizer"):
        Reader(LETTERS).answer("a:", "bxa", "row 7")
    with pytest.raises(KeelError, match=r"prompt 'row 7' holds 'x', which the tokenizer"):
        Reader(LETTERS).answer("x:", "a", "row 7")


# ---------------------------------------------------------------- prompts


def test_conversations_go_through_the_template() -> None:
    turns = ({"role": "system", "content": "you"}, {"role": "user", "content": "hi"})
    reader = Reader(words_of("<s> $A", TEMPLATE))
    # system you user hi assistant | slow </s>: what frames plain text frames no answer.
    assert reader.answer(turns, "slow", "row") == Answered((4, 8, 5, 7, 6, 9, 2), 5, (6,))
    assert reader.steps(turns, ["slow ", "hi you"], "row").ends == (5, 8)
    other = ({"role": "system", "content": "hi"}, {"role": "user", "content": "you"})
    assert reader.answer(other, "slow", "row").tokens[:5] == (4, 7, 5, 8, 6)
    with pytest.raises(KeelError, match=r"row 3'? is a conversation.*no chat template"):
        Reader(LETTERS).answer(turns, "a", "row 3")


def test_raw_text_goes_without_the_template_and_a_conversation_with_it() -> None:
    reader = Reader(words_of("<s> $A", TEMPLATE), raw=True)
    assert reader.answer("hi", "you", "row").tokens == (1, 7, 8, 2)
    turns = [{"role": "user", "content": "hi"}]
    assert reader.answer(turns, "you", "row").tokens == (5, 7, 6, 8, 2)  # type: ignore[arg-type]


# ---------------------------------------------------------------- steps


def test_each_step_is_judged_at_its_last_token_and_the_last_at_the_end() -> None:
    read = Reader(LETTERS).steps("a:", ["ab\n", "b\n", "a"], "row 0")
    assert read.tokens == (A, COLON, A, B, NEWLINE, B, NEWLINE, A, EOS)
    assert (read.begins, read.ends) == (2, (4, 6, 8))
    assert Reader(LETTERS).split("a:", "ab\nb\na", "\n", "row 0") == read
    assert Reader(LETTERS).steps("a:", joined(["ab", "b", "a"], "\n"), "row 0") == read


def test_steps_are_judged_at_the_end_also_where_it_is_the_padding_token() -> None:
    """Token classification speaks at every token, so no token has to be looked for."""
    assert Reader(changed(pad_token="<eos>")).steps("a:", ["b\n", "a"], "row 0").ends == (3, 5)


def test_an_answer_without_steps_is_its_prompt() -> None:
    assert Reader(LETTERS).split("a:", "", "\n", "row 0") == Answered((A, COLON), 2, ())


@pytest.mark.parametrize("steps", [["a", "", "b"], ["a\n", "", ""]])
def test_a_step_without_tokens_is_refused(steps: list[str]) -> None:
    with pytest.raises(KeelError, match="row 4: a step without tokens: leave the empty step out"):
        Reader(LETTERS).steps("a:", steps, "row 4")


@same
@given(wide, st.sampled_from(["\n", "→", "😀", "\n\n"]))
def test_the_steps_of_any_text_end_where_they_end(text: str, separator: str) -> None:
    read = Reader(BYTES).split("q", text, separator, "row")
    spans = split_steps(text, separator)
    assert len(read.ends) == len(spans)
    if spans:
        assert decode(BYTES, [read.tokens]) == ["q" + text]
    for end, (_, stop) in zip(read.ends[:-1], spans[:-1], strict=True):
        assert bytes(read.tokens[1 : end + 1]).decode() == text[:stop]
    if spans:
        assert read.ends[-1] == len(read.tokens) - 1
        assert read.tokens[-1] == BYTES.eos_token_id


# ---------------------------------------------------------------- end to end


def test_answers_lie_end_to_end() -> None:
    reader = Reader(LETTERS)
    answers = [
        reader.split("a:", "ab\nb", "\n", "row 0"),
        reader.answer("b:", "a", "row 1"),
        reader.split("a:", "", "\n", "row 2"),
        reader.split("a:", "b\na\n", "\n", "row 3"),
    ]
    reading = pack_answers(answers)
    assert reading.packed.lengths == tuple(len(a.tokens) for a in answers) == (7, 4, 2, 7)
    assert reading.packed.tokens_T.tolist() == [t for a in answers for t in a.tokens]
    assert reading.at_K.tolist() == [4, 6, 10, 16, 19]
    assert reading.packed.target_N.numel() == 0
    assert reading.at_K.dtype == reading.packed.tokens_T.dtype == torch.long


@same
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 20))
def test_runs_of_neighbours_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    spans = PackedSizes(lengths).spans(budget)
    assert [n for span in spans for n in lengths[span]] == lengths
    for number, span in enumerate(spans):
        assert len(lengths[span]) >= 1
        assert sum(lengths[span]) <= budget or len(lengths[span]) == 1
        if number:  # and are as long as they may be
            assert sum(lengths[spans[number - 1]]) + lengths[span.start] > budget


def test_what_neighbours_share_enters_once_and_holds_them_together() -> None:
    sizes = PackedSizes([5, 6, 5, 4, 4], [0, 3, 3, 0, 2])
    assert sizes.spans(9) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert [sizes.entering(span) for span in sizes.spans(9)] == [8, 9, 4]
    # Enough is enough only where the next one shares nothing.
    enough = PackedSizes([5, 6, 5, 4, 4], [0, 3, 3, 0, 2], enough=6)
    assert enough.spans(100) == [slice(0, 3), slice(3, 5)]
    assert enough.spans(9) == [slice(0, 2), slice(2, 3), slice(3, 5)]


# ---------------------------------------------------------------- places among a policy's tokens


def scan(tokenizer: Any, ids: list[int], ends: list[int]) -> list[int]:
    """The first token with which the decoded beginning is the text's so far; the last without."""
    text = decode(tokenizer, [ids])[0]
    beginnings = [decode(tokenizer, [ids[: at + 1]])[0] for at in range(len(ids))]
    found = []
    for end in ends:
        whole = [
            at
            for at, beginning in enumerate(beginnings)
            if len(beginning) >= end and beginning[:end] == text[:end]
        ]
        found.append(whole[0] if whole else len(ids) - 1)
    return found


def places(data: st.DataObject, length: int) -> list[int]:
    return sorted(data.draw(st.lists(st.integers(0, length + 3), unique=True, max_size=6)))


@same
@given(st.text(alphabet="a\nß→😀\ufffd", min_size=1, max_size=20), st.data())
def test_token_ends_are_those_of_a_scan(text: str, data: st.DataObject) -> None:
    ids, ends = list(text.encode()), places(data, len(text))
    assert token_ends(BYTES, ids, ends) == scan(BYTES, ids, ends)


@same
@given(st.lists(st.integers(0, 257), min_size=1, max_size=20), st.data())
def test_token_ends_among_bytes_that_are_no_text(ids: list[int], data: st.DataObject) -> None:
    """What a young policy may say, the end of sequence in its midst."""
    ends = places(data, len(ids))
    assert token_ends(BYTES, ids, ends) == scan(BYTES, ids, ends)


@same
@given(st.lists(st.integers(0, 10), min_size=1, max_size=12), st.data())
def test_token_ends_where_a_tokens_text_depends_on_its_place(
    ids: list[int], data: st.DataObject
) -> None:
    """Words, with the blank between two coming with the second."""
    words = words_of()
    ends = places(data, 5 * len(ids))
    assert token_ends(words, ids, ends) == scan(words, ids, ends)


def test_token_ends_take_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for all places together, however many; a bad split costs some more at its own place."""
    calls: list[int] = []

    def counted(tokenizer: Any, sequences: Any) -> list[str]:
        calls.append(len(sequences))
        return decode(tokenizer, sequences)

    monkeypatch.setattr(texts, "decode", counted)
    text = "step\n" * 200
    token_ends(BYTES, list(text.encode()), list(range(5, 1001, 5)))
    assert len(calls) == 2
    assert token_ends(BYTES, list(f"{text}。{text}".encode()), [1001]) == [1002]
    assert len(calls) <= 6


def test_token_ends_by_hand() -> None:
    assert token_ends(BYTES, [*b"ab", BYTES.eos_token_id], [2, 9]) == [1, 2]
    assert token_ends(BYTES, list(b"ab"), []) == []
    assert token_ends(BYTES, [], []) == token_ends(BYTES, [], [0]) == []
    assert token_ends(BYTES, list("一。二。三".encode()), [2, 4, 5]) == [5, 11, 14]


def test_text_is_decoded_as_the_tokens_say() -> None:
    """No blank is tidied away, and special tokens leave no trace."""
    words = words_of()
    assert decode(words, [[7, 2, 8], [0]]) == ["hi you", ""]
    assert decode(BYTES, [list(b"a , b ."), list("→".encode())]) == ["a , b .", "→"]
    tidy = copy.deepcopy(BYTES)
    tidy.clean_up_tokenization_spaces = True
    assert decode(tidy, [list(b"a , b .")]) == ["a , b ."]


# ---------------------------------------------------------------- prompts as a policy gets them


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if mode is defined %}{{ mode }} {% endif %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "system", "user", "assistant", "hi", "you", "slow"]


def words_of(frame: str = "$A", template: str | None = None) -> PreTrainedTokenizerFast:
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
    encoded = encode(prompt, words_of(frame), {})
    assert encoded == Prompt("p", "hi you", {"n": 1}, "task", tokens)
    assert prompt.tokens == ()


def test_plain_text_is_the_users_turn_where_there_is_a_chat_template() -> None:
    made = words_of("<s> $A", TEMPLATE)
    turn = ({"role": "user", "content": "hi you"},)
    asked = encode(Prompt("p", "hi you"), made, {})
    assert asked.tokens == encode(Prompt("p", turn), made, {}).tokens == (5, 7, 8, 6)  # type: ignore[arg-type]
    assert asked.content == turn
    raw = encode(Prompt("p", "hi you"), made, {}, raw=True)
    assert (raw.content, raw.tokens) == ("hi you", (1, 7, 8))


def test_an_encoder_reads_the_plain_prompts_of_raw_tasks_as_they_stand() -> None:
    encoder = Encoder(words_of("<s> $A", TEMPLATE), raw=["text"])
    for task, tokens in (("text", (1, 7)), ("talk", (5, 7, 6))):
        encoded = encoder(Prompt("p", "hi", task=task))
        assert encoded is not None
        assert encoded.tokens == tokens


def test_messages_go_through_the_template_with_its_arguments() -> None:
    content = ({"role": "system", "content": "you"}, {"role": "user", "content": "hi"})
    made = words_of(template=TEMPLATE)
    prompt = Prompt("p", content)  # type: ignore[arg-type]
    assert encode(prompt, made, {}).tokens == (4, 8, 5, 7, 6)
    assert encode(prompt, made, {"mode": "slow"}).tokens == (4, 8, 5, 7, 9, 6)
    # The template writes its own special tokens.
    framed = words_of("<s> $A </s>", TEMPLATE)
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
        encode(Prompt("data/train/3", content), words_of(template=template), {})  # type: ignore[arg-type]
    assert says in str(error.value)
    assert "data/train/3" in str(error.value)
    assert "\n" not in str(error.value)


def test_too_long_prompts_are_left_out() -> None:
    encoder = Encoder(words_of(), max_tokens=3)
    kept = encoder(Prompt("p", "hi you hi"))
    assert kept is not None
    assert kept.tokens == (7, 8, 7)
    assert encoder(Prompt("p", "hi you hi you")) is None
    assert Encoder(words_of())(Prompt("p", "hi " * 500)) is not None
