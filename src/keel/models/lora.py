"""Low-rank adapters (LoRA, arXiv 2106.09685): the only module that uses peft.

Adapters are put into the model in place, and its class does not change. They are never merged
there, since unmerging does not restore the same base; `plain_weights` makes merged tensors.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from keel.config.fields import unknown
from keel.config.model import Lora
from keel.models.quantised import QuantisedLinear, dequantised_linear, import_quietly
from keel.platform.extras import install_command
from keel.types import KeelError

POLICY, REFERENCE = "policy", "reference"
"""The adapter that learns, and a frozen one for a reference that is not the base."""


def _peft() -> Any:
    with suppress(ImportError):  # which peft would import, with its warning
        import_quietly()
    try:
        import peft
    except ImportError as error:
        raise KeelError(
            f"model.lora needs the peft package: {install_command('lora')}, or leave model.lora out"
        ) from error
    return peft


def add_lora(
    model: PreTrainedModel,
    spec: Lora,
    seed: int,
    output: nn.Module | None = None,
    revision: str | None = None,
) -> None:
    """Put a trainable adapter on the targeted linear layers and freeze all else.

    A starts uniform in ±1/√(inputs), from `seed`, and B at zero, so that the model's results do not
    change. `output` is the output layer, which gets no adapter (None: a causal language model's).
    The adapter is float32 at least, also on bfloat16 weights. The adapter's config records the
    base's `revision` on the hub. Raises KeelError for a target that is no linear layer, or the
    output layer.
    """
    peft = _peft()
    targets = target_names(model, spec.targets, output or model.get_output_embeddings())
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        # GPT-2's layers keep their weights transposed.
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        task_type=_task(model),
        base_model_name_or_path=model.config.name_or_path or None,
        revision=revision,
    )
    _inject(model, config, POLICY)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        a, b = layer.lora_A[POLICY].weight, layer.lora_B[POLICY].weight
        drawn = torch.rand(a.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            a.copy_(((2 * drawn - 1) / a.shape[1] ** 0.5).to(a.dtype))
            b.zero_()


def _inject(model: PreTrainedModel, config: Any, adapter: str) -> None:
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        # peft first makes random weights, and warns of a second adapter, which is intended here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        _peft().inject_adapter_in_model(config, model, adapter_name=adapter)
    for _, layer in lora_layers(model):
        for half in (layer.lora_A[adapter], layer.lora_B[adapter]):
            half.to(torch.promote_types(half.weight.dtype, torch.float32))


def target_names(
    model: PreTrainedModel, wanted: tuple[str, ...] | str, output: nn.Module | None
) -> list[str]:
    """Full names of the targeted layers; a target is the end of a layer's path."""
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    if isinstance(wanted, str):
        return [name for name, module in linear.items() if module is not output]
    chosen: list[str] = []
    for target in wanted:
        names = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not names:
            kinds = {name.rsplit(".", 1)[-1] for name, m in linear.items() if m is not output}
            raise KeelError(unknown("model.lora.targets entry", target, kinds))
        if any(linear[name] is output for name in names):
            raise KeelError(
                f"model.lora.targets names the output layer {target!r}, which must stay as it is: "
                "take it out of the targets"
            )
        chosen += names
    return sorted(set(chosen))


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers with an adapter, and their names; none for a model without LoRA."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "lora_A")]


@contextmanager
def reference_adapter(model: nn.Module) -> Iterator[None]:
    """Within the block the frozen second adapter is active; without one the model is its base, bit
    for bit."""
    layers, second = [layer for _, layer in lora_layers(model)], has_reference(model)
    for layer in layers:
        if second:
            layer.set_adapter(REFERENCE, inference_mode=True)
        else:
            layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            if second:
                layer.set_adapter(POLICY)
            else:
                layer.enable_adapters(True)


def freeze_reference(model: PreTrainedModel) -> None:
    """Copy the trained adapter to the frozen second one, which the first call creates."""
    layers = lora_layers(model)
    if REFERENCE not in layers[0][1].lora_A:
        _inject(model, copy.deepcopy(model.peft_config[POLICY]), REFERENCE)
    with torch.no_grad():
        for _, layer in lora_layers(model):
            for halves in (layer.lora_A, layer.lora_B):
                halves[REFERENCE].weight.copy_(halves[POLICY].weight)
            layer.set_adapter(POLICY)


def has_reference(model: nn.Module) -> bool:
    """Whether there is a second adapter."""
    return any(REFERENCE in layer.lora_A for _, layer in lora_layers(model))


def is_untouched(model: nn.Module) -> bool:
    """Whether the trained adapter is still zero."""
    return not any(bool(layer.lora_B[POLICY].weight.any()) for _, layer in lora_layers(model))


def adapter_weights(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """The tensors of one adapter by their names in the model, without a copy."""
    return {
        f"{name}.{half}.{adapter}.weight": getattr(layer, half)[adapter].weight.detach()
        for name, layer in lora_layers(model)
        for half in ("lora_A", "lora_B")
    }


def is_affine(module: nn.Module) -> bool:
    """Whether it is a linear layer, with plain adapters (as `add_lora` makes them) or without."""
    kinds = (nn.Linear, QuantisedLinear)
    if type(module) in kinds:
        return True
    if type(getattr(module, "base_layer", None)) not in kinds or not hasattr(module, "lora_A"):
        return False
    others = ("merged", "lora_magnitude_vector", "lora_variant")
    biased = any(half.bias is not None for half in module.lora_B.values())  # type: ignore[operator]
    return not biased and not any(getattr(module, name, None) for name in others)


def affine(linear: Any) -> tuple[Tensor, Tensor | None]:
    """The effective weight (outputs, inputs) and bias of a layer that `is_affine`, with an active
    adapter merged into a new tensor; a weight in 4 bits is dequantised."""
    base = getattr(linear, "base_layer", linear)
    weight: Tensor = base.dequantised() if isinstance(base, QuantisedLinear) else base.weight
    if base is not linear and not linear.disable_adapters:
        for name in (n for n in linear.active_adapters if n in linear.lora_A):
            weight = weight + linear.get_delta_weight(name)
    return weight, base.bias


def plain_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights under the names of the plain model, adapters merged: W + (α/r) B A.

    Merged tensors are new, the others the model's own; the model does not change.
    """
    weights = base_weights(model)
    for name, layer in lora_layers(model):
        weight, delta = weights[f"{name}.weight"], layer.get_delta_weight(POLICY)
        weights[f"{name}.weight"] = (weight.to(delta.dtype) + delta).to(weight.dtype).detach()
    return weights


def base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights under the names of the plain model, without adapters; the model's own tensors,
    but those in 4 bits dequantised."""
    dequantised = {
        f"{name}.weight": module.dequantised()
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear)
    }
    return {
        name.replace(".base_layer.", "."): dequantised.get(name, tensor).detach()
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }


def adapter_factors(model: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """By the name of a layer, matrices whose product is what its adapter adds to its weight."""
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in lora_layers(model):
        a, b = layer.lora_A[POLICY].weight.detach(), layer.lora_B[POLICY].weight.detach()
        b = b * layer.scaling[POLICY]
        factors[name] = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
    return factors


def base_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over names, types, shapes and bytes of the weights without adapters."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if ".lora_" in name:
            continue
        plain = tensor.detach().cpu().contiguous()
        about = f"{name.replace('.base_layer.', '.')} {plain.dtype} {tuple(plain.shape)}\0"
        digest.update(about.encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A trainable copy of the model without adapters, which are merged into it."""
    weights = plain_weights(model)
    twin = copy.deepcopy(model)
    for name, layer in lora_layers(twin):
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, layer.get_base_layer())
    for name, module in list(twin.named_modules()):
        if isinstance(module, QuantisedLinear):
            parent, _, child = name.rpartition(".")
            setattr(twin.get_submodule(parent), child, dequantised_linear(module))
    if hasattr(twin, "peft_config"):
        del twin.peft_config
    with torch.no_grad():
        for name, tensor in twin.state_dict().items():
            tensor.copy_(weights[name])
    return twin.requires_grad_(True)


def save_adapter(model: PreTrainedModel, folder: Path, head: nn.Module | None = None) -> None:
    """Write the trained adapter in peft's format.

    `head` is the fully trained layer of a classification model; it is saved as well, and peft
    replaces the base's with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{POLICY}.', '.')}": tensor.cpu().contiguous()
        for name, tensor in adapter_weights(model, POLICY).items()
    }
    config = copy.deepcopy(model.peft_config[POLICY])
    # A set would be written in a random order.
    config.target_modules = sorted(config.target_modules)
    if head is not None:
        name = next(name for name, module in model.named_modules() if module is head)
        config.modules_to_save = [name]
        for leaf, tensor in head.state_dict().items():
            tensors[f"base_model.model.{name}.{leaf}"] = tensor.cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _task(model: PreTrainedModel) -> str:
    """peft's name for the task of the model."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    return "TOKEN_CLS" if name.endswith("ForTokenClassification") else "CAUSAL_LM"
