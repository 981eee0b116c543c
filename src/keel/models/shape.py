"""The shape of a model, in numbers (`keel.analysis.costs.Shape`), from its config alone or from its
modules; no weight is made or read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from keel.analysis.costs import Shape
from keel.config.model import Lora, Model
from keel.models import lora
from keel.models.families import FAMILIES, Family, check_family
from keel.models.loading import read_config

SAVED = {"gelu_new": 6}
"""Tensors of an ungated MLP that are kept for the backward pass if its activation is written in
Python; with one of torch two."""


def model_config(spec: Model) -> PreTrainedConfig:
    """The config of the recipe's model; a folder needs config.json alone. Raises KeelError."""
    folder = Path(spec.name or "").expanduser()
    if spec.name is not None and (folder / "config.json").is_file():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=spec.trust_remote_code
        )
        check_family(config, trusted=spec.trust_remote_code)
        return config
    return read_config(spec)


def without_weights(config: PreTrainedConfig, trusted: bool = False) -> PreTrainedModel:
    """The model of a config, with sizes and no memory; `trusted`: its own code may run."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    return model


def shape_of(model: PreTrainedModel) -> Shape:
    """The numbers of a model, which may be without weights; those of adapters are left out."""
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type, Family())
    output = model.get_output_embeddings()
    named = [(n, p) for n, p in model.base_model.named_parameters() if "lora_" not in n]
    modules = [(n, m) for n, m in model.base_model.named_modules() if "lora_" not in n]
    tables = {id(m.weight) for _, m in modules if isinstance(m, nn.Embedding)}
    products = [m for _, m in modules if isinstance(m, (nn.Linear, Conv1D))]
    linear = sum(map(_weights, products))
    inside = {id(m.weight) for m in products}
    embedding = sum(p.numel() for _, p in named if id(p) in tables)
    rest = sum(p.numel() for _, p in named if id(p) not in tables | inside)
    tied = output is None or id(output.weight) in tables
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    per_head = int(getattr(config, "head_dim", None) or hidden // heads)
    several = int(getattr(config, "num_key_value_heads", None) or heads)
    shared = bool(getattr(config, "multi_query", False))
    query, keys = heads * per_head, per_head * (1 if shared else several)
    mlp, share = _mlp(config, family)
    names = [getattr(config, key, "") for key in ("activation_function", "hidden_act")]
    saved = 4 if family.gated else max(SAVED.get(str(name), 2) for name in names)
    return Shape(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        query=query,
        keys=keys,
        mlp=mlp,
        vocabulary=int(config.vocab_size if output is None else output.weight.shape[0]),
        embedding=embedding,
        backbone=rest + linear,
        head=0 if tied else sum(p.numel() for p in output.parameters()),
        linear=linear,
        quantisable=sum(_weights(m) for m in products if isinstance(m, nn.Linear)),
        experts=sum(p.numel() for _, p in named if p.dim() == 3),
        share=share,
        norms=sum(_features(n, hidden, query, keys) for n, m in modules if _is_norm(m)),
        rms=not any(isinstance(m, nn.LayerNorm) for _, m in modules),
        gated=family.gated,
        saved=saved,
        adapted=sum(_ends(m) for m in products),
    )


def adapted(model: PreTrainedModel, spec: Lora) -> int:
    """Σ (inputs + outputs) of the layers that get an adapter; times its rank, its weights, those of
    modules that are trained as a whole included."""
    modules = lora.module_names(model, spec.modules_to_save)
    names = lora.target_names(model, spec.targets, model.get_output_embeddings(), modules)
    weights = [p for name in modules for p in model.get_submodule(name).parameters()]
    whole: dict[int, int] = {id(p): p.numel() for p in weights}
    ends = sum(_ends(model.get_submodule(name)) for name in names)
    return ends + sum(whole.values()) // spec.rank


def _weights(layer: nn.Module) -> int:
    """Weights of a linear layer, whatever they are stored in."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * layer.out_features
    return int(layer.weight.numel())  # type: ignore[operator]


def _ends(layer: nn.Module) -> int:
    """Inputs and outputs of a linear layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features + layer.out_features
    return sum(layer.weight.shape)  # type: ignore[arg-type]


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("norm")


def _features(name: str, hidden: int, query: int, keys: int) -> int:
    """Features that a norm reads of a token; one inside of attention may have the weights of a
    single head."""
    end = name.rsplit(".", 1)[-1]
    return query if end.startswith("q_") else keys if end.startswith("k_") else hidden


def _mlp(config: PreTrainedConfig, family: Family) -> tuple[int, float]:
    """Features inside the MLP that a token passes through, and the share of the experts."""
    width = int(getattr(config, family.width, None) or 4 * config.hidden_size)
    if not family.experts:
        return width, 0.0
    chosen = int(config.num_experts_per_tok)
    every = getattr(config, "num_local_experts", None) or config.num_experts
    own = int(getattr(config, "moe_intermediate_size", None) or width)
    shared = int(getattr(config, "shared_expert_intermediate_size", None) or 0)
    return chosen * own + shared, chosen / int(every)
