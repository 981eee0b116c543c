"""Tokens and chat templates: the findings of sound and of broken ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import normalizers

from keel.config.load import load_recipe
from keel.config.model import BuildModel, Model
from keel.models.build import byte_tokenizer
from keel.models.chat import ChatEncoder, encode
from keel.models.policy import load_policy
from keel.preflight.check import check_model, unmoved_share
from keel.preflight.prompts import (
    doubled_bos,
    end_of_turn,
    special_in_answers,
    special_in_messages,
    template_prefix,
    template_text,
    unread,
)
from keel.types import Prompt

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
SOUND = LOOP + HEADER
CHAT = Prompt(
    "p/train/0",
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2?\n"}),
)
PLAIN = Prompt("p", "2+2=")


def tokenizer(template: str | None = SOUND) -> Any:
    made = byte_tokenizer(512)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "loses", "differs"),
    [
        (SOUND, False, False),
        (SOUND.replace("m.content", "m.content | trim"), False, False),
        (LOOP.replace("in messages", "in messages if m.role != 'system'") + HEADER, True, False),
        # The header of a future answer is not that of a given one.
        (LOOP + HEADER.replace("assistant", "model"), False, True),
        # A thinking model's header opens a thought, which the answer's turn does not show.
        (LOOP + HEADER.replace("assistant\n", "assistant\n<think>\n"), False, False),
        # Or an answer's turn shows an empty thought, which the header does not.
        (
            LOOP.replace(
                "\n{{ m.c", "\n{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.c"
            )
            + HEADER,
            False,
            False,
        ),
    ],
)
def test_template_keeps_text_and_prefix(template: str, loses: bool, differs: bool) -> None:
    made = tokenizer(template)
    assert (template_text(made, [CHAT], {}, "k") is not None) == loses
    assert (template_prefix(made, [CHAT], {}, "k") is not None) == differs


def test_template_that_changes_a_message_loses_text() -> None:
    lower = tokenizer(SOUND.replace("m.content", "m.content | lower"))
    found = template_text(lower, [CHAT], {}, "k")
    assert found is not None
    assert "the system's words" in found.what


def test_plain_prompts_and_bare_tokenizers_have_no_template() -> None:
    bare = tokenizer(None)
    assert ChatEncoder(bare).closing == ("", None)
    assert template_text(bare, [CHAT], {}, "k") is None
    assert template_text(tokenizer(), [PLAIN], {}, "k") is None
    assert template_prefix(tokenizer(), [PLAIN], {}, "k") is None
    assert special_in_messages([PLAIN], ["2+2="], "k") is None


def test_tokenizer_that_normalises_characters_loses_text() -> None:
    made = tokenizer()
    made.backend_tokenizer.normalizer = normalizers.NFKC()  # writes ² as 2
    square = Prompt("p/train/7", ({"role": "user", "content": "3² is"},))
    found = template_text(made, [CHAT, square], {}, "model.chat_template")
    assert found is not None
    assert "'p/train/7'" in found.evidence
    assert template_text(tokenizer(), [CHAT, square], {}, "k") is None


def test_end_of_turn_that_is_a_token() -> None:
    made = tokenizer()
    end = made.convert_tokens_to_ids("<|im_end|>")
    closing = ChatEncoder(made).closing
    assert closing == ("<|im_end|>", end)
    assert end_of_turn(closing, made, (257, end), (), "rollout") is None
    assert end_of_turn(closing, made, (257,), ("<|im_end|>",), "rollout") is None
    assert end_of_turn(("", None), made, (257,), (), "rollout") is None
    found = end_of_turn(closing, made, (257,), ("stop",), "rollout")
    assert found is not None
    assert found.key == "rollout.stop_ids"
    assert f"rollout.stop_ids = [{end}]" in found.fix


def test_end_of_turn_that_is_text() -> None:
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content }}\nEND{% endfor %}"
    made = tokenizer(loop.replace("END", "###\n"))
    closing = ChatEncoder(made).closing
    assert closing[1] is None
    found = end_of_turn(closing, made, (257,), (), "rollout")
    assert found is not None
    assert found.fix == 'set rollout.stop = ["###"]'
    assert end_of_turn(closing, made, (257,), ("###",), "rollout") is None
    bare = ChatEncoder(tokenizer(loop.replace("END", ""))).closing
    assert end_of_turn(bare, made, (257,), (), "rollout") is None


def test_doubled_bos() -> None:
    one = Prompt("a", "x", tokens=(1, 5, 6))
    two = Prompt("b", "<s>x", tokens=(1, 1, 5))
    assert doubled_bos([one, one], 1, "k") is None
    assert doubled_bos([two], None, "k") is None
    found = doubled_bos([one, two], 1, "tasks.prompt")
    assert found is not None
    assert "1 of 2 prompts, 'b'" in found.evidence


def test_special_tokens_in_messages_become_tokens() -> None:
    made = tokenizer()
    specials = made.all_special_tokens
    bad = Prompt("q", ({"role": "user", "content": "end<|im_end|>now"},))
    again = Prompt("r", bad.content)
    assert special_in_messages([CHAT, CHAT], specials, "k") is None
    found = special_in_messages([CHAT, bad, again], specials, "tasks.prompt")
    assert found is not None
    assert found.evidence == "2 rows of 3 prompts; 'q': '<|im_end|>'"
    end = made.convert_tokens_to_ids("<|im_end|>")
    assert encode(bad, made, {}).tokens.count(end) == 2


def test_special_tokens_in_answers() -> None:
    assert special_in_answers([("a", "12"), ("b", "3")], ["<|im_end|>", ""], "k") is None
    answers = [("a", "12"), ("b", "3<|im_end|>"), ("b", "<|im_end|>")]
    written = special_in_answers(answers, ["<|im_end|>"], "tasks.0.answer")
    spelled = special_in_answers(answers, ["<|im_end|>"], "data", letters=True)
    assert written is not None
    assert written.evidence.startswith("1 rows of 3 answers; 'b'")
    assert spelled is not None
    assert "letter by letter" in spelled.what


def test_keywords_that_a_template_does_not_read() -> None:
    reads = tokenizer(SOUND + "{% if dates %}today{% endif %}")
    words = {"dates": True, "thinks": True}
    assert unread(reads, [CHAT], words) == {"thinks"}
    assert unread(reads, [PLAIN], words) == frozenset()
    assert unread(tokenizer(None), [CHAT], words) == frozenset()


def test_share_of_bfloat16_weights_that_a_step_cannot_move() -> None:
    """w = 1 has a last bit of 2⁻⁷: a step under 2⁻⁸ is rounded away, one over it is not."""
    build = BuildModel(alphabet="01", hidden_size=32, layers=1, heads=2, context=32)
    policy = load_policy(Model(build=build, dtype="bfloat16"), 0)

    def fill(value: float) -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(value)

    fill(1.0)
    assert unmoved_share(policy, 0.9 * 2**-8) == 1.0
    assert unmoved_share(policy, 1.1 * 2**-8) == 0.0
    fill(1.999)  # rounds to 2, whose last bit is twice as much
    assert unmoved_share(policy, 1.1 * 2**-8) == 1.0
    assert unmoved_share(load_policy(Model(build=build), 0), 1e-9) == 0.0


def test_model_whose_end_compiler_or_weights_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is known if the generation config names it, or the end of a turn."""
    recipe = load_recipe("tiny", ["model.dtype=bfloat16"])
    policy = load_policy(load_recipe("tiny").model, 0)  # compiled code is for float32
    own = policy.tokenizer.eos_token_id
    share = 0.5
    monkeypatch.setattr("keel.preflight.check.unmoved_share", lambda policy, rate: share)
    monkeypatch.setattr("keel.preflight.check.fingerprint", lambda name: "3fa25c0d9e11")
    for ids in (None, own, [own + 1, own]):
        policy.model.generation_config.eos_token_id = ids
        assert list(check_model(recipe, policy)) == []
    policy.model.generation_config.eos_token_id = own + 1
    monkeypatch.setattr("keel.preflight.check.fingerprint", lambda name: "none")
    share = 0.97
    found = list(check_model(recipe, policy))
    assert [one.kind for one in found] == ["eos-differs", "no-compiler", "frozen-weights"]
    eos, _, frozen = found
    assert f"id {own}" in eos.evidence
    assert f"add {own}" in eos.fix
    assert "97 %" in frozen.evidence
