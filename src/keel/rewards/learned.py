"""Rewards of learned models: outcome and process reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keel.rewards.context import RewardContext
from keel.rewards.model_scorer import Elsewhere, Here, ModelScorer, Spec, which_model
from keel.rewards.rules import texts


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
