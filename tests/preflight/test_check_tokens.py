"""Tokens and chat templates: what a preflight says of sound and of broken ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keel.config.model import BuildModel, Model
from keel.models.build import byte_tokenizer, character_tokenizer
from keel.models.chat import encode
from keel.models.policy import load_policy
from keel.preflight.check import _unmoved, check
from keel.preflight.findings.tokens import (
    closing,
    doubled_bos,
    end_of_turn,
    eos_pair,
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
TALK = Prompt(
    "p/train/0",
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2?\n"}),
)


def tokenizer(template: str | None = SOUND, eos: str | None = None) -> Any:
    made = byte_tokenizer(512)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if eos is not None:
        made.eos_token = eos
    made.chat_template = template
    return made


def texts(template: str) -> tuple[str | None, str | None]:
    made = tokenizer(template)
    one = template_text(made, [TALK], {}, "k"), template_prefix(made, [TALK], {}, "k")
    return tuple(None if found is None else found.kind for found in one)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("template", "kinds"),
    [
        (SOUND, (None, None)),
        (SOUND.replace("m.content", "m.content | trim"), (None, None)),
        (SOUND.replace("m.content", "m.content | lower"), ("template-loses-text", None)),
        (
            "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + HEADER,
            ("template-loses-text", None),
        ),
        # The header of an answer to come is not that of one that is there.
        (LOOP + HEADER.replace("assistant", "model"), (None, "template-not-prefix")),
        # A thinking model's header opens a thought, which the answer's turn does not show.
        (LOOP + HEADER.replace("assistant\n", "assistant\n<think>\n"), (None, None)),
    ],
)
def test_what_a_template_makes_of_a_conversation(
    template: str, kinds: tuple[str | None, str | None]
) -> None:
    """Lower case changes the probe of the prefix too, so that alone is not looked at there."""
    loses, prefix = texts(template)
    assert loses == kinds[0]
    if "lower" not in template:
        assert prefix == kinds[1]


def test_text_prompts_and_bare_tokenizers_have_no_template() -> None:
    bare = tokenizer(None)
    assert closing(bare, {}) is None
    assert template_text(bare, [TALK], {}, "k") is None
    plain = Prompt("p", "2+2=")
    assert template_text(tokenizer(), [plain], {}, "k") is None
    assert template_prefix(tokenizer(), [plain], {}, "k") is None
    assert special_in_messages([plain], ["2+2="], "k") is None


def test_tokens_that_do_not_read_as_the_template_wrote_them() -> None:
    """A tokenizer that normalises: it writes ² as 2."""
    from tokenizers import normalizers

    made = tokenizer()
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    square = Prompt("p/train/7", ({"role": "user", "content": "3² is"},))
    found = template_text(made, [TALK, square], {}, "model.chat_template")
    assert found is not None
    assert found.kind == "template-loses-text"
    assert "'p/train/7'" in found.evidence
    assert template_text(tokenizer(), [TALK, square], {}, "k") is None


def test_the_end_of_a_turn_that_ends_nothing() -> None:
    made = tokenizer()
    end = made.convert_tokens_to_ids("<|im_end|>")
    closed = closing(made, {})
    assert closed is not None
    assert (closed.token, closed.spelled) == (end, "<|im_end|>")
    assert end_of_turn(closed, (257, end), (), "rollout") is None
    assert end_of_turn(closed, (257,), ("<|im_end|>",), "rollout") is None
    found = end_of_turn(closed, (257,), ("stop",), "rollout")
    assert found is not None
    assert found.key == "rollout.stop_ids"
    assert f"rollout.stop_ids = [{end}]" in found.mend
    assert end_of_turn(None, (257,), (), "rollout") is None


def test_a_turn_closed_by_words() -> None:
    words = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###\n{% endfor %}"
    closed = closing(tokenizer(words), {})
    assert closed is not None
    assert closed.token is None
    found = end_of_turn(closed, (257,), (), "rollout")
    assert found is not None
    assert found.mend == 'set rollout.stop = ["###"]'
    assert end_of_turn(closed, (257,), ("###",), "rollout") is None
    unclosed = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert closing(tokenizer(unclosed), {}) is None


def test_an_end_that_a_server_would_not_stop_at() -> None:
    assert eos_pair(7, (7, 9), "</s>", "model.name") is None
    assert eos_pair(None, (9,), "", "model.name") is None
    assert eos_pair(7, (), "</s>", "model.name") is None
    found = eos_pair(7, (9,), "</s>", "model.name")
    assert found is not None
    assert "id 7" in found.evidence
    assert "add 7" in found.mend


def test_two_beginnings() -> None:
    one = Prompt("a", "x", tokens=(1, 5, 6))
    two = Prompt("b", "<s>x", tokens=(1, 1, 5))
    assert doubled_bos([one, one], 1, "k") is None
    assert doubled_bos([two], None, "k") is None
    found = doubled_bos([one, two], 1, "tasks.prompt")
    assert found is not None
    assert "1 of 2 prompts, 'b'" in found.evidence


def test_special_tokens_in_messages() -> None:
    specials = tokenizer().all_special_tokens
    bad = Prompt("q", ({"role": "user", "content": "end<|im_end|>now"},))
    assert special_in_messages([TALK, TALK], specials, "k") is None
    found = special_in_messages([TALK, bad, bad], specials, "tasks.prompt")
    assert found is not None
    assert "2 of 3 prompts; 'q': '<|im_end|>' in the user's words" in found.evidence
    # It is so: one token stands where ten characters were written.
    end = tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert encode(bad, tokenizer(), {}).tokens.count(end) == 2


def test_weights_that_a_step_cannot_move() -> None:
    """w = 1 has a last bit of 2⁻⁷: a step under 2⁻⁸ is rounded away, one over it is not."""
    build = BuildModel(alphabet="01", hidden_size=32, layers=1, heads=2, context=32)
    policy = load_policy(Model(build=build, dtype="bfloat16"), 0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1.0)
    assert _unmoved(policy, 0.9 * 2**-8) == 1.0
    assert _unmoved(policy, 1.1 * 2**-8) == 0.0
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1.999)  # rounds to 2, whose last bit is twice as much
    assert _unmoved(policy, 1.1 * 2**-8) == 1.0
    assert _unmoved(load_policy(Model(build=build), 0), 1e-9) == 0.0


def test_rows_that_repeat_and_rows_that_cannot_be_read(tmp_path: Any) -> None:
    """Of 60 rows 30 repeat one prompt, and a sixth has no prompt at all."""
    rows = ['{"prompt": "12>", "answer": "12"}'] * 30
    rows += [f'{{"prompt": "{at}>", "answer": "{at}"}}' for at in range(100, 130)]
    rows += ['{"answer": "1"}'] * 10
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    task = {"name": "jsonl", "path": str(path), "answer": "answer", "bad_rows": "quarantine"}
    build = {"alphabet": "0123456789>", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}
    report = check(
        {"model": {"build": build}, "stages": [{"stage": "sft", "tasks": [task]}]}, predicts=False
    )
    found = {one.kind: one for one in report.findings}
    assert set(found) == {"duplicate-prompts", "unreadable-rows"}
    assert "29 of " in found["duplicate-prompts"].evidence
    assert "10 of " in found["unreadable-rows"].evidence


def test_a_gold_answer_that_the_tokenizer_cannot_write(tmp_path: Any) -> None:
    rows = [f'{{"prompt": "{at}>", "answer": "{at}!"}}' for at in range(100, 160)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    assert character_tokenizer("0123456789>", 32)("1>")["input_ids"]
    build = {"alphabet": "0123456789>", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}
    recipe = {
        "model": {"build": build},
        "stages": [
            {
                "stage": "rl",
                "tasks": [{"name": "jsonl", "path": str(path), "answer": "answer"}],
                "rollout": {"max_tokens": 10, "prompts_per_step": 8, "group_size": 4},
                "evaluation": {"prompts": 2},
            }
        ],
    }
    kinds = {one.kind: one for one in check(recipe, predicts=False).findings}
    assert "'!'" in kinds["gold-unwritable"].evidence
    assert kinds["gold-unwritable"].severity == "error"


def test_answers_that_spell_special_tokens() -> None:
    assert special_in_answers([("a", "12"), ("b", "3")], ["<|im_end|>", ""], "k") is None
    answers = [("a", "12"), ("b", "3<|im_end|>"), ("b", "<|im_end|>")]
    found = special_in_answers(answers, ["<|im_end|>"], "tasks.0.answer")
    assert found is not None
    assert found.evidence.startswith("1 rows of 3 answers; 'b'")
    row = special_in_answers(answers, ["<|im_end|>"], "data", letters=True)
    assert row is not None
    assert "letter by letter" in row.what


def test_keywords_that_a_template_does_not_read() -> None:
    reads = tokenizer(SOUND + "{% if dates %}today{% endif %}")
    words = {"dates": True, "thinks": True}
    assert unread(reads, [TALK], words) == {"thinks"}
    assert unread(reads, [Prompt("p", "text")], words) == frozenset()
    assert unread(tokenizer(None), [TALK], words) == frozenset()
