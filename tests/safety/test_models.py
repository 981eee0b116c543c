"""Model folders that hold more than weights: pickles, adapters, code. None of it is run."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.cli.main import main
from keel.config.model import Model
from keel.models.loading import INDEX, load_model
from keel.models.policy import load_policy
from keel.models.reward import load_reward_model
from keel.models.shape import model_config, without_weights
from keel.types import KeelError
from tests.rewards.learned import policy, save_model

Make = Callable[[Path, bytes], None]


class Evil:
    """A pickle of it leaves a file behind where it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    made = policy()
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def pickles_only(folder: Path, evil: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(evil)


def pickle_in_the_index(folder: Path, evil: bytes) -> None:
    part = folder / "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").rename(part)
    first, *others = load_file(part)
    weights = dict.fromkeys(others, part.name) | {first: "rest.bin"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    torch.save({first: load_file(part)[first]}, folder / "rest.bin")


def weights_elsewhere(folder: Path, evil: bytes) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    weights = dict.fromkeys(load_file(folder.parent / "other.safetensors"), "../other.safetensors")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def pickled_adapter(folder: Path, evil: bytes) -> None:
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.bin").write_bytes(evil)


def adapter_alone(folder: Path, evil: bytes) -> None:
    pickled_adapter(folder, evil)
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (pickles_only, "holds pickled weights only"),
        (pickle_in_the_index, "names 'rest.bin', which is no safetensors file of the folder"),
        (weights_elsewhere, "names '../other.safetensors', which is no safetensors file of the"),
        (pickled_adapter, "holds an adapter"),
        (adapter_alone, "holds only an adapter"),
    ],
)
def test_what_would_be_loaded_beside_safetensors_is_refused(
    make: Make, says: str, folder: Path, marker: Path
) -> None:
    evil = pickle.dumps(Evil(marker))
    make(folder, evil)
    with pytest.raises(KeelError, match=says) as error:
        load_policy(Model(name=str(folder), device="cpu"), 0)
    assert "\n" not in str(error.value)
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists()  # it would have


@pytest.mark.parametrize("content", ["", '{"weight_map": 1}'])
def test_an_index_that_cannot_be_read(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(KeelError, match="cannot be read"):
        load_policy(Model(name=str(folder), device="cpu"), 0)


def test_weights_in_parts_load(folder: Path) -> None:
    whole = load_model(Model(name=str(folder), device="cpu"), 0)
    whole.save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("*.safetensors"))) > 1
    parts = load_model(Model(name=str(folder), device="cpu"), 0).state_dict()
    assert all(torch.equal(parts[name], weight) for name, weight in whole.state_dict().items())


def test_pickles_that_lie_beside_are_left_alone(folder: Path, marker: Path) -> None:
    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt", "rng_state.pth"):
        (folder / name).write_bytes(pickle.dumps(Evil(marker)))
    load_policy(Model(name=str(folder), device="cpu"), 0)
    assert not marker.exists()


def test_a_pickled_reward_model(tmp_path: Path, marker: Path) -> None:
    save_model(tmp_path / "model", "outcome")
    pickles_only(tmp_path / "model", pickle.dumps(Evil(marker)))
    with pytest.raises(KeelError, match="holds pickled weights only"):
        load_reward_model(Model(name=str(tmp_path / "model"), device="cpu"), "outcome")
    assert not marker.exists()


# ---------------------------------------------------------------- code

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import (
    LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
)
class Config(LlamaConfig):
    model_type = "own"
class Policy(LlamaForCausalLM):
    config_class = Config
class Score(LlamaForSequenceClassification):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {
    "AutoConfig": "own.Config",
    "AutoModelForCausalLM": "own.Policy",
    "AutoModelForSequenceClassification": "own.Score",
}


def with_code(folder: Path, marker: Path, *, model: bool, tokenizer: bool) -> None:
    """A folder whose classes are its own."""
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    if model:
        change(folder / "config.json", model_type="own", auto_map=CLASSES)
    if tokenizer:
        own = {"AutoTokenizer": ["own.Words", "own.Words"]}
        change(folder / "tokenizer_config.json", tokenizer_class="Words", auto_map=own)


@pytest.mark.parametrize(("model", "tokenizer"), [(True, False), (False, True)])
def test_a_folders_own_code_runs_only_where_it_is_trusted(
    model: bool, tokenizer: bool, folder: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where transformers copies such code to.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(marker.parent))
    monkeypatch.syspath_prepend(marker.parent)
    with_code(folder, marker, model=model, tokenizer=tokenizer)
    with pytest.raises(KeelError, match=r"Python code of its own.*model\.trust_remote_code") as e:
        load_policy(Model(name=str(folder), device="cpu"), 0)
    assert "\n" not in str(e.value)
    assert not marker.exists()
    trusted = Model(name=str(folder), device="cpu", trust_remote_code=True)
    # First without weights: later its classes are known.
    assert without_weights(model_config(trusted), True).num_parameters() > 0
    load_policy(trusted, 0)
    assert marker.exists()


def test_a_known_family_needs_no_code_of_its_own(folder: Path, marker: Path) -> None:
    with_code(folder, marker, model=True, tokenizer=False)
    change(folder / "config.json", model_type="llama")
    load_policy(Model(name=str(folder), device="cpu"), 0)
    assert not marker.exists()


def test_a_reward_models_own_code(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, "outcome")
    with_code(folder, marker, model=True, tokenizer=False)
    with pytest.raises(KeelError, match=r"trust_remote_code = true .*the reward's option"):
        load_reward_model(Model(name=str(folder), device="cpu"), "outcome")
    assert not marker.exists()


BASE = '[[stages]]\nstage = "reward_model"\nbase = {{ name = {folder!r} }}\n'
DATA = 'data = {{ name = "jsonl", path = {rows!r} }}\n'
TASK = 'tasks = [{ name = "sort_digits" }]\n'
BUILD = '[model.build]\nfamily = "llama"\n'
RECIPES = {
    "model": "[model]\nname = {folder!r}\n[[stages]]\nstage = 'rl'\nalgorithm = 'grpo'\n" + TASK,
    "base": BUILD + BASE + DATA,
    "value": BUILD
    + '[[stages]]\nstage = "rl"\nalgorithm = "ppo"\n'
    + TASK
    + "value.name = {folder!r}\n",
    "reward": BUILD
    + '[[stages]]\nstage = "rl"\nalgorithm = "grpo"\n'
    + TASK
    + "rollout.max_tokens = 8\n"
    + '[[stages.rewards.functions]]\nfunction = "outcome"\noptions = {{ model = {folder!r} }}\n',
}


@pytest.mark.parametrize("where", [*RECIPES, "eval", "eval of rows"])
def test_no_command_runs_the_code_of_a_model(
    where: str, folder: Path, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_code(folder, marker, model=True, tokenizer=True)
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{n}=", "chosen": "1", "rejected": "2"} for n in range(30)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    if where == "eval":
        command = ["eval", str(folder), "--task", "sort_digits"]
    elif where == "eval of rows":
        command = ["eval", str(folder), "--pairs", str(rows)]
    else:
        text = RECIPES[where].replace(TASK, TASK.replace("{", "{{").replace("}", "}}"))
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(text.format(folder=str(folder), rows=str(rows)))
        command = ["train", str(recipe), "--run", str(tmp_path / "run"), "--quiet"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "trust_remote_code" in message
    assert message.count("\n") == 1
    assert not marker.exists()
