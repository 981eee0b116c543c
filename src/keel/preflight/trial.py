"""The shortened run of a recipe that shows how much memory each of its stages takes.

It is the recipe itself with two steps a stage, each sequence as long as the longest possible, and
only as many sequences as fill the memory. Data, rewards and engines are replaced: rewards differ
within a group, so that each completion enters the loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from keel.config.entry import load_entry
from keel.config.judging import PROMPTS_AT_ONCE, JudgingStage
from keel.config.optimisation import Checkpoints, Trackers
from keel.config.sampling import Evaluation, Rollout
from keel.config.schema import Cluster, Recipe, RLStage, SFTStage, Stage
from keel.config.sources import PreferenceData, Rewards, RewardSource, TaskSource
from keel.data.tasks.base import BaseTask
from keel.engines.native import NativeEngine
from keel.engines.vllm.engine import VllmEngine
from keel.models.families import context_length
from keel.models.packed import sizes_on
from keel.preflight.context import LongestExample, StageContext
from keel.preflight.trial_batch import OPERATIONS, SHORTEST, Load
from keel.types import Completion, Engine, Group, Prompt, Sampling, Split

LEARNED = ("outcome", "process")
"""Built-in rewards that are models."""
STEPS = 2
"""Of a stage: an optimizer's state is there from the second on."""
COUNTED = 65_536
"""Sequences of a step that are counted, to see how many fill a micro-batch."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A recipe to run, and by stage: its longest example, the tokens of a completion that are
    sampled, and what of its memory is not measured."""

    recipe: Recipe
    examples: Mapping[str, LongestExample]
    sampled: Mapping[str, int] = field(default_factory=dict)
    omitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def sampled_tokens(self, name: str) -> int:
        """Tokens of all completions that a step of the stage samples; 0 where it samples none."""
        (stage,) = (stage for stage in self.recipe.stages if stage.name == name)
        if stage.sampling is None:
            return 0
        rollout = stage.sampling.rollout
        return rollout.prompts_per_step * rollout.group_size * self.sampled[name]


def trial_of(contexts: Sequence[StageContext], load: Load, path: Path) -> Trial | None:
    """The trial of the stages of which an example is known; None where there are none.

    `path` is where the examples will be. A stage whose reward model starts from that of a stage
    without an example is left out too.
    """
    recipe = contexts[0].recipe
    examples = {c.stage.name: c.work.longest for c in contexts if c.work.longest is not None}
    stages: list[Stage] = []
    sampled: dict[str, int] = {}
    omitted: dict[str, tuple[str, ...]] = {}
    for stage in recipe.stages:
        base = stage.base_model
        known = {one.name for one in stages}
        if stage.name not in examples or (base and base.stage and base.stage not in known):
            continue
        short = _ShortStage(stage, examples[stage.name], load, str(path), known)
        stages.append(short.stage())
        sampled[stage.name] = short.sampled
        omitted[stage.name] = tuple(short.omitted())
    if not stages:
        return None
    # One process: what several need together is not measured.
    changes: dict[str, Any] = {"stages": tuple(stages), "cluster": Cluster()}
    if load.device in ("cpu", "cuda"):
        changes["model"] = recipe.model.model_copy(update={"device": load.device})
    return Trial(recipe.model_copy(update=changes), examples, sampled, omitted)


