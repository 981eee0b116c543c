"""Models and tokenizers from a recipe: built, or from a folder or the hub.

Weights are read from safetensors only, and remote code runs only where the recipe allows it. All
failures are KeelErrors.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from huggingface_hub import constants as hub
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from keel.config.model import Model
from keel.models.build import build_config, build_model, build_tokenizer
from keel.models.families import check_family, note_choices
from keel.models.head import lacks_float64
from keel.models.quantised import weight_count
from keel.models.tokenizer_round_trip import Served, quiet, served
from keel.runs.layout import RECIPE
from keel.types import KeelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DROPOUT_KEYS = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of config keys that make a forward pass random."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
INDEX, ADAPTER = "model.safetensors.index.json", "adapter_config.json"
GENERATION = "generation_config.json"
COMPUTED = ("rotary_emb.inv_freq", "attn.masked_bias", "attention.masked_bias")
"""Buffers that older checkpoints store and that models compute."""


def load_model(spec: Model, seed: int) -> PreTrainedModel:
    """The recipe's model on its device, in its dtype, dropout off, with transformers' attention.

    `seed` decides the weights of a built model; the global random state does not change. Raises
    KeelError for a missing or broken folder, pickled or incomplete weights, an unsupported family,
    an unreachable hub, or a missing device.
    """
    device = choose_device(spec.device)
    if spec.dtype == "float64" and lacks_float64(device):
        raise KeelError(f'model.dtype = "float64": {device.type} has none, set it to "float32"')
    if spec.build is not None:
        model = build_model(spec.build, seed, DTYPES[spec.dtype])
    else:
        model = load_pretrained(spec)
    silence_dropout(model)
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        # The grouped matrix product of sparse models does not support float64.
        model.set_experts_implementation("eager")
    note_choices(model.to(device), spec)
    return model


def load_tokenizer(spec: Model) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer, with the recipe's chat template if it has one.

    It is what AutoTokenizer loads, as when the model is served; for some families that differs from
    the folder's tokenizer.json (see `check_served`). Raises KeelError where none loads.
    """
    if spec.build is not None:
        tokenizer: PreTrainedTokenizerBase = build_tokenizer(spec.build)
    else:
        hint = "save one there with tokenizer.save_pretrained"
        with _loading(spec, "has no tokenizer that loads", hint):
            tokenizer = AutoTokenizer.from_pretrained(_source(spec), **_options(spec))
    if spec.chat_template is not None:
        tokenizer.chat_template = spec.chat_template
    check_template_names(tokenizer, spec.name or "built")
    return tokenizer


