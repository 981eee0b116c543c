"""Building and loading: tokenizers, seeds, folders of others, and a clear line for every fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from keel.config.model import BuildModel, Lora, Model
from keel.models import text as chats
from keel.models.build import (
    build_config,
    build_model,
    build_tokenizer,
    byte_tokenizer,
    character_tokenizer,
)
from keel.models.chat import Encoder, encode
from keel.models.families import FAMILIES
from keel.models.loading import describe_model, load_model, load_tokenizer
from keel.models.policy import load_policy
from keel.models.reward import load_reward_model, reward_model_from
from keel.models.tokenizer_round_trip import PROBES, Served, reloaded, served
from keel.training.evaluation import evaluate
from keel.types import KeelError, Message, Prompt
from tests.models.tiny import build, spec

ALPHABET = BuildModel().alphabet
CHARACTERS, BYTES = character_tokenizer(ALPHABET, 64), byte_tokenizer(64)

# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    ("count", "size"),
    [
        (797_312, "0.8 M"),
        (99_700_000, "100 M"),
        (134_515_008, "135 M"),
        (7_241_732_096, "7.2 B"),
        (70_553_706_496, "71 B"),
        (405_853_388_800, "406 B"),
    ],
)
def test_a_model_is_described_without_exponents(count: int, size: str) -> None:
    model = torch.nn.Linear(1, count, bias=False, device="meta")
    assert describe_model(spec(), model) == f"llama, {size} parameters"  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.text(alphabet=ALPHABET))
def test_characters_round_trip_one_token_each(text: str) -> None:
    ids = CHARACTERS(text)["input_ids"]
    assert CHARACTERS.decode(ids) == text
    if not any(special in text for special in ("<pad>", "<eos>")):
        assert len(ids) == len(text)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip_with_the_byte_as_id(text: str) -> None:
    ids = BYTES(text)["input_ids"]
    assert BYTES.decode(ids) == text
    if not any(special in text for special in ("<pad>", "<eos>")):
        assert ids == list(text.encode())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_saved_tokenizer_is_the_one_that_was_built(family: str, tmp_path: Path) -> None:
    """Training, loading by name and plain AutoTokenizer read the same tokens."""
    for kind in ("characters", "bytes"):
        if (family, kind) == ("qwen2", "characters"):
            continue
        made = build_tokenizer(build(family, tokenizer=kind))
        folder = tmp_path / kind
        build_config(build(family, tokenizer=kind)).save_pretrained(folder)
        made.save_pretrained(folder)
        (folder / "model.safetensors").touch()
        again = load_tokenizer(Model(name=str(folder)))
        stock = AutoTokenizer.from_pretrained(folder)
        texts = PROBES if kind == "bytes" else ("12 + 3  = b", " a<eos>b")
        for text in texts:
            assert again(text)["input_ids"] == made(text)["input_ids"] == stock(text)["input_ids"]
        assert (len(again), again.eos_token_id) == (len(made), made.eos_token_id)
        assert again.pad_token_id == made.pad_token_id != made.eos_token_id
        assert again("1<eos>")["input_ids"][1:] == [made.eos_token_id]
        assert again.model_max_length == 64


def own_bpe(folder: Path) -> PreTrainedTokenizerFast:
    """A Qwen2 folder whose tokenizer.json joins digits, which Qwen2's own rules keep apart."""
    characters = byte_tokenizer(64).get_vocab()
    vocabulary = {token: number for token, number in characters.items() if number < 256}
    vocabulary |= {"12": 256, "Ġ12": 257}
    inner = Tokenizer(BPE(vocabulary, [("1", "2"), ("Ġ", "12")]))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = ByteLevelDecoder()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    model = build_model(build("qwen2", options={"vocab_size": 262}), 0, torch.float32)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return made


