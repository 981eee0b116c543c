"""Rewards of learned models: outcome and process reward models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from keel.graders.steps import Aggregate, aggregate
from keel.rewards.context import RewardContext
from keel.rewards.model_scorer import Elsewhere, Here, ModelScorer, Spec, which_model
from keel.rewards.rules import texts
from keel.rewards.steps import needs_tokenizer, on_tokens
from keel.types import KeelError


class OutcomeReward:
    """The score of each completion, as one forward pass over packed answers gives it."""

    def __init__(self, judging: ModelScorer) -> None:
        self.judging = judging

    def __call__(self, *, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """A score for each completion; Bradley–Terry scores have no zero of their own."""
        return [scores[0] for scores in self.judging.judge(prompts, texts(completions))]

    def close(self) -> None:
        """Let the model go."""
        self.judging.close()


def outcome(
    around: RewardContext,
    *,
    model: str | None = None,
    stage: str | None = None,
    device: str | None = None,
    dtype: str = "float32",
    token_budget: int = 16_384,
    process: bool = False,
    timeout: float = 300.0,
    memory_mb: int = 0,
    trust_remote_code: bool = False,
    raw: bool = False,
) -> OutcomeReward:
    """The score of an outcome reward model: a folder or hub name, or what a stage before trained.

    `device` is the policy's unless given; at most `token_budget` tokens are in one forward pass.
    With `process` the model lives in a process of its own (`memory_mb` bounds it, 0 does not), and
    a call may take `timeout` seconds. With `raw` plain prompts go without the chat template.
    """
    name = which_model(around, model, stage)
    where = around.device.split(":")[0] if device is None else device
    spec = Spec(
        name, "outcome", where, dtype, token_budget, trust_remote_code=trust_remote_code, raw=raw
    )
    return OutcomeReward(Elsewhere(spec, timeout, memory_mb) if process else Here(spec))


HOW = ("steps", "min", "last", "product", "mean")


class Process:
    """The probability that each step is right, at the token that closes it; or one for all."""

    def __init__(
        self,
        judging: ModelScorer,
        separator: str,
        how: Literal["steps"] | Aggregate,
        tokenizer: Any,
    ) -> None:
        self.judging, self.separator, self.how, self.tokenizer = judging, separator, how, tokenizer

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
    ) -> list[Any]:
        """For each completion its steps as (index of the last token, probability), or one number.

        An answer without any step gets 0.
        """
        answers = texts(completions)
        right = [[_sigmoid(z) for z in logits] for logits in self.judging.judge(prompts, answers)]
        if self.how != "steps":
            return [aggregate(steps, self.how) for steps in right]
        return [
            on_tokens(self.tokenizer, ids, text, self.separator, steps)
            for ids, text, steps in zip(completion_ids, answers, right, strict=True)
        ]

    def close(self) -> None:
        """Let the model go."""
        self.judging.close()


def process(
    around: RewardContext,
    *,
    model: str | None = None,
    stage: str | None = None,
    separator: str = "\n",
    aggregate: Literal["steps"] | Aggregate = "steps",
    device: str | None = None,
    dtype: str = "float32",
    token_budget: int = 16_384,
    process: bool = False,
    timeout: float = 300.0,
    memory_mb: int = 0,
    trust_remote_code: bool = False,
    raw: bool = False,
) -> Process:
    """The judgement of a process reward model on each step, or on the answer by way of its steps.

    `aggregate` makes one number of the steps' probabilities: min, last, product or mean; "steps"
    keeps them apart, for process supervision. The rest is as for `outcome`.
    """
    if aggregate not in HOW:
        raise KeelError(f"aggregate = {aggregate!r}: give {', '.join(HOW)}")
    name = which_model(around, model, stage)
    where = around.device.split(":")[0] if device is None else device
    spec = Spec(name, "process", where, dtype, token_budget, separator, trust_remote_code, raw)
    judging: ModelScorer = Elsewhere(spec, timeout, memory_mb) if process else Here(spec)
    tokenizer = needs_tokenizer(around.tokenizer) if aggregate == "steps" else around.tokenizer
    return Process(judging, separator, aggregate, tokenizer)


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))
