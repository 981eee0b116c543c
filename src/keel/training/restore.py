"""The policy that a checkpoint holds: a whole model, or an adapter on the recipe's base."""

from __future__ import annotations

import json
from pathlib import Path

from keel.config.model import Model
from keel.config.schema import Recipe
from keel.models.policy import BASE, Policy, load_policy
from keel.training.state import POLICY, restore_policy
from keel.types import KeelError


def holds_adapter(checkpoint: Path) -> bool:
    """Whether a checkpoint's policy is an adapter, to be put on its base."""
    return (checkpoint / POLICY / BASE).is_file()


def checkpoint_policy(recipe: Recipe, checkpoint: Path) -> Policy:
    """The policy of a run's checkpoint.

    Raises KeelError where it does not load; of an adapter also where its base is not there, or is
    not the one that the adapter was trained on.
    """
    if not holds_adapter(checkpoint):
        update = {"name": str(checkpoint / POLICY), "build": None, "lora": None, "revision": None}
        return load_policy(recipe.model.model_copy(update=update), recipe.seed)
    try:
        policy = load_policy(recipe.model, recipe.seed)
    except KeelError as error:
        raise KeelError(
            f"checkpoint {checkpoint} holds an adapter, and its base ({base_name(recipe.model)}) "
            f"does not load: {error}"
        ) from error
    check_base(policy, recipe.model, checkpoint)
    restore_policy(checkpoint, policy)
    return policy


def check_base(policy: Policy, model: Model, checkpoint: Path) -> None:
    """Raise KeelError where a checkpoint's adapter was trained on other weights than the policy's
    base has."""
    if not holds_adapter(checkpoint):
        return
    file = checkpoint / POLICY / BASE
    try:
        recorded = json.loads(file.read_text("utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"{file} cannot be read: use another checkpoint") from error
    if recorded != policy.base_fingerprint:
        raise KeelError(
            f"the base model ({base_name(model)}) has other weights than those that the adapter "
            f"of checkpoint {checkpoint} was trained on: put the same base there again"
        )


def base_name(model: Model) -> str:
    """The base as the recipe names it."""
    if model.build is not None:
        return f"model.build of family {model.build.family!r}"
    return f"model.name = {model.name!r}"
