"""Model folders as others made them: what is read as it is meant, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from keel.config.model import BuildModel, Lora, Model
from keel.models import text as chats
from keel.models.build import build_config, byte_tokenizer
from keel.models.chat import Encoder, encode
from keel.models.loading import load_model, load_tokenizer
from keel.models.policy import load_policy
from keel.models.reward import reward_model_from
from keel.training.evaluation import evaluate
from keel.types import KeelError, Message, Prompt
from tests.models.test_loading import edit, own_bpe, refused

LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def load(folder: Path) -> None:
    load_policy(Model(name=str(folder), device="cpu"), 0)


# ---------------------------------------------------------------- templates


def test_a_template_that_names_special_tokens_is_no_difference(tmp_path: Path) -> None:
    """tokenizer.json does not know which token is called bos_token; the template needs it."""
    own_bpe(tmp_path)
    edit(tmp_path / "tokenizer_config.json", bos_token="<eos>", chat_template=LLAMA_2)
    made = load_policy(Model(name=str(tmp_path), device="cpu"), 0)
    assert made.served.written is not None  # there are rules to compare
    notes: list[str] = []
    encoder = Encoder(made.tokenizer, note=notes.append, served=made.served)
    encoder(Prompt("p/1", "plain"))
    assert notes == []
    encoder(Prompt("p/2", "is 12"))
    assert len(notes) == 1
    assert "read prompt 'p/2' differently" in notes[0]


def chat(folder: Path, template: str | None = None) -> Prompt:
    """A prompt as the folder's template, or this one, writes it."""
    made = load_tokenizer(Model(name=str(folder), chat_template=template))
    return encode(Prompt("p", (Message(role="user", content="hi"),)), made, {})


def test_a_template_that_loops_is_refused_with_the_prompt_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "TEMPLATE_SECONDS", 0.5)
    with pytest.raises(KeelError, match=r"template of prompt 'p' gives no answer within 0.5 s"):
        chat(folder, NESTED)


def test_a_template_whose_name_is_a_path_is_refused_at_load(folder: Path) -> None:
    templates = [{"name": name, "template": LLAMA_2} for name in ("default", "../../x")]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    with pytest.raises(KeelError, match=r"\.\./\.\./x"):
        chat(folder)


# ---------------------------------------------------------------- sizes


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
    folder: Path, key: str, value: object
) -> None:
    edit(folder / "config.json", **{key: value})
    with pytest.raises(KeelError, match=key):
        load_model(Model(name=str(folder)), 0)


def test_a_list_of_end_tokens_loads(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[1, 5])
    assert load_model(Model(name=str(folder)), 0).config.eos_token_id == [1, 5]


@pytest.mark.parametrize(("hidden", "heads"), [(64, 64), (12, 4)])
def test_a_head_too_narrow_to_rotate_is_refused(hidden: int, heads: int) -> None:
    with pytest.raises(KeelError, match="rotates"):
        build_config(BuildModel(hidden_size=hidden, heads=heads))


# ---------------------------------------------------------------- end-of-sequence ids


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """GPT-2 on 258 tokens, with the end-of-sequence id that GPT2Config has by default: 50256."""
    config = GPT2Config(vocab_size=258, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer(64).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_an_end_id_that_the_tokenizer_replaces_is_no_error(gpt2: Path) -> None:
    assert json.loads((gpt2 / "config.json").read_text())["eos_token_id"] == 50256
    (gpt2 / "generation_config.json").unlink()
    load(gpt2)
    edit(gpt2 / "tokenizer_config.json", eos_token=None)
    assert "eos_token_id = 50256 is outside its vocabulary" in refused(gpt2)
    (gpt2 / "generation_config.json").write_text('{"eos_token_id": 257}')
    load(gpt2)


@pytest.mark.parametrize("ids", [-1, [257, -1]])
def test_a_negative_end_id_is_refused(gpt2: Path, ids: object) -> None:
    (gpt2 / "generation_config.json").unlink()
    edit(gpt2 / "config.json", eos_token_id=ids)
    assert "eos_token_id = -1, which is no token: give one from 0 to 257" in refused(gpt2)


# ---------------------------------------------------------------- adapters


def adapter(base: str, folder: Path, revision: str | None = None) -> Path:
    """The adapter of a policy on a base, as a checkpoint holds it."""
    lora = Lora(rank=2, targets=("q_proj",))
    load_policy(Model(name=base, revision=revision, lora=lora), 0).save_adapter(folder)
    return folder


def test_an_adapter_names_its_base_as_the_recipe_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = adapter("~/model", tmp_path / "adapter", revision="v2")
    base = json.loads((made / "base.json").read_text())
    assert (base["base"], base["revision"]) == ("~/model", "v2")
    config = json.loads((made / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("~/model", "v2")
    for file in made.glob("*.json"):
        assert str(tmp_path) not in file.read_text()


def test_a_reward_models_adapter_names_the_revision_of_its_base(
    folder: Path, tmp_path: Path
) -> None:
    base = load_policy(Model(name=str(folder), revision="v2"), 0)
    reward_model_from(base, "outcome", 0, Lora(rank=2)).save(tmp_path / "reward")
    config = json.loads((tmp_path / "reward" / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(folder), "v2")


def test_an_adapter_as_the_model_is_refused_with_its_base(folder: Path, tmp_path: Path) -> None:
    made = adapter(str(folder), tmp_path / "adapter", revision="v2")
    message = refused(made)
    assert "holds only an adapter" in message
    assert f"its base is {str(folder)!r} at revision 'v2'" in message
    assert (
        "merge the two (peft: PeftModel.from_pretrained(base, folder).merge_and_unload())"
        in message
    )
    assert "keel export RUN FOLDER" in message
    with pytest.raises(KeelError, match="holds only an adapter"):
        evaluate(made, task="sort_digits")
    shutil.copy(folder / "config.json", made)
    assert "holds an adapter (adapter_config.json; its base is" in refused(made)
    (made / "adapter_config.json").write_text("[")
    assert "it does not name its base" in refused(made)


def test_a_run_folder_as_the_model_is_refused_with_the_way_to_export_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    assert "it is a run folder, whose model keel export RUN FOLDER writes" in refused(tmp_path)