def test_a_folder_is_read_by_what_autotokenizer_loads(tmp_path: Path) -> None:
    """Not by its tokenizer.json, where AutoTokenizer loads another class for the family: what is
    trained would be served on other tokens than it has learned."""
    own = own_bpe(tmp_path)
    policy = load_policy(Model(name=str(tmp_path), device="cpu"), 0)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    text = "1212 and 12 more"
    assert policy.tokenizer(text)["input_ids"] == stock(text)["input_ids"]
    assert own(text)["input_ids"] != stock(text)["input_ids"]
    policy.save(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(text)["input_ids"] == stock(text)["input_ids"]
    assert policy.served.saved is None
    # The difference to tokenizer.json is noted once, for the first prompt that shows it.
    notes: list[str] = []
    encoder = Encoder(policy.tokenizer, note=notes.append, served=policy.served)
    for prompt in ("plain", "is 12", "is 1212"):
        encoder(Prompt(prompt, prompt))
    assert len(notes) == 1
    assert "read prompt 'is 12' differently" in notes[0]


def test_a_tokenizer_served_as_another_is_refused() -> None:
    """Qwen2's rules take the place of those of a tokenizer that joins what they keep apart."""
    tokenizer, config = byte_tokenizer(64), build_config(build("qwen2"))
    with pytest.raises(KeelError, match="makes other tokens once it is saved and loaded by Auto"):
        served(tokenizer, config, "mine", None)
    encoder = Encoder(tokenizer, served=Served(saved=reloaded(tokenizer, config)))
    encoder(Prompt("p/1", "plain"))
    with pytest.raises(KeelError, match=r"'p/2'.* is 6 tokens against 5"):
        encoder(Prompt("p/2", "cafe\u0301"))


# ---------------------------------------------------------------- building


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_built_model_has_the_size_that_was_asked_for(family: str) -> None:
    config = build_config(build(family))
    assert config.hidden_size == 32
    assert config.num_hidden_layers == 2
    assert config.vocab_size == len(build_tokenizer(build(family)))
    assert config.eos_token_id == build_tokenizer(build(family)).eos_token_id
    model = build_model(build(family), 0, torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 100_000


def test_weights_are_a_function_of_the_seed_and_leave_the_random_state() -> None:
    state = torch.get_rng_state()
    first, again, other = (build_model(build(), seed, torch.float32) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [m.get_output_embeddings().weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    double = build_model(build(), 0, torch.float64)
    assert torch.equal(double.get_output_embeddings().weight, weights[0].double())


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    **DYNAMIC,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "lama"}, "unknown model.build.family 'lama': did you mean 'llama'"),
        ({"family": "bloom"}, "unknown model.build.family 'bloom'"),
        ({"heads": 5}, "hidden_size = 32 is not a multiple of model.build.heads = 5"),
        ({"kv_heads": 3}, "model.build.kv_heads = 3"),
        ({"options": {"rope_paramters": {}}}, "did you mean 'rope_parameters'"),
        ({"options": {"hidden_act": 3}}, "does not make a llama config"),
        ({"alphabet": ""}, "is empty"),
        ({"alphabet": "abca"}, "holds 'a' twice"),
        ({"family": "qwen2", "tokenizer": "characters"}, "characters cannot be served"),
        ({"hidden_size": 64, "heads": 64}, "rotates"),
        ({"hidden_size": 12}, "rotates"),
        # Rotary embeddings that the longest neighbour shifts.
        ({"options": {"rope_parameters": DYNAMIC}}, "'llama' with rope_type 'dynamic'"),
        ({"options": {"rope_parameters": LONG}}, "'llama' with rope_type 'longrope'"),
    ],
)
def test_a_wrong_build(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(KeelError, match=reason) as caught:
        build_config(build(**changes))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- folders and the hub


def refused(name: str | Path, reason: str | None = None) -> str:
    with pytest.raises(KeelError, match=reason) as caught:
        load_policy(Model(name=str(name), device="cpu"), 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "does not exist")
    refused("./nothing", "does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is no folder")


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    content |= changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_layers_that_the_config_leaves_out_are_refused(family: str, tmp_path: Path) -> None:
    load_model(spec(family), 0).save_pretrained(tmp_path)
    BYTES.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    cut = {k: v[:1] for k, v in content.items() if k == "layer_types" and v}
    edit(tmp_path / "config.json", **{key: 1}, **cut)
    refused(tmp_path, r"weights that its config.json has no place for, .*\.1\.")


def test_stored_heads_and_computed_buffers_do_not_stop_a_load(folder: Path) -> None:
    """An older checkpoint's rotary buffers, a value head, a score: none is part of the backbone."""
    weights = load_file(folder / "model.safetensors")
    weights |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "score.weight": torch.ones(1, 32),
        "v_head.summary.weight": torch.ones(1, 32),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_policy(Model(name=str(folder), device="cpu"), 0)


def test_a_classifier_from_a_language_models_backbone_ignores_its_output_layer(
    folder: Path,
) -> None:
    weights = load_file(folder / "model.safetensors") | {"score.weight": torch.ones(1, 32)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", id2label={"0": "score"}, label2id={"score": 0})
    load_reward_model(Model(name=str(folder), device="cpu"), "outcome")


def test_no_end_of_sequence_token(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    load_policy(Model(name=str(folder), device="cpu"), 0)  # the generation config has one
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    refused(folder, "has no end-of-sequence token")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def removed(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def written(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


CONFIG, GENERATION = "config.json", "generation_config.json"
FAULTS: list[tuple[Callable[[Path], object], str]] = [
    (removed(CONFIG), "has no config.json: give a folder"),
    (written(CONFIG, "{"), "has no config that loads"),
    (written(CONFIG, '{"model_type": "nosuch"}'), "has no config that loads"),
    (written(CONFIG, '{"model_type": "bloom"}'), "'bloom' is not supported: use one of .*llama"),
    (removed("model.safetensors"), "holds no weights"),
    (pickled, "pickled weights only"),
    (cut_weights, "does not load"),
    (without_head, "lacks 1 weights, lm_head.weight among them"),
    (removed("tokenizer.json"), "has no tokenizer that loads"),
    (BYTES.save_pretrained, "embeddings for 17 tokens but its tokenizer makes 258"),
    # transformers passes it over, and completions would no longer end at its tokens.
    (written(GENERATION, "{"), "generation_config.json cannot be read"),
    (written(GENERATION, "[1]"), "generation_config.json cannot be read"),
    (written(GENERATION, '{"eos_token_id": "<eos>"}'), "eos_token_id = '<eos>' in its gen"),
    (written(GENERATION, '{"eos_token_id": [1, 17]}'), "eos_token_id = 17 .*model, which has 17"),
]


@pytest.mark.parametrize(("damage", "reason"), FAULTS, ids=[reason for _, reason in FAULTS])
def test_a_damaged_folder_is_refused(
    damage: Callable[[Path], object], reason: str, folder: Path
) -> None:
    damage(folder)
    refused(folder, reason)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    # The top-level domain .invalid never resolves (RFC 2606).
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    refused("someone/nothing", r"model hub \(hub.invalid\) cannot be reached")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1")
    refused("someone/nothing", "cannot be reached")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(KeelError, match="torch sees no GPU"):
        load_model(spec().model_copy(update={"device": "cuda"}), 0)


# ---------------------------------------------------------------- folders as others made them


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
