"""The weights that the static decoder samples with: the model's own, or a copy in another type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.models.attention import compile_layers
from keel.models.families import head_of, is_compiled
from keel.models.lora import affine, lora_layers


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
        self.compiled = is_compiled(model)
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
