"""Low-rank adapters (LoRA, arXiv 2106.09685): the only module that uses peft.

Adapters are put into the model in place, and its class does not change. They are never merged
there, since unmerging does not restore the same base; `plain_weights` makes merged tensors.

With DoRA (arXiv:2402.09353 eq. 5) the weight of a layer is m ∘ V / ‖V‖ with V = W + s·BA, the norm
of each output's row being a constant to the gradient (§4.3). Modules that are trained as a whole
(`modules_to_save`) learn in place, next to a frozen copy of what they were.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
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
BASE = "base"
MAGNITUDE = "lora_magnitude_vector"
MODULES = "keel_modules"
"""The attribute of a model with the names of the modules that are trained as a whole."""


def import_peft() -> Any:
    """The library. Raises KeelError if it is not installed."""
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
    """Put a trainable adapter on the targeted linear layers and freeze all else but
    `modules_to_save`.

    A starts uniform in ±1/√(inputs), from `seed`, B at zero and the magnitudes of DoRA at the norms
    of the base, so that the model's results do not change. `output` is the output layer, which gets
    no adapter (None: a causal language model's). The adapter is float32 at least, also on bfloat16
    weights. The adapter's config records the base's `revision` on the hub. Raises KeelError for a
    target that is no linear layer, or the output layer, and for a module that is unknown or kept in
    4 bits.
    """
    peft = import_peft()
    output = output or model.get_output_embeddings()
    modules = module_names(model, spec.modules_to_save)
    targets = target_names(model, spec.targets, output, modules)
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=0.0,
        use_rslora=spec.rslora,
        bias="none",
        target_modules=targets,
        # GPT-2's layers keep their weights transposed.
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        task_type=_task(model),
        base_model_name_or_path=model.config.name_or_path or None,
        revision=revision,
    )
    _inject(model, config, POLICY, spec.dora)
    config = model.peft_config[POLICY]
    config.use_dora, config.lora_dropout = spec.dora, spec.dropout
    config.modules_to_save = list(modules) or None
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        if spec.dropout:
            layer.lora_dropout[POLICY] = AdapterDropout(spec.dropout)
        a, b = layer.lora_A[POLICY].weight, layer.lora_B[POLICY].weight
        drawn = torch.rand(a.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            a.copy_(((2 * drawn - 1) / a.shape[1] ** 0.5).to(a.dtype))
            b.zero_()
    setattr(model, MODULES, modules)
    for _, module, leaf, parameter in _saved(model):
        parameter.requires_grad_(True)
        module.register_buffer(_kept(BASE, leaf), parameter.detach().clone(), persistent=False)


def _inject(model: PreTrainedModel, config: Any, adapter: str, dora: bool) -> None:
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        # peft first makes random weights, and warns of a second adapter, which is intended here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        import_peft().inject_adapter_in_model(config, model, adapter_name=adapter)
    for _, layer in lora_layers(model):
        for half in (layer.lora_A[adapter], layer.lora_B[adapter]):
            half.to(torch.promote_types(half.weight.dtype, torch.float32))
        if dora:
            if MAGNITUDE not in layer.adapter_layer_names:
                layer.adapter_layer_names = (*layer.adapter_layer_names, MAGNITUDE)
            layer.use_dora[adapter], layer.lora_variant[adapter] = True, Dora
            norm = row_norms(base_weight(layer), layer.fan_in_fan_out)
            learns = adapter == POLICY
            layer.lora_magnitude_vector[adapter] = Magnitude(norm).requires_grad_(learns)


class Magnitude(nn.Module):
    """m of DoRA: the norm that each row of the weight has, (outputs,)."""

    def __init__(self, norm: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm)


class Dora:
    """The forward pass of a layer with DoRA, for peft's layers: its own reads no weight of ours in
    4 bits, and computes the norms as autocast says."""

    @staticmethod
    def forward(layer: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        a, b = layer.lora_A[active_adapter], layer.lora_B[active_adapter]
        base, dropped = layer.get_base_layer(), layer.lora_dropout[active_adapter](x)
        plain = result if dropped is x else base(dropped.to(result.dtype))
        if base.bias is not None:
            plain = plain - base.bias
        scale = dora_scale(layer, active_adapter)
        low = b(a(dropped)) * layer.scaling[active_adapter]
        whole: Tensor = result + (scale - 1) * plain + scale * low
        return whole

    @staticmethod
    def supports_lora_conversion() -> bool:
        """What peft asks: whether W + BA says it all."""
        return False


def base_weight(layer: Any) -> Tensor:
    """The weight below an adapter, as it is kept; dequantised from 4 bits."""
    base = layer.get_base_layer()
    weight: Tensor = base.dequantised() if isinstance(base, QuantisedLinear) else base.weight
    return weight.detach()


def row_norms(weight: Tensor, transposed: bool) -> Tensor:
    """‖V‖ of the weights of each output (outputs,), in float32 at least."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    norms: Tensor = torch.linalg.vector_norm(wide, dim=0 if transposed else 1)
    return norms


def dora_scale(layer: Any, adapter: str) -> Tensor:
    """m / ‖V‖ (outputs,), with a gradient to m alone."""
    magnitude = layer.lora_magnitude_vector[adapter].weight
    with torch.no_grad(), torch.autocast(magnitude.device.type, enabled=False):
        whole = base_weight(layer) + layer.get_delta_weight(adapter)
        norm = row_norms(whole, layer.fan_in_fan_out)
    scale: Tensor = magnitude / norm
    return scale


def merged(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    """The `weight` of a layer with an adapter in it, a new tensor: W + s·BA, or DoRA's."""
    whole: Tensor = weight + layer.get_delta_weight(adapter)
    if adapter not in layer.lora_variant:
        return whole
    scale = layer.lora_magnitude_vector[adapter].weight / row_norms(whole, layer.fan_in_fan_out)
    found: Tensor = whole * (scale if layer.fan_in_fan_out else scale[:, None])
    return found


# ---------------------------------------------------------------- dropout

_dropping = False


class AdapterDropout(nn.Dropout):
    """Dropout of an adapter's input, in the optimizer steps of `dropout_on` alone, where gradients
    are computed: what samples, evaluates or scores the old and the reference policy is exact."""

    def forward(self, input: Tensor) -> Tensor:
        if not (_dropping and torch.is_grad_enabled()):
            return input
        return nn.functional.dropout(input, self.p, True)


@contextmanager
def dropout_on(seed: int) -> Iterator[None]:
    """Within the block adapters drop inputs, by torch's random numbers from `seed`; those of before
    go on after it. What is dropped depends on the micro-batches, too."""
    global _dropping
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        _dropping = True
        try:
            yield
        finally:
            _dropping = False


def has_dropout(model: nn.Module) -> bool:
    """Whether an adapter drops inputs."""
    return any(isinstance(module, AdapterDropout) for module in model.modules())


# ---------------------------------------------------------------- which layers


def target_names(
    model: PreTrainedModel,
    wanted: tuple[str, ...] | str,
    output: nn.Module | None,
    whole: tuple[str, ...] = (),
) -> list[str]:
    """Full names of the targeted layers; a target is the end of a layer's path. Layers in modules
    that are trained as a `whole` get no adapter."""
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and not any(f"{name}.".startswith(f"{one}.") for one in whole)
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


def module_names(model: PreTrainedModel, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Full names of the modules that are trained as a whole, by the ends of their paths; of tied
    embeddings both, since they are one weight."""
    inside = {name: module for name, module in model.named_modules() if name}
    found: list[str] = []
    for end in wanted:
        names = [name for name in inside if f".{name}".endswith(f".{end}")]
        if not names:
            ends = {name.rsplit(".", 1)[-1] for name in inside}
            raise KeelError(unknown("model.lora.modules_to_save entry", end, ends))
        found += names
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    if None not in tied and tied[0].weight is tied[1].weight:
        both = [name for name, module in inside.items() if module in tied]
        found += both if set(both) & set(found) else []
    for name in found:
        parts = list(inside[name].modules())
        if any(isinstance(part, QuantisedLinear) for part in parts):
            raise KeelError(
                f"model.lora.modules_to_save: {name!r} is kept in 4 bits, which cannot take a step:"
                " take it out, or leave model.quantisation out"
            )
        if not any(True for _ in inside[name].parameters()):
            raise KeelError(f"model.lora.modules_to_save: {name!r} has no weights: take it out")
    return tuple(sorted(set(found)))


def _saved(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """The weights that are trained as a whole, each under the first of its names: its full name,
    its module, and its name there."""
    seen: set[int] = set()
    for name in getattr(model, MODULES, ()):
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            for leaf, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{path}.{leaf}", module, leaf, parameter


def _kept(adapter: str, leaf: str) -> str:
    """The buffer of a module that keeps a weight as it was before, or as the reference has it."""
    return f"keel_{adapter}_{leaf}"


def kept_weights(model: nn.Module) -> list[Tensor]:
    """All frozen copies."""
    return [b for name, b in model.named_buffers() if name.rpartition(".")[2].startswith("keel_")]


def kept_weight(model: nn.Module, weight: Tensor | None) -> Tensor | None:
    """What the reference has in place of one of the policy's weights: itself, unless it learns."""
    which = REFERENCE if has_reference(model) else BASE
    for _, module, leaf, parameter in _saved(model):
        if parameter is weight:
            found: Tensor = getattr(module, _kept(which, leaf))
            return found
    return weight


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers with an adapter, and their names; none for a model without LoRA."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "lora_A")]


@contextmanager
def reference_adapter(model: nn.Module) -> Iterator[None]:
    """Within the block the frozen second adapter is active; without one the model is its base, bit
    for bit. No graph of the block may outlive it."""
    layers, second = [layer for _, layer in lora_layers(model)], has_reference(model)
    for layer in layers:
        if second:
            layer.set_adapter(REFERENCE, inference_mode=True)
        else:
            layer.enable_adapters(False)
    own = [(weight, weight.data, kept_weight(model, weight)) for _, _, _, weight in _saved(model)]
    for weight, _, before in own:
        weight.data = before  # type: ignore[assignment]
    try:
        yield
    finally:
        for weight, now, _ in own:
            weight.data = now
        for layer in layers:
            if second:
                layer.set_adapter(POLICY)
            else:
                layer.enable_adapters(True)


def freeze_reference(model: PreTrainedModel) -> None:
    """Copy the trained adapter to the frozen second one, which the first call creates."""
    layers = lora_layers(model)
    if REFERENCE not in layers[0][1].lora_A:
        config = copy.deepcopy(model.peft_config[POLICY])
        dora, config.use_dora = config.use_dora, False
        config.lora_dropout, config.modules_to_save = 0.0, None
        _inject(model, config, REFERENCE, dora)
        for _, module, leaf, weight in _saved(model):
            module.register_buffer(_kept(REFERENCE, leaf), weight.detach().clone(), False)
    own, copied = adapter_weights(model, POLICY), adapter_weights(model, REFERENCE)
    with torch.no_grad():
        for (_, source), (_, target) in zip(own.items(), copied.items(), strict=True):
            target.copy_(source)
    for _, layer in lora_layers(model):
        layer.set_adapter(POLICY)


def has_reference(model: nn.Module) -> bool:
    """Whether there is a second adapter."""
    return any(REFERENCE in layer.lora_A for _, layer in lora_layers(model))


def is_untouched(model: nn.Module) -> bool:
    """Whether the model is still its base."""
    for _, layer in lora_layers(model):
        if layer.lora_B[POLICY].weight.any():
            return False
        if POLICY in layer.lora_variant and (dora_scale(layer, POLICY) != 1).any():
            return False
    return all(torch.equal(w, getattr(m, _kept(BASE, leaf))) for _, m, leaf, w in _saved(model))


def adapter_weights(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """The tensors of one adapter by their names in the model, without a copy; with them the weights
    that are trained as a whole."""
    found: dict[str, Tensor] = {}
    for name, layer in lora_layers(model):
        for part in ("lora_A", "lora_B", MAGNITUDE):
            if adapter in getattr(layer, part):
                weight = getattr(layer, part)[adapter].weight
                found[f"{name}.{part}.{adapter}.weight"] = weight.detach()
    for name, module, leaf, weight in _saved(model):
        found[name] = (
            weight.detach() if adapter == POLICY else getattr(module, _kept(adapter, leaf))
        )
    return found


def is_affine(module: nn.Module) -> bool:
    """Whether it is a linear layer, with plain adapters (as `add_lora` makes them) or without."""
    kinds = (nn.Linear, QuantisedLinear)
    if type(module) in kinds:
        return True
    if type(getattr(module, "base_layer", None)) not in kinds or not hasattr(module, "lora_A"):
        return False
    biased = any(half.bias is not None for half in module.lora_B.values())  # type: ignore[operator]
    other = any(variant is not Dora for variant in module.lora_variant.values())  # type: ignore[operator]
    return not biased and not other and not module.merged


def affine(linear: Any) -> tuple[Tensor, Tensor | None]:
    """The effective weight (outputs, inputs) and bias of a layer that `is_affine`, with an active
    adapter merged into a new tensor; a weight in 4 bits is dequantised."""
    base = getattr(linear, "base_layer", linear)
    weight: Tensor = base.dequantised() if isinstance(base, QuantisedLinear) else base.weight
    if base is not linear and not linear.disable_adapters:
        for name in (n for n in linear.active_adapters if n in linear.lora_A):
            weight = merged(linear, name, weight)
    return weight, base.bias


def plain_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights under the names of the plain model, adapters merged.

    Merged tensors are new, the others the model's own; the model does not change.
    """
    weights = base_weights(model)
    for name, layer in lora_layers(model):
        weight = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = merged(layer, POLICY, weight).to(weight.dtype).detach()
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
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if ".lora_" in name:
            continue
        for _, module, leaf, weight in _saved(model):
            tensor = getattr(module, _kept(BASE, leaf)) if weight is tensor else tensor
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
    for _, module, leaf, _ in [*_saved(twin)]:
        for buffer in (_kept(BASE, leaf), _kept(REFERENCE, leaf)):
            module._buffers.pop(buffer, None)
    for name in ("peft_config", MODULES):
        if hasattr(twin, name):
            delattr(twin, name)
    with torch.no_grad():
        for name, tensor in twin.state_dict().items():
            tensor.copy_(weights[name])
    return twin.requires_grad_(True)


def _task(model: PreTrainedModel) -> str:
    """peft's name for the task of the model."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    return "TOKEN_CLS" if name.endswith("ForTokenClassification") else "CAUSAL_LM"
