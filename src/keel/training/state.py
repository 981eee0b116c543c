"""The state of a stage: everything that later steps depend on; written to and read from disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keel.config.model import Model
from keel.learn.optimizer import AdamW
from keel.learn.ranks import REFERENCE, described, files_of, load_parts
from keel.models.policy import BASE, Policy, load_policy
from keel.runs import checkpoint
from keel.training.prefetch import Pending, save_pending
from keel.types import KeelError

STATE = "state.json"
POLICY = "policy"
TRAINABLE = "trainable.safetensors"


@dataclass(frozen=True)
class Progress:
    """The position of a stage: the part of its state that is not tensors.

    `token_budget` is what fitted into memory once it ran out, None before; `skipped` counts the
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
    """The evaluation before the first step."""
    token_budget: int | None = None
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class State:
    """Everything that a stage's later steps depend on.

    The policy's trained weights, what was learned with it (`save_learned` writes it: the modules,
    the optimizers' moments and the reference), prefetched rollouts (`pending`), and `progress`.
    Random numbers are functions of the seed and the step, so no generator is part of the state.
    """

    progress: Progress
    policy: Policy
    save_learned: Callable[[Path], None]
    pending: Pending = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the files of a checkpoint.

        `policy/` loads with plain transformers; with LoRA it is the adapter alone, for peft.
        `trainable.safetensors` holds the policy's trainable parameters bit for bit. Of what ranks
        share each writes its part (`NAME-00001-of-00002.safetensors`).
        """
        if self.policy.has_lora:
            self.policy.save_adapter(folder / POLICY)
        else:
            self.policy.save(folder / POLICY)
        checkpoint.save_tensors(folder / TRAINABLE, self.policy.trainable())
        self.save_learned(folder)
        if self.pending:
            save_pending(folder, self.pending)
        checkpoint.save_json(folder / STATE, asdict(self.progress))


def read_progress(folder: Path) -> Progress:
    """The progress that a checkpoint holds."""
    return checkpoint.load_record(folder / STATE, Progress)


def restore_policy(folder: Path, policy: Policy) -> None:
    """Load the trainable parameters of a checkpoint into the policy. Raises KeelError if names
    or shapes differ."""
    tensors = checkpoint.load_tensors(folder / TRAINABLE)
    own = policy.trainable()
    there = {name: tuple(t.shape) for name, t in tensors.items()}
    _check_fit(folder, there, {name: tuple(p.shape) for name, p in own.items()})
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def restore_modules(folder: Path, modules: Mapping[str, nn.Module]) -> None:
    """Load the parameters of modules from a checkpoint of their stage."""
    for name, module in modules.items():
        own = {key: value.detach() for key, value in module.state_dict().items()}
        pair = (described(folder, name), own)
        shapes = ({n: tuple(t.shape) for n, t in tensors.items()} for tensors in pair)
        _check_fit(folder, *shapes)
        load_parts(folder, name, own)


def read_reference(folder: Path) -> dict[str, Tensor]:
    """The reference that a checkpoint holds; empty if the policy's own base is the reference."""
    there = described(folder, REFERENCE)
    whole = {name: torch.empty_like(tensor, device="cpu") for name, tensor in there.items()}
    load_parts(folder, REFERENCE, whole)
    return whole


def restore_optimizers(folder: Path, optimizers: Mapping[str, AdamW]) -> None:
    """Load the optimizers' moments."""
    for name, optimizer in optimizers.items():
        if not files_of(folder, name):
            raise KeelError(f"checkpoint {folder} has no {name}: resume from another")
        optimizer.allocate(described(folder, name).keys())
        load_parts(folder, name, optimizer.state())


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


# ---------------------------------------------------------------- policies of checkpoints


def holds_adapter(folder: Path) -> bool:
    """Whether a checkpoint's policy is a LoRA adapter without its base."""
    return (folder / POLICY / BASE).is_file()


def checkpoint_policy(model: Model, seed: int, folder: Path) -> Policy:
    """The policy of the checkpoint in `folder`; `model` and `seed` are those of its recipe.

    Raises KeelError if it does not load; of an adapter also if its base is missing, or is
    not the one that the adapter was trained on.
    """
    if not holds_adapter(folder):
        update = {"name": str(folder / POLICY), "build": None, "lora": None, "revision": None}
        return load_policy(model.model_copy(update=update), seed)
    try:
        policy = load_policy(model, seed)
    except KeelError as error:
        raise KeelError(
            f"checkpoint {folder} holds an adapter, and its base ({base_name(model)}) "
            f"does not load: {error}"
        ) from error
    check_base(policy, model, folder)
    restore_policy(folder, policy)
    return policy


def check_base(policy: Policy, model: Model, folder: Path) -> None:
    """Raise KeelError if a checkpoint's adapter was trained on other weights than the policy's
    base has."""
    if not holds_adapter(folder):
        return
    file = folder / POLICY / BASE
    try:
        recorded = json.loads(file.read_text("utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{file} cannot be read: use another checkpoint") from error
    if recorded != policy.base_fingerprint:
        raise KeelError(
            f"the base model ({base_name(model)}) has other weights than those that the adapter "
            f"of checkpoint {folder} was trained on: restore the same base"
        )


def base_name(model: Model) -> str:
    """The base as the recipe names it."""
    if model.build is not None:
        return f"model.build of family {model.build.family!r}"
    return f"model.name = {model.name!r}"
