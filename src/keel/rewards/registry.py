"""Reward functions by name, and the arguments that each requires."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, ValidationError

from keel.config.entry import load_entry, load_function
from keel.config.errors import explain_validation
from keel.config.fields import unknown
from keel.config.sources import CORRECTNESS, RewardSource
from keel.rewards.rules import BUILT_IN
from keel.types import KeelError, one_line

F = TypeVar("F", bound=Callable[..., Any])

TASK = "task"
"""The built-in reward that is the task's own verdict."""
MADE: Mapping[str, str] = {
    "math": "keel.rewards.graded:math",
    "code": "keel.rewards.code:code",
    "language": "keel.rewards.graded:language",
    "ifeval": "keel.rewards.graded:ifeval",
    "judge": "keel.rewards.judge:judge",
    "http": "keel.rewards.http:http",
    "outcome": "keel.rewards.learned:outcome",
    "process": "keel.rewards.learned:process",
    "returned": "keel.rewards.graded:returned",
    "step_match": "keel.rewards.learned:step_match",
}
"""Built-ins with state (a model, processes, a connection), by the function that makes them.

It takes the run's `RewardContext` and the recipe's options as a pydantic model; it returns a
function with TRL's signature, which may have a `close`.
"""
RESERVED = (
    "prompts",
    "completions",
    "completion_ids",
    "turns",
    "openings",
    "trainer_state",
    "log_extra",
    "log_metric",
    "log_summary",
)
"""The arguments that are not data columns."""
IF_NAMED = ("turns", "openings", "log_summary")
"""Those that `**kwargs` does not get."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardContext:
    """The parts of a run that a built-in reward may use.

    `tokenizer` is the policy's (None without a policy). `models` are the folders of the models that
    earlier stages of the run trained, by the stage's name. `folder` is where a reward may keep
    files (None: nowhere); `device` is the policy's. `template_time` is given to chat templates in
    another process (ISO 8601; None: the present).
    """

    tokenizer: Any = None
    models: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    device: str = "cpu"
    seed: int = 0
    template_time: str | None = None


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward of a recipe with its function; None is the task's own verdict.

    `required` and `optional` are the function's arguments that no option binds; `everything` is
    whether it has `**kwargs`.
    """

    name: str
    source: RewardSource
    function: Callable[..., Any] | None = None
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    everything: bool = False
    is_async: bool = False

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that are arguments of the function."""
        return {} if self.source.function in MADE else self.source.options

    @property
    def correctness(self) -> bool | None:
        """Whether its value means right or wrong; None: not declared."""
        declared = self.source.correctness
        return (self.source.function in CORRECTNESS or None) if declared is None else declared

    def changed(self, **keys: Any) -> NamedReward:
        """The reward with other keys of its source."""
        return replace(self, source=self.source.model_copy(update=keys))

    def wants(self, name: str) -> bool:
        """Whether the function is passed an argument of this name."""
        if name in self.options:
            return False
        if name in (*self.required, *self.optional):
            return True
        return self.everything and name not in IF_NAMED

    def gates(self, value: float | None) -> bool:
        """Whether this is a gate that rejects a completion of this value; None passes."""
        least = self.source.gate_below
        return least is not None and value is not None and value < least

    def clipped(self, value: float) -> float:
        """The value within the source's `clip`."""
        ends = self.source.clip
        return value if ends is None else min(max(value, ends[0]), ends[1])


def catalogue() -> list[tuple[str, str]]:
    """Every built-in reward by name, with one line on it."""
    found = [(TASK, "The task's own score: the reward if a recipe names no other.")]
    found += [(name, inspect.getdoc(function) or "") for name, function in BUILT_IN.items()]
    for name, entry in MADE.items():
        found.append((name, inspect.getdoc(load_entry(entry, "reward")) or ""))
    return [(name, " ".join(doc.partition("\n\n")[0].split())) for name, doc in found]


def _column(column: str) -> str:
    if column in RESERVED:
        raise ValueError(f"{column!r} comes from the run: name a column of the data")
    if not column.isidentifier() or keyword.iskeyword(column):
        raise ValueError(
            f"{column!r} cannot be an argument's name: rename the column in the data, to letters, "
            "digits and _"
        )
    return column


Column = Annotated[str, AfterValidator(_column)]
"""An option that names a data column, which is an argument of the reward."""