def check_template_names(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise KeelError for named chat templates of a published model that are not file names: saving
    the tokenizer would write elsewhere."""
    templates = tokenizer.chat_template
    for template in templates if isinstance(templates, dict) else ():
        if not str(template).replace("-", "_").isidentifier():
            raise KeelError(
                f"model {name!r} has a chat template named {template!r}, which is not a file name: "
                "rename it in tokenizer_config.json to letters, digits, - and _"
            )


def check_served(
    spec: Model, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> Served:
    """The tokenizers that must agree with this one on the data, so that a saved model is served
    the tokens it learned from. Raises KeelError where they already differ on fixed texts."""
    if spec.trust_remote_code:  # the folder's own code decides, here and when it is served
        return Served()
    return served(tokenizer, model.config, name, spec.name)


def check_pair(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise KeelError for a model that could never stop, or that lacks tokens of its tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    vocabulary = model.config.get_text_config().vocab_size
    if not any(token is not None and 0 <= token < vocabulary for token in ends):
        outside = next((token for token in ends if token is not None), None)
        why = "" if outside is None else f" (eos_token_id = {outside} is outside its vocabulary)"
        raise KeelError(
            f"model {name!r} has no end-of-sequence token{why}, so no completion would ever end: "
            "set eos_token in its tokenizer_config.json or eos_token_id in its "
            "generation_config.json"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise KeelError(
            f"model {name!r} has embeddings for {rows} tokens but its tokenizer makes "
            f"{len(tokenizer)}: use the tokenizer that the model was trained with"
        )


def describe_model(spec: Model, model: PreTrainedModel) -> str:
    """A model in a few words: `llama, 0.8 M parameters`."""
    name = spec.build.family if spec.build else Path(spec.name or "").name
    count = weight_count(model)
    size, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    digits = f"{size:.2g}" if size < 9.95 else f"{size:.0f}"
    return (
        f"{name}, {digits} {unit} parameters"
        + (", LoRA" if spec.lora else "")
        + (f" on {spec.quantisation}" if spec.quantisation else "")
    )


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA if there is a GPU, else the CPU: small models decode faster there than on MPS,
    whose runner is not compiled. Raises KeelError for a missing GPU."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, True):
        raise KeelError(
            f'model.device = "{device}" but torch sees no GPU of that kind: set model.device '
            'to "auto" or "cpu"'
        )
    if device == "auto":
        device = "cuda" if there["cuda"] else "cpu"
    return torch.device(device)


def silence_dropout(model: PreTrainedModel) -> None:
    """Set every dropout of modules and config to 0.

    Ratios of probabilities need a deterministic forward pass, and activation checkpointing needs
    training mode.
    """
    _silence_config(model.config)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in vars(module).items():
            if _is_dropout(key, value):
                setattr(module, key, 0.0)


def _silence_config(config: PreTrainedConfig) -> None:
    for key, value in list(vars(config).items()):
        if _is_dropout(key, value):
            setattr(config, key, 0.0)


def _is_dropout(key: str, value: object) -> bool:
    return isinstance(value, float) and value != 0 and any(word in key for word in DROPOUT_KEYS)


def read_config(spec: Model) -> PreTrainedConfig:
    """The config of the recipe's model, without its weights.

    Raises KeelError for one that does not load, or a family that is not supported.
    """
    if spec.build is not None:
        return build_config(spec.build)
    hint = "save the model with save_pretrained, or choose another"
    with _loading(spec, "has no config that loads", hint):
        config: PreTrainedConfig = AutoConfig.from_pretrained(_source(spec), **_options(spec))
    check_family(config, trusted=spec.trust_remote_code)
    return config


def load_pretrained(
    spec: Model, auto: Any = AutoModelForCausalLM, what: str = "a causal language model"
) -> PreTrainedModel:
    """A model from a folder or the hub, loaded by the class `auto` with dropout off.

    `what` describes such a model in an error.
    """
    name = _source(spec)
    config = read_config(spec)
    _silence_config(config)
    if auto is AutoModelForCausalLM:
        _check_generation(spec, config)
    hint = f"it must hold {what} saved with save_pretrained, in safetensors"
    with _loading(spec, "does not load", hint), quiet():
        model, report = auto.from_pretrained(
            name,
            config=config,
            dtype=DTYPES[spec.dtype],
            use_safetensors=True,
            output_loading_info=True,
            **_options(spec),
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        made = " ".join(config.architectures or ())
        if "Classification" in made and auto is AutoModelForCausalLM:
            raise KeelError(
                f"model.name = {spec.name!r} is a {made}, no {what.removeprefix('a ')}: name "
                "another model (a reward model of this recipe learns on by base.stage)"
            )
        raise KeelError(
            f"model.name = {spec.name!r} lacks {len(missing)} weights, {missing[0]} among them: "
            f"it is not whole as {what}; save it again with save_pretrained"
        )
    _refuse_unread(spec, model, report["unexpected_keys"])
    loaded: PreTrainedModel = model
    # Adapters record it as their base: not the home folder that "~" stands for.
    loaded.config.name_or_path = spec.name
    return loaded


def _refuse_unread(spec: Model, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Raise KeelError for stored weights of the backbone that the config has no place for.

    With fewer layers in the config than are stored, part of the model would be missing. Heads of
    other classes (an output layer, a score) and computed buffers may stay unread.
    """
    prefix = f"{model.base_model_prefix}."
    inside = tuple(f"{name}." for name, _ in model.base_model.named_children())
    cut = sorted(
        name
        for name in unexpected
        if name.removeprefix(prefix).startswith(inside) and not name.endswith(COMPUTED)
    )
    if cut:
        raise KeelError(
            f"model.name = {spec.name!r} holds {len(cut)} weights that its config.json has no "
            f"place for, {cut[0]} among them: part of the model would be left out; fix "
            "config.json (num_hidden_layers and the like), or save the model again"
        )


def _check_generation(spec: Model, config: PreTrainedConfig) -> None:
    """Raise KeelError for an unreadable generation_config.json: transformers would ignore it, and
    with it the tokens that end a completion."""
    assert spec.name is not None
    local = Path(spec.name).expanduser() / GENERATION
    path = local if local.parent.is_dir() else _of_hub(spec, GENERATION)
    if path is None or not path.is_file():
        return
    hint = "fix the file, or delete it (stop tokens then come from config.json)"
    try:
        stops = dict(json.loads(path.read_text(encoding="utf-8"))).get("eos_token_id")
        GenerationConfig.from_pretrained(str(path.parent), trust_remote_code=False)
    except Exception as error:  # not JSON, or of values that transformers refuses
        raise KeelError(
            f"model.name = {spec.name!r}: its {GENERATION} cannot be read ({_line(error)}): {hint}"
        ) from error
    rows = config.get_text_config().vocab_size
    for stop in stops if isinstance(stops, list) else [] if stops is None else [stops]:
        if type(stop) is not int or not 0 <= stop < rows:
            raise KeelError(
                f"model.name = {spec.name!r}: eos_token_id = {stop!r} in its {GENERATION} is no "
                f"token of the model, which has {rows}: {hint}"
            )


def _options(spec: Model) -> dict[str, Any]:
    return {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}


@contextmanager
def naming_keys(**keys: str) -> Iterator[None]:
    """Errors of the block name these keys in place of `model.NAME`."""
    try:
        yield
    except KeelError as error:
        message = str(error)
        for name, key in keys.items():
            message = message.replace(f"model.{name}", key)
        raise KeelError(message) from error


@contextmanager
def _loading(spec: Model, fault: str, hint: str) -> Iterator[None]:
    """Raise KeelError for whatever transformers, safetensors and the hub raise in the block."""
    try:
        yield
    except KeelError:
        raise
    except Exception as error:
        if not spec.trust_remote_code and "trust_remote_code" in str(error):
            raise KeelError(
                f"model.name = {spec.name!r} comes with Python code of its own, which could do "
                "anything: read it, and set trust_remote_code = true (model.trust_remote_code, or "
                "the reward's option) where you trust it"
            ) from error
        raise KeelError(f"model.name = {spec.name!r} {fault} ({_line(error)}): {hint}") from error


def _source(spec: Model) -> str:
    """The name for transformers: a checked folder, or a hub name."""
    assert spec.name is not None
    folder = Path(spec.name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return str(folder)
    looks_local = folder.is_absolute() or spec.name.startswith((".", "~"))
    if looks_local or folder.exists() or spec.name.count("/") > 1 or "\\" in spec.name:
        reason = "is no folder" if folder.exists() else "does not exist"
        raise KeelError(
            f"model.name = {spec.name!r} {reason}: give a folder saved with save_pretrained, "
            "or a hub name such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    _check_hub(spec.name)
    _check_parts(spec.name, _of_hub(spec, INDEX), _of_hub(spec, ADAPTER))
    return spec.name


def _of_hub(spec: Model, file: str) -> Path | None:
    """A file of a model on the hub, downloaded if it is not in the cache; None if missing."""
    assert spec.name is not None
    try:
        found = cached_file(
            spec.name,
            file,
            revision=spec.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except OSError:  # loading reports what is wrong with the name
        return None
    return None if found is None else Path(found)


def file_of(name: str, file: str) -> Path:
    """A file of a folder, or of a repository on the hub. Raises KeelError if it is not there."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        path: Path | None = folder / file
    else:
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise KeelError(f"model.name = {name!r} does not exist: give a folder, or a hub name")
        _check_hub(name)
        path = _of_hub(Model(name=name), file)
    if path is None or not path.is_file():
        raise KeelError(f"model.name = {name!r} has no {file}: save it with peft's save_pretrained")
    return path


def _check_parts(name: str, index: Path | None, adapter: Path | None) -> None:
    """Raise KeelError for what transformers would load as well: pickles that an index names, and an
    adapter with its base."""
    if adapter is not None and adapter.is_file():
        raise KeelError(_adapter_error(name, adapter, "holds an adapter"))
    if index is None or not index.is_file():
        return
    try:
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise KeelError(
            f"model {name!r}: its {INDEX} cannot be read: save it again with save_pretrained"
        ) from None
    for part in sorted(map(str, parts)):
        if not part.endswith(".safetensors") or Path(part).name != part:
            raise KeelError(
                f"model {name!r}: its {INDEX} names {part!r}, which is no safetensors file of the "
                "folder: save it again with save_pretrained where you trust it"
            )


def _adapter_error(name: str, file: Path, holds: str) -> str:
    """The error for an adapter: its base, and how to merge the two."""
    try:
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    base, revision = known.get("base_model_name_or_path"), known.get("revision")
    named = f"its base is {base!r}" if base else "it does not name its base"
    at = f" at revision {revision!r}" if base and revision else ""
    return (
        f"model {name!r} {holds} ({ADAPTER}; {named}{at}), and model.name must be a whole model: "
        "name the base, and the adapter by model.lora.adapter to train it further; or merge the "
        "two (peft: PeftModel.from_pretrained(base, folder).merge_and_unload()), save model and "
        "tokenizer with save_pretrained, and name that folder; an adapter of a run folder is "
        "merged by keel export RUN FOLDER"
    )


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / ADAPTER).is_file():
            raise KeelError(_adapter_error(str(folder), folder / ADAPTER, "holds only an adapter"))
        run = (folder / RECIPE).is_file()
        hint = (
            "it is a run folder, whose model keel export RUN FOLDER writes"
            if run
            else "give a folder saved with save_pretrained"
        )
        raise KeelError(f"model folder {str(folder)!r} has no config.json: {hint}")
    _check_parts(str(folder), folder / INDEX, folder / ADAPTER)
    if any(folder.glob("*.safetensors")):
        return
    if any(True for pattern in PICKLES for _ in folder.glob(pattern)):
        raise KeelError(
            f"model folder {str(folder)!r} holds pickled weights only, which can run code when "
            "they load: convert them to safetensors with save_pretrained where you trust them"
        )
    raise KeelError(
        f"model folder {str(folder)!r} holds no weights (*.safetensors): "
        "save the model there with save_pretrained"
    )


def _check_hub(name: str) -> None:
    """Raise KeelError at once where neither the cache nor the hub can have the name.

    Otherwise an offline machine waits half a minute for retries.
    """
    cached = Path(hub.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    proxied = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"))
    if cached.is_dir() or proxied:
        return
    host = urlparse(hub.ENDPOINT).hostname
    reachable = not hub.HF_HUB_OFFLINE
    if reachable:
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            reachable = False
    if not reachable:
        raise KeelError(
            f"model.name = {name!r} is neither a folder here nor in the cache, and the model hub "
            f"({host}) cannot be reached: give the path of a folder, or go online"
        )


def _line(error: BaseException) -> str:
    """The first two lines of an exception's message: for a config, the field and its fault."""
    lines = [line.strip().rstrip(".:") for line in str(error).strip().splitlines()[:2]]
    return ": ".join(filter(None, lines)) or type(error).__name__
