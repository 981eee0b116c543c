"""Adapters in the files of peft: written, read to go on from; and its config as keys of Keel."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.config.model import Lora
from keel.models.loading import ADAPTER, file_of, naming_keys
from keel.models.lora import MAGNITUDE, MODULES, POLICY, adapter_weights, import_peft
from keel.types import KeelError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of names in the files of peft."""


def save_adapter(model: PreTrainedModel, folder: Path, head: nn.Module | None = None) -> None:
    """Write the trained adapter in peft's format.

    `head` is the fully trained layer of a classification model; it is saved as well, and peft
    replaces the base's with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.peft_config[POLICY])
    # A set would be written in a random order.
    config.target_modules = sorted(config.target_modules)
    whole = list(getattr(model, MODULES, ()))
    if head is not None:
        whole.append(next(name for name, module in model.named_modules() if module is head))
        config.modules_to_save = whole
    tensors = _file_tensors(model, whole)
    # Copies: a file holds no tensor twice, as tied ones are.
    copies = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
    config.ensure_weight_tying = len({t.data_ptr() for t in tensors.values()}) < len(tensors)
    save_file(copies, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _file_tensors(model: PreTrainedModel, whole: Sequence[str]) -> dict[str, Tensor]:
    """The trained adapter and the modules trained as a whole, by their names in peft's files."""
    found: dict[str, Tensor] = {}
    for name, weight in adapter_weights(model, POLICY).items():
        if ".lora_" in name:  # peft leaves out ".weight" of the magnitudes alone
            short = name.replace(f".{MAGNITUDE}.{POLICY}.weight", f".{MAGNITUDE}")
            found[PREFIX + short.replace(f".{POLICY}.", ".")] = weight
    for name in whole:
        for leaf, weight in model.get_submodule(name).state_dict(prefix=f"{name}.").items():
            found[PREFIX + leaf] = weight.detach()
    return found


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """An adapter of peft: its name, its config, and the file of its weights."""

    name: str
    config: Any
    weights: Path

    def spec(self, asked: Lora) -> Lora:
        """What was asked for, with the adapter's keys but the dropout."""
        ignored = ("init_lora_weights", "exclude_modules", "layers_to_transform", "layers_pattern")
        with safe_open(self.weights, "pt") as file:
            names = [key.removeprefix(PREFIX) for key in file.keys()]  # noqa: SIM118
        ends, whole = ".lora_A.weight", {n.rpartition(".")[0] for n in names if ".lora_" not in n}
        config = copy.copy(self.config)  # whose targets may be an expression
        config.target_modules = [n.removesuffix(ends) for n in names if n.endswith(ends)]
        own = keys_of_peft(config, f"model.lora.adapter = {self.name!r}", ignored)
        own["modules_to_save"] = tuple(sorted(whole))
        own["dropout"] = asked.dropout
        return Lora(**own)

    @torch.no_grad()
    def load_into(self, model: PreTrainedModel) -> None:
        """Copy the weights. Raises KeelError if they do not fit."""
        targets = _file_tensors(model, getattr(model, MODULES, ()))
        there = load_file(self.weights)
        for name in sorted(there.keys() | targets.keys()):
            source, target = there.get(name), targets.get(name)
            if source is None or target is None or source.shape != target.shape:
                shapes = [None if t is None else list(t.shape) for t in (source, target)]
                raise self._unfit(f"{name} is {shapes[0]} in it and {shapes[1]} in the model")
            target.copy_(source)
        for name, target in targets.items():
            if not torch.equal(target, there[name].to(target)):
                raise self._unfit(f"{name} is another one than what the model ties it to")

    def _unfit(self, why: str) -> KeelError:
        return KeelError(
            f"model.lora.adapter = {self.name!r} does not fit the model ({why}): name the model "
            "that it was trained on"
        )


def read_adapter(name: str) -> StoredAdapter:
    """An adapter of a folder or the hub, in safetensors; no weight is read. Raises KeelError."""
    peft = import_peft()
    with naming_keys(name="model.lora.adapter"):
        config, weights = (file_of(name, file) for file in (ADAPTER, WEIGHTS))
    try:
        known = json.loads(config.read_text("utf-8"))
        kind = known["peft_type"]
        read = peft.LoraConfig.from_pretrained(str(config.parent)) if kind == "LORA" else None
    except Exception as error:  # not JSON, or of values that peft refuses
        raise KeelError(
            f"model.lora.adapter = {name!r}: {config} cannot be read: {error}"
        ) from error
    if read is None:
        raise KeelError(f"model.lora.adapter = {name!r} is of kind {kind}: give one of LoRA")
    if known.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        kind = known["init_lora_weights"]
        raise KeelError(
            f"model.lora.adapter = {name!r} began with init_lora_weights = {kind!r}, which changes "
            "the base: merge it into its base (peft), and name that as the model"
        )
    return StoredAdapter(name, read, weights)


def resolved(spec: Lora | None) -> Lora | None:
    """The settings of an adapter, read from the one that it goes on from."""
    if spec is None or spec.adapter is None:
        return spec
    return read_adapter(spec.adapter).spec(spec)


KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "target_modules": "targets",
    "modules_to_save": "modules_to_save",
}
"""Fields of peft's config, and the keys of `model.lora` that mean them."""
UNREAD = (
    *("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("task_type", "inference_mode", "fan_in_fan_out", "runtime_config", "ensure_weight_tying"),
)
"""Fields that say nothing about the adapter, or what the model says itself: what is tied stays so.
"""


def keys_of_peft(config: Any, where: str, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of `model.lora` for a LoraConfig of peft. Raises KeelError, which begins with
    `where`, for a field that Keel has no counterpart of and that is not at its default."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise KeelError(f"{where} is a {type(config).__name__}: give a LoraConfig")
    default = import_peft().LoraConfig()
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name in (*KEYS, *UNREAD, *ignored) or value == getattr(default, one.name):
            continue
        raise KeelError(f"{where} has {one.name} = {value!r}, which Keel does not support: drop it")
    found = {own: getattr(config, name) for name, own in KEYS.items()}
    targets = found["targets"]
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        raise KeelError(
            f"{where} has target_modules = {targets!r}: give a list of names, or 'all-linear'"
        )
    found["targets"] = targets if isinstance(targets, str) else tuple(sorted(targets))
    found["alpha"], found["dropout"] = float(found["alpha"]), float(found["dropout"])
    found["modules_to_save"] = tuple(found["modules_to_save"] or ())
    return found
