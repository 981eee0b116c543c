"""What of a stage goes to the disk and back: its state, everything that later steps depend on; the
policies of checkpoints; rollouts that no step has trained on yet, and the records of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from keel.config.model import Model
from keel.learn.optimizer import WeightOptimizer
from keel.learn.ranks import REFERENCE, described, files_of, load_parts
from keel.models.policy import BASE, Policy, load_policy
from keel.models.text import token_texts
from keel.runs import checkpoint
from keel.runs.rows import RolloutRow
from keel.training.rollout import Pending, Rollouts, expected_answer
from keel.types import (
    Completion,
    Group,
    KeelError,
    Prompt,
    RewardResult,
    Step,
)

STATE = "state.json"
POLICY = "policy"
PENDING = "pending.json"
TRAINABLE = "trainable.safetensors"


@dataclass(frozen=True)
class Progress:
    """The position of a stage: the part of its state that is not tensors.

    `token_budget` is what fitted into memory once it ran out or a trial found it, None before;
    `skipped` counts the optimizer steps that were not taken because they were not finite.
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
    advantage: Mapping[str, float] = field(default_factory=dict)
    """The state of an advantage that has one."""
    bonus: Sequence[float] = ()
    """Of an adaptive entropy bonus: see `with_bonus`."""
    rate_scale: float = 1.0
    """What callbacks have multiplied the learning rates of the stage's later steps by."""
    stopped: bool = False
    """Whether a rule of `stop_when` has ended the stage."""

    def is_over(self, steps: int) -> bool:
        """Whether a stage of `steps` steps has ended."""
        return self.stopped or self.step == steps


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


def restore_optimizers(folder: Path, optimizers: Mapping[str, WeightOptimizer]) -> None:
    """Load the optimizers' moments."""
    for name, optimizer in optimizers.items():
        if not files_of(folder, name):
            raise KeelError(f"checkpoint {folder} has no {name}: resume from another")
        optimizer.allocate(described(folder, name).keys())
        targets = optimizer.state()
        load_parts(folder, name, targets)
        optimizer.fill(targets)


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


# ---------------------------------------------------------------- pending rollouts


def save_pending(folder: Path, pending: Pending) -> None:
    """Write rollouts, as they are kept, into a checkpoint."""
    states = [_state(step, rollouts) for step, rollouts in pending.items()]
    checkpoint.save_json(folder / PENDING, {"pending": states})


def _state(step: int, rollouts: Rollouts) -> dict[str, Any]:
    # What users chose as text: its keys must not meet those of the state.
    state = {"step": step, **asdict(rollouts), "extras": json.dumps(rollouts.extras)}
    del state["seconds"]  # a checkpoint is a function of recipe and seed
    for group in state["groups"]:
        prompt = group["prompt"]
        prompt |= {name: json.dumps(prompt[name]) for name in ("content", "tools")}
        for completion in group["completions"]:
            completion["turns"] = json.dumps(completion["turns"])
    return state


def read_pending(folder: Path | None) -> Pending:
    """The rollouts that a checkpoint holds."""
    if folder is None or not (folder / PENDING).exists():
        return {}
    state = checkpoint.load_json(folder / PENDING)
    try:
        return {one["step"]: _read(one) for one in state["pending"]}
    except (KeyError, TypeError, ValueError) as error:
        raise KeelError(
            f"{folder / PENDING} was written by another version of Keel ({error}): resume with "
            "that version"
        ) from error


def _read(state: Mapping[str, Any]) -> Rollouts:
    return Rollouts(
        groups=tuple(_read_group(group) for group in state["groups"]),
        results=tuple(tuple(_read_result(one) for one in judged) for judged in state["results"]),
        greedy=state["greedy"],
        roles=tuple(state["roles"]),
        extras=json.loads(state["extras"]),
        metrics=state["metrics"],
    )


def _read_group(state: Mapping[str, Any]) -> Group:
    prompt = dict(state["prompt"])
    prompt |= {
        "content": json.loads(prompt["content"]),
        "tools": tuple(json.loads(prompt["tools"])),
    }
    completions = []
    for one in state["completions"]:
        turns, states = tuple(json.loads(one["turns"])), tuple(map(tuple, one["states"]))
        completions.append(Completion(**{**one, "turns": turns, "states": states}))
    return Group(Prompt(**prompt), tuple(completions))


def _read_result(state: Mapping[str, Any]) -> RewardResult:
    return RewardResult(**{**state, "steps": tuple(Step(**step) for step in state["steps"])})


# ---------------------------------------------------------------- records of rollouts


def rollout_records(
    rollouts: Rollouts, tokens: Mapping[str, Tensor], tokenizer: Any
) -> list[RolloutRow]:
    """A step's rollouts as the records of its Parquet file: one for each completion.

    `tokens` are values (N,) of the tokens that the policy wrote, by the name of their column.
    """
    completions = [c for group in rollouts.groups for c in group.completions]
    ends = np.cumsum([int(c.written.sum()) for c in completions])[:-1]
    split = {
        name: np.split(value_N.detach().cpu().numpy(), ends) for name, value_N in tokens.items()
    }
    rows = completion_rows(rollouts.groups, rollouts.results, tokenizer)
    return [
        replace(
            row,
            values={name: _placed(completion, parts[at]) for name, parts in split.items()},
            extras={name: extras[at] for name, extras in rollouts.extras.items()},
        )
        for at, (row, completion) in enumerate(zip(rows, completions, strict=True))
    ]


def completion_rows(
    groups: Sequence[Group], results: Sequence[Sequence[RewardResult]], tokenizer: Any
) -> list[RolloutRow]:
    """Completions with their results as records, without values of their tokens."""
    ids = {int(i) for group in groups for c in group.completions for i in c.tokens}
    texts = token_texts(tokenizer, sorted(ids))
    return [
        RolloutRow(
            group=g,
            prompt_id=group.prompt.id,
            task=group.prompt.task,
            prompt=group.prompt.content,
            expected=expected_answer(group.prompt),
            completion=completion.transcript,
            tokens=completion.tokens,
            pieces=tuple(texts[int(i)] for i in completion.tokens),
            log_probs=completion.log_probs,
            written=completion.written,
            finish=completion.finish,
            weight_version=completion.weight_version,
            reward=result.reward,
            components=result.components,
            steps=result.steps,
            outcome=result.outcome,
        )
        for g, (group, judged) in enumerate(zip(groups, results, strict=True))
        for completion, result in zip(group.completions, judged, strict=True)
    ]


def _placed(completion: Completion, written: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values of the written tokens at their places in the completion, 0 at the others."""
    out = np.zeros(len(completion), dtype=np.float32)
    out[completion.written] = written
    return out
