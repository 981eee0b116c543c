"""All that decides what comes next, as one declared object, and its way to the disk and back.

Weights, moments and the reference are tensors in files of their own; the rest is `Progress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keel.learn.optimizer import AdamW
from keel.models.policy import Policy
from keel.runs import checkpoint

STATE = "state.json"
POLICY = "policy"


@dataclass(frozen=True)
class Progress:
    """How far a stage has come. Everything the loop carries from step to step is here."""

    stage: int
    step: int = 0
    beta: float = 0.0
    stream: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    """Model-input tokens trained on so far, over all stages."""
    best: float | None = None
    best_step: int | None = None
    before: Mapping[str, Any] | None = None
    """The evaluation made before the first step."""


def save(
    folder: Path,
    progress: Progress,
    policy: Policy,
    optimizers: Mapping[str, AdamW],
    modules: Mapping[str, nn.Module],
    extra: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Fill a checkpoint folder.

    `policy/` loads with plain transformers; `trainable.safetensors` holds the same trainable
    parameters bit for bit as the run has them, `modules` (value head, critic) beside it, then the
    optimizers' moments, and whatever else decides what comes next (`extra`: the reference).
    """
    policy.save(folder / POLICY)
    tensors: dict[str, Tensor] = dict(policy.trainable())
    for name, module in modules.items():
        tensors |= {f"{name}/{key}": value for key, value in module.state_dict().items()}
    checkpoint.save_tensors(folder / "trainable.safetensors", tensors)
    for name, optimizer in optimizers.items():
        checkpoint.save_tensors(folder / f"{name}.safetensors", optimizer.state())
    for name, state in extra.items():
        checkpoint.save_tensors(folder / f"{name}.safetensors", state)
    checkpoint.save_json(folder / STATE, asdict(progress))


def read_progress(folder: Path) -> Progress:
    """The progress that a checkpoint holds."""
    return checkpoint.load_record(folder / STATE, Progress)


def restore_policy(folder: Path, policy: Policy) -> None:
    """Give the policy the trainable parameters of a checkpoint, in place."""
    tensors = checkpoint.load_tensors(folder / "trainable.safetensors")
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            parameter.copy_(tensors[name])


def restore_modules(folder: Path, modules: Mapping[str, nn.Module]) -> None:
    """Give value head and critic the parameters that a checkpoint of their stage holds."""
    tensors = checkpoint.load_tensors(folder / "trainable.safetensors")
    for name, module in modules.items():
        prefix = f"{name}/"
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        module.load_state_dict(own)


def read_reference(folder: Path) -> dict[str, Tensor]:
    """The reference that a checkpoint holds; empty where the policy's own base is the reference."""
    path = folder / "reference.safetensors"
    return checkpoint.load_tensors(path) if path.exists() else {}


def restore_optimizers(folder: Path, optimizers: Mapping[str, AdamW]) -> None:
    """Give optimizers their moments back."""
    for name, optimizer in optimizers.items():
        optimizer.restore(checkpoint.load_tensors(folder / f"{name}.safetensors"))
