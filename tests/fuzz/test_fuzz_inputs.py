"""A few hundred inputs of every kind (`studies/fuzz.py` generates ten thousand); odd tokenizers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from keel.models.chat import Encoder
from keel.models.reward import Reader
from keel.models.text import encode_text
from keel.types import KeelError, Prompt
from tests.fuzz.held import Outcome
from tests.fuzz.kinds import KINDS
from tests.fuzz.tokenizers import made

EXAMPLES = {"recipes": 25, "tokenizers": 25}
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_fuzzed_input_never_raises_and_loses_no_row(name: str) -> None:
    kind = KINDS[name]
    ends: set[str] = set()

    @settings(
        max_examples=EXAMPLES.get(name, 80),
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=SLOW,
    )
    @given(kind.inputs)
    def one(value: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ends.add(kind.hold(value, Path(folder)).how)

    one()
    assert "refused" in ends


TASK = {"bad_rows": "quarantine", "validation_fraction": 0.1}
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MANY = b'{"prompt": ' + b"9" * 100_000 + b"}"
FINE = b'{"prompt": "p"}\n'
FOUND: dict[str, tuple[str, Any, str]] = {
    "digits in a row": ("task rows", (FINE + MANY, TASK), "quarantined"),
    "levels in a row": ("task rows", (FINE + DEEP, TASK), "quarantined"),
    "a key twice": ("task rows", (FINE + b'{"prompt": "a", "prompt": "b"}', TASK), "quarantined"),
    "a lone surrogate": ("task rows", (FINE + b'{"prompt": "\\ud800"}', TASK), "quarantined"),
    "a byte that is no text": ("task rows", (FINE + b'{"prompt": "\xff"}', TASK), "quarantined"),
    "every row": ("task rows", (b"{\n[1]\nnull\n", TASK), "refused"),
    "a column with a dot": ("task rows", (b'{"a.b": "p"}', {**TASK, "prompt": "{a.b}"}), "ok"),
    "a column named None": ("python rows", ([{None: "x"}], TASK), "refused"),
    "no table for a model": ("recipes", (b"model = false\n", [], "train"), "refused"),
    "no stage to change": ("recipes", (b"stages = []\n", ["steps=1"], "explain"), "refused"),
    "a name with a zero byte": ("commands", ["explain", "a\0/b.toml"], "refused"),
    "no such user's home": ("commands", ["prefs", "stats", "~no_such_user/x.jsonl"], "refused"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_input_that_once_failed(case: str, tmp_path: Path) -> None:
    name, value, how = FOUND[case]
    hold: Callable[[Any, Path], Outcome] = KINDS[name].hold
    if name.endswith("rows"):
        value = (value[0], {"prompt": "{prompt}", "answer": None, "system": None, **value[1]})
    assert hold(value, tmp_path).how == how


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