def with_arguments(function: F, required: Iterable[str], optional: Iterable[str] = ()) -> F:
    """A function whose options decide which columns are its arguments, with its signature set."""
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in required]
    parameters += [inspect.Parameter(name, kind, default=None) for name in optional]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def load_reward(source: RewardSource, context: RewardContext | None = None) -> NamedReward:
    """The reward of a recipe: a built-in, `module:function`, or `path/to/file.py:function`.

    Raises KeelError if there is none of that name, or its options do not fit.
    """
    name = source.function
    if name == TASK:
        if source.options:
            raise KeelError(f"reward {TASK!r}: unknown option {next(iter(source.options))!r}")
        return NamedReward(source.name or TASK, source)
    if ":" in name:
        return named_reward(load_function(name, "reward"), source)
    if name in BUILT_IN:
        return _rule(source)
    if name in MADE:
        return _made(source, context or RewardContext())
    guess = unknown("reward", name, [*BUILT_IN, *MADE, TASK])
    raise KeelError(f"{guess}; functions of your own are module:function")


def named_reward(function: Callable[..., Any], source: RewardSource) -> NamedReward:
    """A function, or an object with `__call__`, as the reward of a source; its own name unless the
    source has one.

    Raises KeelError for options that it does not take.
    """
    name = source.name or str(getattr(function, "__name__", type(function).__name__))
    parameters = list(inspect.signature(function).parameters.values())
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise KeelError(
                f"reward {name!r}: {parameter.name!r} is positional only, but rewards are called "
                "with keywords: remove the / from its signature"
            )
    reward = NamedReward(
        name, source, function, everything=everything, is_async=_is_async(function)
    )
    for option in reward.options:
        if option in RESERVED:
            raise KeelError(f"reward {name!r}: {option!r} comes from the run: drop the option")
        if not everything:
            _check_option(name, option, [n for n in named if n not in RESERVED])
    free = [p for p in named.values() if p.name not in reward.options]
    return replace(
        reward,
        required=tuple(p.name for p in free if p.default is p.empty),
        optional=tuple(p.name for p in free if p.default is not p.empty),
    )


def _rule(source: RewardSource) -> NamedReward:
    """A built-in rule, its options tried on no completions."""
    function = BUILT_IN[source.function]
    reward = named_reward(function, source)
    for option in reward.required:
        if option not in ("completions", "completion_ids", "answer"):
            raise KeelError(
                f"reward {reward.name!r}: the option {option!r} is not set: give it in `options`"
            )
    try:
        function(**{name: [] for name in reward.required}, **source.options)
    except (KeelError, TypeError, ValueError) as error:
        raise KeelError(f"reward {reward.name!r}: {one_line(error)}") from None
    return reward


def _made(source: RewardSource, context: RewardContext) -> NamedReward:
    """A built-in that is made from its options."""
    name = source.name or source.function
    maker = load_entry(MADE[source.function], "reward")
    options = read_options(source)
    try:
        made = maker(context, options)
    except (KeelError, TypeError, ValueError) as error:
        raise KeelError(f"reward {name!r}: {one_line(error)}") from error
    return named_reward(made, source.model_copy(update={"name": name}))


def options_of(name: str) -> type[BaseModel]:
    """The options of a built-in of `MADE`: the type of its maker's second argument."""
    options: type[BaseModel] = get_type_hints(load_entry(MADE[name], "reward"))["options"]
    return options


def read_options(source: RewardSource) -> BaseModel:
    """The options of a built-in of `MADE`. Raises KeelError if they do not fit."""
    model, name = options_of(source.function), source.name or source.function
    for option in source.options:
        _check_option(name, option, list(model.model_fields))
    for option, info in model.model_fields.items():
        if info.is_required() and option not in source.options:
            raise KeelError(f"reward {name!r}: the option {option!r} is not set: give it")
    try:
        return model.model_validate(source.options)
    except ValidationError as error:
        why = explain_validation(error, source.options, model)
        raise KeelError(f"reward {name!r}: {why}") from None


def _check_option(reward: str, option: str, known: Sequence[str]) -> None:
    """Raise KeelError for an option that a reward does not have."""
    if option not in known:
        guess = (
            unknown("option", option, known) if known else f"unknown option {option!r}: it has none"
        )
        raise KeelError(f"reward {reward!r}: {guess}")


def _is_async(function: Any) -> bool:
    if inspect.isclass(function) or inspect.isroutine(function):
        return inspect.iscoroutinefunction(function)
    # An object may have its coroutine in __call__.
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
