"""Rewards of learned models: outcome and process reward models, here or in their own process.

`python -m keel.rewards.learned` is that process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from keel.graders.steps import Aggregate, aggregate
from keel.rewards.registry import RewardContext
from keel.rewards.rules import texts
from keel.rewards.steps import needs_tokenizer, on_tokens
from keel.runs.checkpoint import check_model
from keel.sandbox.worker import serve
from keel.sandbox.worker_pool import WorkerPool
from keel.types import Content, KeelError, Tools

HOW = ("steps", "min", "last", "product", "mean")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which reward model, and how it is run; plain values, which another process can be sent.

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


class LocalModel:
    """A reward model in this process. Equal answers to equal prompts are scored once."""

    def __init__(self, spec: ModelSpec) -> None:
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

    def score(
        self, prompts: Sequence[Content], completions: Sequence[str], tools: Sequence[Any] = ()
    ) -> list[list[float]]:
        """The model's scores of each answer, in order: one, or one for each step.

        `tools` are those of each prompt, if any has some.
        """
        each = tools or [()] * len(prompts)
        given = [tuple(own) if isinstance(own, list) else () for own in each]
        rows = list(zip(prompts, completions, given, strict=True))
        keys = list(map(repr, rows))
        places = {key: at for at, key in reversed(list(enumerate(keys)))}
        answers = {key: self._answer(*rows[at], f"completion {at}") for key, at in places.items()}
        # By length, so that a pass holds answers that take alike long.
        order = sorted(answers, key=lambda key: (len(answers[key].tokens), places[key]))
        scores = self.model.judge([answers[key] for key in order], self.spec.token_budget)
        found = dict(zip(order, scores, strict=True))
        return [found[key] for key in keys]

    def close(self) -> None:
        """The model is freed with its last reference."""

    def _answer(self, prompt: Content, completion: str, tools: Tools, name: str) -> Any:
        if self.spec.kind == "outcome":
            answer = self.reader.answer(prompt, completion, name, tools=tools)
        else:
            separator = self.spec.separator
            answer = self.reader.split(prompt, completion, separator, name, tools=tools)
        context = self.model.context
        if context is not None and len(answer.tokens) > context:
            raise KeelError(
                f"{name} is {len(answer.tokens)} tokens with its prompt, more than the reward "
                f"model's context of {context}: lower rollout.max_tokens, or take another model"
            )
        return answer


class RemoteModel:
    """A reward model in a process of its own, which ends with this one."""

    def __init__(self, spec: ModelSpec, timeout: float, memory_mb: int) -> None:
        self.spec, self.timeout = spec, timeout
        self.pool = WorkerPool("keel.rewards.learned", workers=1, memory_mb=memory_mb)

    def score(
        self, prompts: Sequence[Content], completions: Sequence[str], tools: Sequence[Any] = ()
    ) -> list[list[float]]:
        """As `LocalModel.score`. Raises KeelError where the process fails."""
        rows = {"prompts": list(prompts), "completions": list(completions), "tools": list(tools)}
        reply = self.pool.map([{"spec": asdict(self.spec), "rows": rows}], self.timeout)[0]
        if reply.wrong is not None:
            raise KeelError(
                f"the process of reward model {self.spec.name!r}: {reply.wrong}: {reply.message}"
            )
        if "error" in reply.value:
            raise KeelError(reply.value["error"])
        scores: list[list[float]] = reply.value["scores"]
        return scores

    def close(self) -> None:
        """End the process."""
        self.pool.close()


class OutcomeReward:
    """The score of each completion, as one forward pass over packed answers gives it."""

    def __init__(self, model: LocalModel | RemoteModel, version: str | None) -> None:
        self.model, self.version = model, version
        self.close = model.close

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None],
        openings: Sequence[str] | None = None,
        tools: Sequence[Any] = (),
    ) -> list[float]:
        """A score for each completion; Bradley–Terry scores have no zero of their own.

        An answer is read with what the policy's chat template opened it with; a prompt of plain
        text holds that itself. Each is recorded with
        the stage that trained the model.
        """
        if self.version is not None:
            log_extra("version", [self.version] * len(completions))
        opened = [""] * len(completions) if openings is None else openings
        answers = [
            text if isinstance(asked, str) else begun + text
            for asked, begun, text in zip(prompts, opened, texts(completions), strict=True)
        ]
        return [scores[0] for scores in self.model.score(prompts, answers, tools)]


class ProcessReward:
    """The probability that each step is right, at the token that closes it; or one for all."""

    def __init__(
        self,
        model: LocalModel | RemoteModel,
        separator: str,
        how: Literal["steps"] | Aggregate,
        tokenizer: Any,
    ) -> None:
        self.model, self.separator, self.how, self.tokenizer = model, separator, how, tokenizer
        self.close = model.close

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        tools: Sequence[Any] = (),
    ) -> list[Any]:
        """For each completion its steps as (index of the last token, probability), or one number.

        An answer without any step gets 0.
        """
        answers = texts(completions)
        scores = self.model.score(prompts, answers, tools)
        right = [[_sigmoid(z) for z in logits] for logits in scores]
        if self.how != "steps":
            return [aggregate(steps, self.how) for steps in right]
        return [
            on_tokens(self.tokenizer, ids, text, self.separator, steps)
            for ids, text, steps in zip(completion_ids, answers, right, strict=True)
        ]


def outcome(
    context: RewardContext,
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
    """The score of an outcome reward model: a folder, a hub name, or one an earlier stage trained.

    `device` is the policy's unless given; at most `token_budget` tokens are in one forward pass.
    With `process` the model lives in a process of its own (`memory_mb` bounds it, 0 does not), and
    a call may take `timeout` seconds. With `raw` plain prompts go without the chat template.
    """
    name = which_model(context, model, stage)
    where = context.device.split(":")[0] if device is None else device
    spec = ModelSpec(name, "outcome", where, dtype, token_budget, "\n", trust_remote_code, raw)
    scorer = RemoteModel(spec, timeout, memory_mb) if process else LocalModel(spec)
    return OutcomeReward(scorer, stage)


def process(
    context: RewardContext,
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
) -> ProcessReward:
    """The score of a process reward model for each step, or for the answer by way of its steps.

    `aggregate` makes one number of the steps' probabilities: min, last, product or mean; "steps"
    keeps them apart, for process supervision. The rest is as for `outcome`.
    """
    if aggregate not in HOW:
        raise KeelError(f"aggregate = {aggregate!r}: give {', '.join(HOW)}")
    name = which_model(context, model, stage)
    where = context.device.split(":")[0] if device is None else device
    spec = ModelSpec(name, "process", where, dtype, token_budget, separator, trust_remote_code, raw)
    tokenizer = needs_tokenizer(context.tokenizer) if aggregate == "steps" else context.tokenizer
    scorer = RemoteModel(spec, timeout, memory_mb) if process else LocalModel(spec)
    return ProcessReward(scorer, separator, aggregate, tokenizer)


def which_model(context: RewardContext, model: str | None, stage: str | None) -> str:
    """The folder or hub name that the options name. Raises KeelError unless there is one."""
    if (model is None) == (stage is None):
        raise KeelError(
            "set exactly one of the options model (a folder or hub name) and stage (the name of a "
            "stage before, which trains it)"
        )
    if stage is None:
        assert model is not None
        return model
    if stage not in context.models:
        names = ", ".join(context.models) or "none"
        raise KeelError(
            f"stage = {stage!r}: no stage of the recipe makes a reward model of that "
            f"name (those that do: {names})"
        )
    folder = context.models[stage]
    if not folder.is_dir():
        raise KeelError(
            f"stage {stage!r} has not made its reward model yet: put it before this one"
        )
    check_model(folder)
    return str(folder)


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


class _ModelServer:
    """Loads the model with the first item and keeps it."""

    def __init__(self) -> None:
        self.model: LocalModel | None = None

    def __call__(self, item: Any) -> dict[str, Any]:
        """The scores of an item's answers, or the message of what is wrong."""
        try:
            if self.model is None:
                self.model = LocalModel(ModelSpec(**item["spec"]))
            return {"scores": self.model.score(**item["rows"])}
        except KeelError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    serve(_ModelServer())
