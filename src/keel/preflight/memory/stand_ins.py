"""What takes the place of data, rewards and engines in a trial run.

Every sequence is as long as the longest that the recipe allows, and rewards differ within a group,
so that each completion enters the loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from keel.config.entry import load_entry
from keel.data.tasks.base import BaseTask
from keel.engines.native import NativeEngine
from keel.models.families import context_length
from keel.types import Completion, Engine, Group, Prompt, Sampling, Side

HERE = "keel.preflight.memory.stand_ins"
TASK, ROWS = f"{HERE}:task", f"{HERE}:rows"
REWARD, STEP_REWARD = f"{HERE}:alternating_reward", f"{HERE}:alternating_step_reward"


class RepeatedPrompt(BaseTask):
    """One prompt, again and again, with its answer; validation may have another prompt."""

    def __init__(self, name: str, example: dict[str, Any]) -> None:
        self.name = name
        self.example = example

    def prompt(self, side: Side, index: int) -> Prompt:
        content = self.example["prompt"]
        if side == "heldout":
            content = self.example.get("heldout", content)
        return Prompt(f"{self.name}/{side}/{index}", content, {}, self.name)

    def gold(self, prompt: Prompt) -> str | None:
        answer: str | None = self.example.get("answer")
        return answer


def task(*, path: str, stage: str) -> RepeatedPrompt:
    """The task of a stage: its longest prompt."""
    return RepeatedPrompt(stage, _example(path, stage))


def rows(*, path: str, stage: str, count: int) -> list[dict[str, Any]]:
    """The preference data of a stage: its longest example, so many times."""
    return [_example(path, stage)] * count


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

    Beyond `sampled` tokens, and where `inner` stops earlier, the last token is repeated.
    """

    def __init__(self, inner: Engine, context: int | None, sampled: int) -> None:
        self.inner = inner
        self.context = context
        self.sampled = sampled

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        """See `keel.types.Engine`."""
        shorter = replace(sampling, max_tokens=min(sampling.max_tokens, self.sampled))
        return [
            Group(
                group.prompt,
                tuple(
                    _lengthened(c, self._length(group.prompt, sampling)) for c in group.completions
                ),
            )
            for group in self.inner.sample(prompts, n, shorter, seed)
        ]

    def sync(self, weights: Any) -> None:
        """See `keel.types.Engine`."""
        self.inner.sync(weights)

    def _length(self, prompt: Prompt, sampling: Sampling) -> int:
        if self.context is None:
            return sampling.max_tokens
        return min(sampling.max_tokens, self.context - len(prompt.tokens))


def full_length(name: str, sampled: Callable[[], int]) -> Callable[..., FullLengthEngine]:
    """An entry for `keel.engines.registry.ENGINES` in the place of the engine `name`.

    The native engine samples on beyond the end-of-sequence token.
    """

    def build(
        model: PreTrainedModel, tokenizer: Any, *, dtype: torch.dtype | None, **options: Any
    ) -> FullLengthEngine:
        inner: Engine
        if name == "native":
            inner = native = NativeEngine(model, tokenizer, dtype=dtype, **options)
            native.eos = ()
        else:
            kind = "model" if dtype is None else str(dtype).removeprefix("torch.")
            make = load_entry(name, "engine")
            inner = make(model=model, tokenizer=tokenizer, dtype=kind, **options)
        return FullLengthEngine(inner, context_length(model), sampled())

    return build


def _lengthened(completion: Completion, length: int) -> Completion:
    missing = length - len(completion)
    if missing <= 0 or not len(completion):
        return completion
    return replace(
        completion,
        tokens=np.pad(completion.tokens, (0, missing), mode="edge"),
        log_probs=np.pad(completion.log_probs, (0, missing), mode="edge"),
        written=np.pad(completion.written, (0, missing), mode="edge"),
        finish="length",
    )


def _example(path: str, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))[stage]
    return found
