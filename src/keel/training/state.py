"""All that decides what comes next, as one declared object, and its way to the disk and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keel.learn.optimizer import AdamW
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.runs import checkpoint
from keel.training.prefetch import Pending, save_pending
from keel.types import KeelError

STATE = "state.json"
POLICY = "policy"
TRAINABLE = "trainable.safetensors"
REFERENCE = "reference.safetensors"


@dataclass(frozen=True)
class Progress:
    """How far a stage has come: what is no tensor of all that the loop carries from step to step.

    `token_budget` is what memory had room for where it ran out, None before; `skipped` counts the
    optimizer steps that were not taken because they were not finite.
    """

    stage: int
    step: int = 0
    beta: float = 0.0
    stream: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    """Tokens trained on so far, over all stages."""
    best: float | None = None
    best_step: int | None = None
    before: Mapping[str, Any] | None = None
    """The evaluation made before the first step."""
    token_budget: int | None = None
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class State:
    """All that decides what a stage does next: nothing else may change from step to step.

    The weights that learn (the policy's, and `modules`: value head, critic, reward model), the
    optimizers' moments, the reference, rollouts that were drawn ahead (`pending`), and `progress`.
    Random numbers are functions of the seed and the step, so none of their generators is state.
    """

    progress: Progress
    policy: Policy
    optimizers: Mapping[str, AdamW]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    reference: Reference | None = None
    pending: Pending | None = None

    def save(self, folder: Path) -> None:
        """Fill a checkpoint folder.

        `policy/` loads with plain transformers; with LoRA it is the adapter alone, which peft puts
        on its base. `trainable.safetensors` holds the same trainable parameters bit for bit as the
        run has them, its other modules; then the moments, and the reference where the
        policy's own base is not it.
        """
        if self.policy.has_lora:
            self.policy.save_adapter(folder / POLICY)
        else:
            self.policy.save(folder / POLICY)
        tensors: dict[str, Tensor] = dict(self.policy.trainable())
        for name, module in self.modules.items():
            tensors |= {f"{name}/{key}": value for key, value in module.state_dict().items()}
        checkpoint.save_tensors(folder / TRAINABLE, tensors)
        for name, optimizer in self.optimizers.items():
            checkpoint.save_tensors(folder / f"{name}.safetensors", optimizer.state())
        reference = {} if self.reference is None else self.reference.state()
        if reference:
            checkpoint.save_tensors(folder / REFERENCE, reference)
        if self.pending is not None:
            save_pending(folder, self.pending)
        checkpoint.save_json(folder / STATE, asdict(self.progress))


def read_progress(folder: Path) -> Progress:
    """The progress that a checkpoint holds."""
    return checkpoint.load_record(folder / STATE, Progress)


def restore_policy(folder: Path, policy: Policy) -> None:
    """Give the policy the trainable parameters of a checkpoint, in place.

    Raises KeelError where the recipe's model has others, or in other shapes.
    """
    tensors = checkpoint.load_tensors(folder / TRAINABLE)
    own = policy.trainable()
    there = {name: tuple(t.shape) for name, t in tensors.items() if "/" not in name}
    _check_fit(folder, there, {name: tuple(p.shape) for name, p in own.items()})
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def restore_modules(folder: Path, modules: Mapping[str, nn.Module]) -> None:
    """Give modules the parameters that a checkpoint of their stage holds."""
    tensors = checkpoint.load_tensors(folder / TRAINABLE)
    for name, module in modules.items():
        prefix = f"{name}/"
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        there = {name: tuple(tensor.shape) for name, tensor in own.items()}
        _check_fit(folder, there, {n: tuple(t.shape) for n, t in module.state_dict().items()})
        module.load_state_dict(own)


def read_reference(folder: Path) -> dict[str, Tensor]:
    """The reference that a checkpoint holds; empty where the policy's own base is the reference."""
    path = folder / REFERENCE
    return checkpoint.load_tensors(path) if path.exists() else {}


def restore_optimizers(folder: Path, optimizers: Mapping[str, AdamW]) -> None:
    """Give optimizers their moments back."""
    for name, optimizer in optimizers.items():
        optimizer.restore(checkpoint.load_tensors(folder / f"{name}.safetensors"))


def _check_fit(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    odd = [n for n in sorted(there.keys() | wanted.keys()) if there.get(n) != wanted.get(n)]
    if odd:
        shapes = [
            " × ".join(map(str, d[odd[0]])) if odd[0] in d else "absent" for d in (there, wanted)
        ]
        raise KeelError(
            f"checkpoint {folder} does not fit the recipe's model: {odd[0]} is {shapes[0]} in it "
            f"and {shapes[1]} in the model ({len(odd)} such weights): put the model's keys in "
            "recipe.toml back, or start a new run"
        )
