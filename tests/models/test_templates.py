"""What a model's folder may say of its sizes and its chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keel.config.model import BuildModel, Model
from keel.models import template as chats
from keel.models.build import build_config
from keel.models.chat import encode
from keel.models.loading import load_model, load_tokenizer
from keel.types import KeelError, Message, Prompt

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    spec = Model(build=BuildModel(hidden_size=16, layers=1, heads=2, context=32))
    load_model(spec, 0).save_pretrained(path)
    load_tokenizer(spec).save_pretrained(path)
    return path


def chat(content: str = "hi") -> Prompt:
    return Prompt("p", (Message(role="user", content=content),), {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 0),
        ("max_position_embeddings", -5),
        ("vocab_size", -1),
        ("eos_token_id", 10**12),
        ("eos_token_id", "</s>"),
        ("eos_token_id", 2.0),
        ("eos_token_id", [1.5]),
    ],
)
def test_a_config_with_an_impossible_size_is_refused_by_its_key(
    folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(KeelError, match=key):
        load_model(Model(name=str(broken)), 0)


def test_a_list_of_end_tokens_loads(folder: Path, tmp_path: Path) -> None:
    several = shutil.copytree(folder, tmp_path / "several")
    config = json.loads((several / "config.json").read_text())
    (several / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 5]}))
    assert load_model(Model(name=str(several)), 0).config.eos_token_id == [1, 5]


@pytest.mark.parametrize(("hidden", "heads"), [(64, 64), (12, 4)])
def test_a_head_too_narrow_to_rotate_is_refused(hidden: int, heads: int) -> None:
    with pytest.raises(KeelError, match="rotates"):
        build_config(BuildModel(hidden_size=hidden, heads=heads))


def test_a_chat_template_that_loops_is_refused_with_the_prompt_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "TEMPLATE_SECONDS", 0.5)
    tokenizer = load_tokenizer(Model(name=str(folder), chat_template=NESTED))
    with pytest.raises(KeelError, match=r"template of prompt 'p' gives no answer within 0.5 s"):
        encode(chat(), tokenizer, {})


def test_a_template_whose_name_is_a_path_is_refused_at_load(folder: Path, tmp_path: Path) -> None:
    named = shutil.copytree(folder, tmp_path / "named")
    settings = json.loads((named / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": PLAIN},
        {"name": "../../x", "template": PLAIN},
    ]
    (named / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(KeelError, match=r"\.\./\.\./x"):
        load_tokenizer(Model(name=str(named)))
