"""Rewards of learned models, outcome and process, and where the rewards of steps go.

A model is here or in its own process, `python -m keel.rewards.learned`. `step_match` is the rule
that judges steps by a gold answer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from pydantic import model_validator

from keel.algorithms.terms import FrozenModel
from keel.config.fields import Index, Seconds, Tokens
from keel.data.columns import gold_entries, read_gold
from keel.models.text import split_steps, token_ends
from keel.platform.process import (
    JsonChild,
    Restarting,
    python_environment,
    python_module,
    serve,
)
from keel.rewards.registry import RewardContext
from keel.rewards.rules import texts
from keel.runs.checkpoint import check_model
from keel.types import Content, KeelError, Tools

F = TypeVar("F", bound=Callable[..., Any])
START_SECONDS = 120.0
"""A process that has not started by then never will; imports on a busy machine take a while."""


class OutcomeOptions(FrozenModel):
    """Which outcome reward model, and how it is run; plain values, which another process can be
    sent."""

    model: str | None = None
    """A folder or a hub name."""
    stage: str | None = None
    """The earlier stage that trains the model."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """None: the policy's."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    token_budget: Tokens = 16_384
    """The most tokens in one forward pass."""
    process: bool = False
    """The model has a process of its own."""
    timeout: Seconds = 300.0
    """Seconds that a call to that process may take."""
    memory_mb: Index = 0
    """The address space of that process; 0: no limit."""
    trust_remote_code: bool = False
    raw: bool = False
    """Plain prompts go without the chat template."""

    @model_validator(mode="after")
    def _one_model(self) -> OutcomeOptions:
        if (self.model is None) == (self.stage is None):
            raise ValueError(
                "set exactly one of the options model (a folder or hub name) and stage (the name "
                "of a stage before, which trains it)"
            )
        return self


class ProcessOptions(OutcomeOptions):
    """Which process reward model, and how it is run."""

    separator: str = "\n"
    """Cuts answers into steps."""
    aggregate: Literal["steps", "min", "last", "product", "mean"] = "steps"
    """Makes one number of the steps' probabilities; "steps" keeps them apart."""


class LocalModel:
    """A reward model in this process. Equal answers to equal prompts are scored once."""

    def __init__(self, options: OutcomeOptions) -> None:
        from keel.config.model import Model
        from keel.models.reward import load_reward_model

        self.options = options
        self.model = load_reward_model(
            Model(
                name=options.model,
                device=options.device or "auto",
                dtype=options.dtype,
                trust_remote_code=options.trust_remote_code,
            ),
            "process" if isinstance(options, ProcessOptions) else "outcome",
        )
        self.reader = self.model.reader(options.raw)

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
        scores = self.model.judge([answers[key] for key in order], self.options.token_budget)
        found = dict(zip(order, scores, strict=True))
        return [found[key] for key in keys]

    def close(self) -> None:
        """The model is freed with its last reference."""

    def _answer(self, prompt: Content, completion: str, tools: Tools, name: str) -> Any:
        if isinstance(self.options, ProcessOptions):
            separator = self.options.separator
            answer = self.reader.split(prompt, completion, separator, name, tools=tools)
        else:
            answer = self.reader.answer(prompt, completion, name, tools=tools)
        context = self.model.context
        if context is not None and len(answer.tokens) > context:
            raise KeelError(
                f"{name} is {len(answer.tokens)} tokens with its prompt, more than the reward "
                f"model's context of {context}: lower rollout.max_tokens, or take another model"
            )
        return answer


class RemoteModel:
    """A reward model in a process of its own, which ends with this one."""

    def __init__(self, options: OutcomeOptions) -> None:
        self.options = options
        self.child = Restarting(self._started)

    def _started(self) -> JsonChild:
        command = python_module("keel.rewards.learned", str(self.options.memory_mb))
        child = JsonChild(command, environment=python_environment(PYTHONHASHSEED="0"))
        child.first(START_SECONDS, None)
        return child

    def score(
        self, prompts: Sequence[Content], completions: Sequence[str], tools: Sequence[Any] = ()
    ) -> list[list[float]]:
        """As `LocalModel.score`. Raises KeelError if the process fails."""
        rows = {"prompts": list(prompts), "completions": list(completions), "tools": list(tools)}
        kind = "process" if isinstance(self.options, ProcessOptions) else "outcome"
        item = {"kind": kind, "options": self.options.model_dump(), "rows": rows}
        try:
            reply = self.child.ask(self.options.timeout, item)
        except TimeoutError:
            raise KeelError(
                f"the process of reward model {self.options.model!r} gives no scores within "
                f"{self.options.timeout:g} s: raise its option timeout"
            ) from None
        if "error" in reply:
            raise KeelError(reply["error"])
        scores: list[list[float]] = reply["ok"]
        return scores

    def close(self) -> None:
        """End the process."""
        self.child.close()


def outcome(context: RewardContext, options: OutcomeOptions) -> Callable[..., Any]:
    """The score of an outcome reward model: a folder, a hub name, or the result of a stage.

    Bradley–Terry scores have no zero of their own. Each is recorded with the stage that trained the
    model.
    """
    model = _load(context, options)

    def outcome(
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None],
        openings: Sequence[str] | None = None,
        tools: Sequence[Any] = (),
    ) -> list[float]:
        if options.stage is not None:
            log_extra("version", [options.stage] * len(completions))
        # What the chat template opened an answer with is read; a prompt of plain text holds it.
        opened = [""] * len(completions) if openings is None else openings
        answers = [
            text if isinstance(asked, str) else begun + text
            for asked, begun, text in zip(prompts, opened, texts(completions), strict=True)
        ]
        return [scores[0] for scores in model.score(prompts, answers, tools)]

    return _with_model(outcome, model)


