"""The weights that the static decoder samples with: the model's own, or a copy in another type."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.models.attention import compile_layers
from keel.models.families import compiled_parts, head_of
from keel.models.lora import affine, lora_layers

JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of the same input, in the order in which transformers calls them. As one product they
take a GPU less than half as long for few rows."""


class SamplingWeights:
    """A model's backbone and head as they sample: in `dtype`, adapters merged.

    It is the model itself if that has the type and no adapters, or if its base is quantised; else a
    copy, which `refresh` makes equal to the model again, in place.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        head = head_of(model)
        parameters = [*model.parameters()]
        self._copies: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self.quantised = any(not p.is_floating_point() for p in parameters)
        same = all(p.dtype == dtype for p in parameters) and not lora_layers(model)
        self.backbone: nn.Module = model.base_model
        self.compiled = compiled_parts(model) == "all"
        self.head = head.detached()
        if self.quantised or same:
            return
        # A memo for deepcopy, so that no copy in the old type exists.
        made: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, dtype=dtype), False) for p in parameters
        }
        sources = dict(model.base_model.named_modules())
        self.backbone = twin = copy.deepcopy(model.base_model, made).eval()
        for name, layer in lora_layers(twin):
            parent, _, child = name.rpartition(".")
            setattr(twin.get_submodule(parent), child, layer.get_base_layer())
        for name, module in twin.named_modules():
            own = sources[name]
            adapted = hasattr(own, "lora_A")
            for leaf, weight in module.named_parameters(recurse=False):
                if adapted and leaf == "weight":
                    self._copies.append((weight, lambda layer=own: affine(layer)[0]))  # type: ignore[misc]
                else:
                    source = getattr(getattr(own, "base_layer", own), leaf)
                    self._copies.append((weight, lambda source=source: source))  # type: ignore[misc]
        for module in [*twin.modules()]:
            for names in JOINT:
                _join(module, names)
        self.compiled = compiled_parts(model) != "nothing"
        if self.compiled:
            compile_layers(twin)
        if head.dtype in ("float32", "tf32") and dtype != torch.float64:
            return  # its products are of the model's own weights
        bias = None if head.bias is None else made[id(head.bias)]
        self.head = replace(head, weight=made[id(head.weight)], bias=bias).detached()
        inside = {id(target) for target, _ in self._copies}
        for target, own in ((made[id(head.weight)], head.weight), (bias, head.bias)):
            if target is not None and id(target) not in inside:
                self._copies.append((target, lambda source=own: source))  # type: ignore[misc]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's weights."""
        for target, source in self._copies:
            target.copy_(source(), non_blocking=True)


class JointLinear(nn.Module):
    """Several linear layers as one: it returns the output of the first, and keeps the others'."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = _joined([layer.weight for layer in layers])
        self.bias = None
        if layers[0].bias is not None:
            self.bias = _joined([layer.bias for layer in layers])
        self.first = layers[0].out_features
        self.out: Tensor | None = None

    def forward(self, states: Tensor) -> Tensor:
        self.out = nn.functional.linear(states, self.weight, self.bias)
        return self.out[..., : self.first]


class JointPart(nn.Module):
    """The output of one of the others; of the `last`, nothing is kept any longer."""

    def __init__(self, joint: JointLinear, start: int, size: int, last: bool) -> None:
        super().__init__()
        self.joint, self.start, self.stop, self.last = joint, start, start + size, last

    def forward(self, _: Tensor) -> Tensor:
        out = self.joint.out
        assert out is not None
        if self.last:
            self.joint.out = None
        return out[..., self.start : self.stop]


def _join(module: nn.Module, names: Sequence[str]) -> None:
    """Compute a module's layers of these names together, if it has them and their inputs agree."""
    if not type(module).__module__.startswith("transformers."):
        return  # other code may call them in another order
    layers = [getattr(module, name, None) for name in names]
    if not all(type(layer) is nn.Linear for layer in layers):
        return
    if len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:  # type: ignore[union-attr]
        return
    joint = JointLinear(layers)  # type: ignore[arg-type]
    setattr(module, names[0], joint)
    start = joint.first
    for name, layer in zip(names[1:], layers[1:], strict=True):
        size: int = layer.out_features  # type: ignore[union-attr]
        setattr(module, name, JointPart(joint, start, size, name == names[-1]))
        start += size


def _joined(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter, of which those given become views."""
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = rows
    return nn.Parameter(whole, requires_grad=False)
