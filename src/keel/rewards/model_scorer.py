"""A reward model at work for a reward: in this process, or in one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.rewards.context import RewardContext
from keel.runs.checkpoint import check_model
from keel.sandbox.worker_pool import WorkerPool
from keel.types import Content, KeelError


@dataclass(frozen=True, slots=True)
class Spec:
    """Which reward model, and how it is run; plain values, so that another process can get it.

    `separator` cuts answers into steps (process models); `token_budget` bounds the tokens that are
    in one forward pass; with `raw` plain prompts go without the chat template.
    """

    name: str
    kind: Literal["outcome", "process"]
    device: str = "auto"
    dtype: str = "float32"
    token_budget: int = 16_384
    separator: str = "\n"
    trust_remote_code: bool = False
    raw: bool = False


class ModelScorer(Protocol):
    """Says what a reward model thinks of answers, at each place that it judges."""

    def judge(
        self, prompts: Sequence[Content], completions: Sequence[str]
    ) -> list[list[float]]: ...

    def close(self) -> None: ...


class Here:
    """The model in this process. Equal answers to equal prompts are judged once."""

    def __init__(self, spec: Spec) -> None:
        from keel.config.model import Model
        from keel.models.reward import load_reward_model

        self.spec = spec
        self.model = load_reward_model(
            Model(
                name=spec.name,
                device=spec.device,  # type: ignore[arg-type]
                dtype=spec.dtype,  # type: ignore[arg-type]
                trust_remote_code=spec.trust_remote_code,
            ),
            spec.kind,
        )
        self.reader = self.model.reader(spec.raw)

    def judge(self, prompts: Sequence[Content], completions: Sequence[str]) -> list[list[float]]:
        """What the model says of each answer, in order."""
        keys = [repr((p, c)) for p, c in zip(prompts, completions, strict=True)]
        places = {key: at for at, key in reversed(list(enumerate(keys)))}
        answers = {
            key: self._answer(prompts[at], completions[at], f"completion {at}")
            for key, at in places.items()
        }
        # By length, so that a pass holds answers that take alike long.
        order = sorted(answers, key=lambda key: (len(answers[key].tokens), places[key]))
        scores = self.model.judge([answers[key] for key in order], self.spec.token_budget)
        found = dict(zip(order, scores, strict=True))
        return [found[key] for key in keys]

    def close(self) -> None:
        """Nothing to let go of: the model goes with its last reader."""

    def _answer(self, prompt: Content, completion: str, name: str) -> Any:
        if self.spec.kind == "outcome":
            answer = self.reader.answer(prompt, completion, name)
        else:
            answer = self.reader.split(prompt, completion, self.spec.separator, name)
        context = self.model.context
        if context is not None and len(answer.tokens) > context:
            raise KeelError(
                f"{name} is {len(answer.tokens)} tokens with its prompt, more than the reward "
                f"model's context of {context}: lower rollout.max_tokens, or take another model"
            )
        return answer


class Elsewhere:
    """The model in a process of its own, which ends with this one."""

    def __init__(self, spec: Spec, timeout: float, memory_mb: int) -> None:
        self.spec, self.timeout = spec, timeout
        self.pool = WorkerPool("keel.rewards.model_process", workers=1, memory_mb=memory_mb)

    def judge(self, prompts: Sequence[Content], completions: Sequence[str]) -> list[list[float]]:
        """What the model says of each answer, in order. Raises KeelError where it fails."""
        rows = [[p, c] for p, c in zip(prompts, completions, strict=True)]
        item = {"spec": {k: getattr(self.spec, k) for k in Spec.__slots__}, "rows": rows}
        judged = self.pool.map([item], self.timeout)[0]
        if judged.wrong is not None:
            raise KeelError(
                f"the process of reward model {self.spec.name!r}: {judged.wrong}: {judged.message}"
            )
        if "error" in judged.value:
            raise KeelError(judged.value["error"])
        scores: list[list[float]] = judged.value["scores"]
        return scores

    def close(self) -> None:
        """End the process."""
        self.pool.close()


def which_model(around: RewardContext, model: str | None, stage: str | None) -> str:
    """The folder or hub name that the options name. Raises KeelError unless there is one."""
    if (model is None) == (stage is None):
        raise KeelError(
            "set exactly one of the options model (a folder or hub name) and stage (the name of a "
            "stage before, which trains it)"
        )
    if stage is None:
        assert model is not None
        return model
    if stage not in around.models:
        names = ", ".join(around.models) or "none"
        raise KeelError(
            f"stage = {stage!r}: no stage of the recipe makes a reward model of that "
            f"name (those that do: {names})"
        )
    folder: Path = around.models[stage]
    if not folder.is_dir():
        raise KeelError(
            f"stage {stage!r} has not made its reward model yet: put it before this one"
        )
    check_model(folder)
    return str(folder)