def process(context: RewardContext, options: ProcessOptions) -> Callable[..., Any]:
    """The score of a process reward model for each step, or for the answer by way of its steps.

    For each completion its steps as (index of the last token, probability of being right), or one
    number. An answer without any step gets 0.
    """
    how = options.aggregate
    if how == "steps":
        needs_tokenizer(context.tokenizer)
    model = _load(context, options)

    def process(
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        tools: Sequence[Any] = (),
    ) -> list[Any]:
        answers = texts(completions)
        scores = model.score(prompts, answers, tools)
        right = [[_sigmoid(z) for z in logits] for logits in scores]
        if how != "steps":
            return [aggregate(steps, how) for steps in right]
        return [
            on_tokens(context.tokenizer, ids, text, options.separator, steps)
            for ids, text, steps in zip(completion_ids, answers, right, strict=True)
        ]

    return _with_model(process, model)


def _with_model(function: F, model: LocalModel | RemoteModel) -> F:
    """A reward whose model ends with it."""
    function.model, function.close = model, model.close  # type: ignore[attr-defined]
    return function


def _load(context: RewardContext, options: OutcomeOptions) -> LocalModel | RemoteModel:
    device = options.device or context.device.split(":")[0]
    name = which_model(context, options.model, options.stage)
    # With the model's name alone: a stage is known here and not in another process.
    chosen = options.model_copy(update={"model": name, "stage": None, "device": device})
    return RemoteModel(chosen) if options.process else LocalModel(chosen)


def which_model(context: RewardContext, model: str | None, stage: str | None) -> str:
    """The folder or hub name: `model`, or that of the model which a stage trained."""
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


def _serve() -> Callable[[Any], list[list[float]] | None]:
    """What answers requests: the model is loaded with the first scores, and kept.

    The first item, which waits for the start, is None.
    """
    models: list[LocalModel] = []

    def answer(item: Any) -> list[list[float]] | None:
        if item is None:
            return None
        if not models:
            kind = {"outcome": OutcomeOptions, "process": ProcessOptions}[item["kind"]]
            models.append(LocalModel(kind(**item["options"])))
        return models[0].score(**item["rows"])

    return answer


if __name__ == "__main__":
    serve(_serve(), memory_mb=int(sys.argv[1]))


Aggregate = Literal["min", "last", "product", "mean"]
Judged = list[tuple[int, float]]
"""What a process reward says: (index of the step's last token, reward) of each step."""


def on_tokens(
    tokenizer: Any, ids: Sequence[int], text: str, separator: str, rewards: Sequence[float]
) -> Judged:
    """The steps' rewards at the tokens that close them; the last step closes with the answer.

    An answer without any step is one step, with reward 0; one without any token has none.
    """
    if not ids:
        return []
    last = len(ids) - 1
    spans = split_steps(text, separator)
    if not spans:
        return [(last, 0.0)]
    ends = [*token_ends(tokenizer, ids, [end for _, end in spans[:-1]]), last]
    if len(set(ends)) < len(ends):
        raise KeelError(
            f"two steps of {text[:40]!r} end in one token, so they cannot be distinguished: "
            f"choose another separator than {separator!r}"
        )
    return list(zip(ends, rewards, strict=True))


def aggregate(right: Sequence[float], how: Aggregate) -> float:
    """The judgement of a whole answer from the probabilities of its steps being right.

    min: as good as the worst step. last: what is thought at the end. product: that all are right,
    taken as independent. mean. An answer without a step gets 0.
    """
    if not right:
        return 0.0
    if how == "min":
        return min(right)
    if how == "last":
        return right[-1]
    if how == "product":
        return math.prod(right)
    return sum(right) / len(right)


def needs_tokenizer(tokenizer: Any) -> Any:
    """The policy's tokenizer. Raises KeelError if there is none to place steps with."""
    if tokenizer is None:
        raise KeelError("steps end at tokens of a policy, and there is none here")
    return tokenizer


class StepMatchOptions(FrozenModel):
    """The options of `step_match`."""

    separator: str = "\n"
    """Steps stand between separators."""
    strict: bool = True
    """A step counts only if all before it were right: the labels are of a first wrong step."""


def step_match(context: RewardContext, options: StepMatchOptions) -> Callable[..., Any]:
    """A rule that judges an answer step by step against the gold one.

    1 for each step that is the `answer` column's, in its place, and 0 for the others. None if the
    column is empty.
    """
    tokenizer, separator = needs_tokenizer(context.tokenizer), options.separator
    split_steps("", separator)  # refuses a separator that divides nothing, before the run

    def step_match(
        *,
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        answer: Sequence[Any],
    ) -> list[Judged | None]:
        rewards: list[Judged | None] = []
        for text, ids, value in zip(texts(completions), completion_ids, answer, strict=True):
            golds = map(str, gold_entries(read_gold(value)))
            marks = max(
                (_marks(text, gold, separator, options.strict) for gold in golds),
                key=sum,
                default=None,
            )
            judged = None if marks is None else on_tokens(tokenizer, ids, text, separator, marks)
            rewards.append(judged)
        return rewards

    return step_match


def _marks(text: str, gold: str, separator: str, strict: bool) -> list[float]:
    wanted = [gold[a:b].strip() for a, b in split_steps(gold, separator)]
    wanted = [step.removesuffix(separator).strip() for step in wanted]
    marks: list[float] = []
    for number, (a, b) in enumerate(split_steps(text, separator)):
        step = text[a:b].removesuffix(separator).strip()
        fits = number < len(wanted) and step == wanted[number]
        marks.append(float(fits and (not strict or all(marks))))
    # An answer that stops short is wrong at its end.
    if marks and len(marks) < len(wanted):
        marks[-1] = 0.0
    return marks