class _ShortStage:
    """One stage of a trial."""

    def __init__(
        self, stage: Stage, example: LongestExample, load: Load, path: str, known: set[str]
    ) -> None:
        self.original, self.example, self.load, self.known = stage, example, load, known
        self.options = {"path": path, "stage": stage.name}
        self.task = TaskSource(name=f"{__name__}:task", options=self.options, raw=example.raw)
        self.sampled = 0
        """Tokens of a completion that are sampled; 0 where nothing is."""

    def stage(self) -> Stage:
        """The shortened stage."""
        stage = self.original
        changes: dict[str, Any] = {
            "steps": min(stage.steps, STEPS),
            "on_nonfinite": "skip",
            "checkpoints": Checkpoints(every=STEPS + 1, keep=1),
            "trackers": Trackers(),
        }
        if stage.records is not None:
            changes |= self._judged(cast(JudgingStage, stage))
        elif stage.demonstrated:
            changes |= {
                "tasks": (self.task,),
                "demonstration": "keel.data.tasks.generated:gold",
                "batch_size": self._examples(cast(SFTStage, stage).batch_size),
            }
        else:
            changes |= self._rl(cast(RLStage, stage))
        found: Stage = stage.model_copy(update=changes)
        return found

    def omitted(self) -> Iterator[str]:
        """What of the stage's memory and time the trial does not measure."""
        sampling = self.original.sampling
        if sampling is None:
            return
        rollout = sampling.rollout
        n = rollout.prompts_per_step * rollout.group_size
        rows = min(rollout.max_rows, self._prompts(rollout) * rollout.group_size)
        if self.sampled < rollout.max_tokens or rows < min(n, rollout.max_rows):
            yield (
                f"memory of sampling beyond {self.sampled} tokens of {rows} completions at a time: "
                "this model would take minutes here"
            )
        if rollout.max_turns > 1 or rollout.program is not None:
            yield "memory of what earlier turns of a conversation leave to later ones"
        if rollout.program is not None:
            yield "time of rollout.program and of its requests"
        for source in sampling.rewards.functions:
            if source.function in LEARNED and not self._kept(source):
                yield f"memory of reward {source.name or source.function!r}"

    # ------------------------------------------------------------ kinds of stages

    def _rl(self, stage: RLStage) -> dict[str, Any]:
        rollout, evaluation = stage.rollout, stage.evaluation
        minibatches = min(stage.minibatches, STEPS)
        of_minibatch = math.ceil(rollout.prompts_per_step / stage.minibatches)
        filling = self._groups_of_two_passes(rollout)
        learned = minibatches * min(of_minibatch, filling)
        prompts = min(rollout.prompts_per_step, max(learned, self._prompts(rollout)))
        self.sampled = self._sampled_tokens(rollout, prompts)
        short = {"prompts_per_step": prompts, "stop": (), "stop_ids": (), "mask_truncated": False}
        short["program"] = None
        evaluated = self._evaluated(rollout, evaluation, prompts)
        silent = {"every": 0, "component": None, "prompts": evaluated}
        return {
            "steps": min(stage.steps, STEPS + rollout.async_level),
            "tasks": (self.task,),
            "epochs": 1,
            "minibatches": minibatches,
            "rollout": rollout.model_copy(update=short),
            "rewards": self._rewards(stage.rewards, of_steps=stage.algorithm.needs_steps),
            "value": stage.value.model_copy(update={"warmup_steps": 0}),
            "evaluation": evaluation.model_copy(update=silent),
        }

    def _judged(self, stage: JudgingStage) -> dict[str, Any]:
        changes: dict[str, Any] = {
            "batch_size": self._examples(stage.batch_size),
            "evaluation": stage.evaluation.model_copy(update={"rows": 0}),
        }
        choice = stage.sampled
        if choice is None:
            options = {**self.options, "count": changes["batch_size"]}
            name = f"{__name__}:rows"
            data = PreferenceData(name=name, options=options, raw=stage.raw, empty="keep")
            return {**changes, "data": data}
        rollout = choice.sampling.rollout
        prompts = self._prompts(rollout)
        self.sampled = self._sampled_tokens(rollout, prompts)
        update = {
            "tasks": (self.task,),
            "rewards": self._rewards(choice.rewards, of_steps=stage.records == "steps"),
            "train": min(choice.train, PROMPTS_AT_ONCE, prompts),
            "validation": 1,
            "noise": 0.0,
            "people": None,
            # An end-of-sequence token is added to what was sampled.
            "max_tokens": max(1, choice.max_tokens - 1),
        }
        return {**changes, "sampled": choice.model_copy(update=update)}

    # ------------------------------------------------------------ how much

    def _groups_of_two_passes(self, rollout: Rollout) -> int:
        """Prompts whose completions fill two micro-batches: the second adds to gradients."""
        n = rollout.group_size
        count = max(1, min(rollout.prompts_per_step, COUNTED // n))
        prompt, whole = self.example.tokens, self.example.tokens + rollout.max_tokens
        shared = [0, *[prompt] * (n - 1)]
        return math.ceil(self._two_passes([whole] * n * count, shared * count) / n)

    def _examples(self, batch_size: int) -> int:
        """Examples that fill two micro-batches, or the batch."""
        return self._two_passes([self.example.tokens] * min(batch_size, COUNTED), ())

    def _two_passes(self, lengths: list[int], shared: Sequence[int]) -> int:
        sizes = sizes_on(torch.device(self.load.device), lengths, shared)
        spans = sizes.spans(self.original.token_budget)
        return spans[1].stop + 1 if len(spans) > 2 else len(lengths)

    def _prompts(self, rollout: Rollout) -> int:
        """Prompts whose completions are sampled at a time, as many as take seconds."""
        affordable = OPERATIONS[self.load.device] / (2 * self.load.parameters * SHORTEST)
        completions = min(rollout.max_rows, affordable)
        return max(1, min(rollout.prompts_per_step, math.ceil(completions / rollout.group_size)))

    def _sampled_tokens(self, rollout: Rollout, prompts: int) -> int:
        """Tokens of each completion, as many as take seconds."""
        tokens = OPERATIONS[self.load.device] / (2 * self.load.parameters)
        length = min(self.load.steps, int(tokens / (prompts * rollout.group_size)))
        return min(rollout.max_tokens, max(SHORTEST, length))

    def _evaluated(self, rollout: Rollout, evaluation: Evaluation, prompts: int) -> int:
        """Prompts of an evaluation, where it takes more at a time than the rollouts do."""
        samples = max(1, evaluation.samples)
        rows = min(rollout.max_rows, evaluation.prompts * samples)
        sampled = min(rollout.max_rows, prompts * rollout.group_size)
        if rows <= sampled and rollout.dtype == "model":
            return 0
        return min(evaluation.prompts, self._prompts(rollout) * rollout.group_size)

    # ------------------------------------------------------------ rewards

    def _rewards(self, rewards: Rewards, *, of_steps: bool) -> Rewards:
        """The learned rewards, whose models take memory, and a reward that always differs."""
        plain = {"gate_below": None, "gated_reward": 0.0, "clip": None, "normalise": "none"}
        kept = [one.model_copy(update=plain) for one in rewards.functions if self._kept(one)]
        entry = alternating_step_reward if of_steps else alternating_reward
        trial = RewardSource(function=f"{__name__}:{entry.__name__}", name="trial")
        return rewards.model_copy(update={"functions": (*kept, trial), "on_error": "stop"})

    def _kept(self, source: RewardSource) -> bool:
        stage = source.options.get("stage")
        here = not source.options.get("process")
        return source.function in LEARNED and here and (stage is None or stage in self.known)


# ---------------------------------------------------------------- in the trial's process


class RepeatedPrompt(BaseTask):
    """One prompt, repeated, with its answer; validation may have another prompt."""

    def __init__(self, name: str, example: dict[str, Any]) -> None:
        self.name = name
        self.example = example

    def prompt(self, split: Split, index: int) -> Prompt:
        content = self.example["prompt"]
        if split == "validation":
            content = self.example.get("validation", content)
        tools = tuple(self.example.get("tools", ()))
        return Prompt(f"{self.name}/{split}/{index}", content, {}, self.name, tools=tools)

    def gold(self, prompt: Prompt) -> str | None:
        answer: str | None = self.example.get("answer")
        return answer


def task(*, path: str, stage: str) -> RepeatedPrompt:
    """The task of a stage: its longest prompt."""
    return RepeatedPrompt(stage, _example(path, stage))


def rows(*, path: str, stage: str, count: int) -> list[dict[str, Any]]:
    """The preference data of a stage: its longest example, `count` times."""
    return [_example(path, stage)] * count


def _example(path: str, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))[stage]
    return found


def alternating_reward(*, completions: Sequence[Any], **_: Any) -> list[float]:
    """0 and 1 in turn."""
    return [float(at % 2) for at in range(len(completions))]


def alternating_step_reward(
    *, completion_ids: Sequence[Sequence[int]], **_: Any
) -> list[list[tuple[int, float]]]:
    """The same, as the reward of a completion's only step."""
    return [[(len(ids) - 1, float(at % 2))] for at, ids in enumerate(completion_ids)]


class FullLengthEngine:
    """Completions of `max_tokens` tokens each.

    After `sampled` tokens, and where `inner` stops earlier, the last token is repeated.
    """

    def __init__(self, inner: Engine, context: int | None, sampled: int) -> None:
        self.inner, self.context, self.sampled = inner, context, sampled
        self.sync = inner.sync

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        """See `keel.types.Engine`."""
        groups = []
        shorter = replace(sampling, max_tokens=min(sampling.max_tokens, self.sampled))
        for group in self.inner.sample(prompts, n, shorter, seed):
            length = sampling.max_tokens
            if self.context is not None:
                length = min(length, self.context - len(group.prompt.tokens))
            completions = tuple(_lengthened(c, length) for c in group.completions)
            groups.append(Group(group.prompt, completions))
        return groups


def full_length(name: str, sampled: Callable[[], int]) -> Callable[..., FullLengthEngine]:
    """An entry for `keel.engines.registry.ENGINES` that replaces the engine `name`.

    The native engine samples on after the end-of-sequence token.
    """

    def build(model: PreTrainedModel, tokenizer: Any, **options: Any) -> FullLengthEngine:
        inner: Engine
        if name == "native":
            inner = native = NativeEngine(model, tokenizer, **options)
            native.eos = ()
        elif name == "vllm":
            inner = VllmEngine(model, tokenizer, **options)
        else:
            dtype = options["dtype"]
            options["dtype"] = "model" if dtype is None else str(dtype).removeprefix("torch.")
            inner = load_entry(name, "engine")(model=model, tokenizer=tokenizer, **options)
        return FullLengthEngine(inner, context_length(model), sampled())

    return build


def _lengthened(completion: Completion, length: int) -> Completion:
    missing = length - len(completion)
    if missing <= 0 or not len(completion):
        return completion
    padded: dict[str, Any] = {
        name: np.pad(getattr(completion, name), (0, missing), mode="edge")
        for name in ("tokens", "log_probs", "written")
    }
    return replace(completion, finish="length", **padded)
