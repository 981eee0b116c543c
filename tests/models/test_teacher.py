"""The teacher: scores of the policy's tokens as plain transformers gives them, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.config.model import Model, TeacherModel
from keel.models.packed import pack
from keel.models.policy import Policy, load_policy
from keel.models.reference import check_teacher, load_teacher
from keel.types import KeelError
from tests.models import tiny

ROWS = [[3, 1, 4, 1, 5, 9], [2, 6, 5]]
CONTEXT = 64


def saved(folder: Path, **changes: object) -> TeacherModel:
    """A stirred model of another width in a folder."""
    build = tiny.build(**{"hidden_size": 48, **changes})
    policy = load_policy(Model(build=build, device="cpu"), 3)
    tiny.stir(policy.model)
    policy.save(folder)
    return TeacherModel(name=str(folder))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_plain_transformers(tmp_path: Path, temperature: float) -> None:
    policy = tiny.policy()
    teacher = load_teacher(saved(tmp_path), policy, tiny.spec(), CONTEXT)
    rows = [torch.tensor(row) for row in ROWS]
    packed = pack(rows, [torch.arange(1, len(row)) for row in rows])
    found = teacher.log_probs(packed, temperature)
    assert not found.requires_grad
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = []
    with torch.no_grad():
        for row in ROWS:
            logits = plain(input_ids=torch.tensor([row])).logits[0, :-1] / temperature
            log_probs = logits.log_softmax(-1)
            wanted.append(log_probs[torch.arange(len(row) - 1), torch.tensor(row[1:])])
    # float32 through another attention: sums of 48 terms.
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=1e-5)
    assert not any(weight.requires_grad for weight in teacher.model.parameters())


def test_dtype_is_the_teachers_own(tmp_path: Path) -> None:
    choice = saved(tmp_path)
    half = choice.model_copy(update={"dtype": "bfloat16"})
    dtypes = [
        load_teacher(one, tiny.policy(), tiny.spec(), CONTEXT).model.dtype for one in (choice, half)
    ]
    assert dtypes == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alphabet": "0123456789+= cb"}, "another tokenizer than the policy: 1 of the policy's"),
        ({"alphabet": "1023456789+= ab"}, "another tokenizer than the policy: 2 of the policy's"),
        ({"alphabet": "0123456789"}, "'+' (12) among them, which it does not have"),
        ({"context": 63}, "reads 63 tokens at the most, and a prompt with its completion may have"),
    ],
    ids=["other-token", "other-order", "fewer-tokens", "context"],
)
def test_unfit_teacher_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    choice, policy = saved(tmp_path, **changes), tiny.policy()
    for refuse in (check_teacher, load_teacher):
        with pytest.raises(KeelError, match=re.escape(f"teacher.name = '{tmp_path}'")) as caught:
            refuse(choice, policy, tiny.spec(), CONTEXT)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_teacher_may_know_more_tokens_and_read_longer_texts(tmp_path: Path) -> None:
    policy: Policy = tiny.policy()
    choice = saved(tmp_path, alphabet=f"{tiny.build().alphabet}cdef", context=128)
    tokens = policy.tokenizer.get_vocab().items()
    theirs = load_policy(Model(name=choice.name, device="cpu"), 0).tokenizer.get_vocab()
    assert all(theirs[token] == at for token, at in tokens)
    load_teacher(choice, policy, tiny.spec(), CONTEXT)


@pytest.mark.parametrize("name", ["./missing", "config-only"])
def test_teacher_that_does_not_load_is_named_by_its_key(tmp_path: Path, name: str) -> None:
    if name == "config-only":
        saved(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        name = str(tmp_path)
    with pytest.raises(KeelError, match=r"teacher\.name = ") as caught:
        check_teacher(TeacherModel(name=name), tiny.policy(), tiny.spec(), CONTEXT)
    assert "model.name" not in str(caught.value)
