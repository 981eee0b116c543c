"""Reward functions by name, and the arguments that each requires."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from keel.config.entry import load_entry
from keel.config.errors import explain_validation
from keel.config.fields import unknown
from keel.config.sources import RewardSource
from keel.rewards.rules import BUILT_IN
from keel.types import KeelError, one_line

Made = TypeVar("Made")
Options = TypeVar("Options", bound=BaseModel)

TASK = "task"
"""The built-in reward that is the task's own verdict."""
CORRECTNESS = ("exact_match", "numeric_match", "choice", "place_match", "math", "code")
"""Built-ins whose 1 means that the answer is right."""
MADE: Mapping[str, str] = {
    "math": "keel.rewards.graded:math",
    "code": "keel.rewards.code:code",
    "language": "keel.rewards.graded:language",
    "judge": "keel.rewards.judge.reward:judge",
    "outcome": "keel.rewards.learned:outcome",
    "process": "keel.rewards.learned:process",
    "returned": "keel.rewards.graded:returned",
    "step_match": "keel.rewards.steps:step_match",
}
"""Built-ins with state (a model, processes, a connection), by the function that makes them.

It takes the run's `RewardContext`, and the recipe's options as keyword-only arguments; it returns a
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
)
"""The arguments that are not data columns."""


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
    """A reward function, its weight, and the keyword arguments that the recipe binds.

    `function` None is the task's own verdict. `required` and `optional` are its named arguments
    that are not bound; `everything` is whether it has `**kwargs`. `clip`, `normalise`, `gate_below`
    and `gated_reward` are the recipe's (`RewardSource`). `correctness` is whether its value means
    right or wrong; None: not declared.
    """

    name: str
    function: Callable[..., Any] | None
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    everything: bool = False
    is_async: bool = False
    clip: tuple[float, float] | None = None
    normalise: Literal["none", "group", "batch"] = "none"
    gate_below: float | None = None
    gated_reward: float = 0.0
    correctness: bool | None = None

    def wants(self, name: str) -> bool:
        """Whether the function is passed an argument of this name."""
        if name in self.options:
            return False
        if name in (*self.required, *self.optional):
            return True
        return self.everything and name not in ("turns", "openings")  # only if they are named

    def gates(self, value: float | None) -> bool:
        """Whether this is a gate that rejects a completion of this value; None passes."""
        return self.gate_below is not None and value is not None and value < self.gate_below

    def clipped(self, value: float) -> float:
        """The value within `clip`."""
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


def catalogue() -> list[tuple[str, str]]:
    """Every built-in reward by name, with one line on it. Imports none that is made."""
    found = [(TASK, "The task's own score: the reward if a recipe names no other.")]
    found += [(name, inspect.getdoc(function) or "") for name, function in BUILT_IN.items()]
    for name, entry in MADE.items():
        module, _, maker = entry.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        made = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == maker)
        found.append((name, ast.get_docstring(made) or ""))
    return [(name, " ".join(doc.partition("\n\n")[0].split())) for name, doc in found]


def check_column(option: str, column: str) -> None:
    """Raise KeelError for a column that a reward's option names and that no argument can be."""
    if column in RESERVED:
        raise KeelError(f"{option} = {column!r} comes from the run: name a column of the data")
    if not column.isidentifier() or keyword.iskeyword(column):
        raise KeelError(
            f"{option} = {column!r} cannot be an argument's name: rename the column in the data, "
            "to letters, digits and _"
        )


def keywords(required: Iterable[str], optional: Iterable[str] = ()) -> inspect.Signature:
    """The signature of a function whose options decide which columns are its arguments."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, kind) for name in required]
        + [inspect.Parameter(name, kind, default=None) for name in optional]
    )


def load_reward(source: RewardSource, context: RewardContext | None = None) -> NamedReward:
    """The reward of a recipe: a built-in, `module:function`, or `path/to/file.py:function`.

    Raises KeelError if there is none of that name, or its options do not fit.
    """
    name, correctness = source.function, source.correctness
    if name == TASK:
        if source.options:
            raise KeelError(f"reward {TASK!r}: unknown option {next(iter(source.options))!r}")
        reward = NamedReward(source.name or TASK, None)
    elif ":" in name:
        function = load_entry(name, "reward")
        if not callable(function):
            raise KeelError(f"reward {name!r} is a {type(function).__name__}, not a function")
        reward = named_reward(function, source.name, options=source.options)
    elif name in BUILT_IN:
        reward = _rule(source)
    elif name in MADE:
        reward = _made(source, context or RewardContext())
    else:
        guess = unknown("reward", name, [*BUILT_IN, *MADE, TASK])
        raise KeelError(f"{guess}; functions of your own are module:function")
    return replace(
        reward,
        weight=source.weight,
        clip=source.clip,
        normalise=source.normalise,
        gate_below=source.gate_below,
        gated_reward=source.gated_reward,
        correctness=(name in CORRECTNESS or None) if correctness is None else correctness,
    )


def named_reward(
    function: Callable[..., Any],
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> NamedReward:
    """A function, or an object with `__call__`, as a reward; its own name unless one is given.

    Raises KeelError for options that it does not take.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    options = dict(options or {})
    parameters = list(inspect.signature(function).parameters.values())
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise KeelError(
                f"reward {name!r}: {parameter.name!r} is positional only, but rewards are called "
                "with keywords: remove the / from its signature"
            )
    for option in options:
        if option in RESERVED:
            raise KeelError(f"reward {name!r}: {option!r} comes from the run: drop the option")
        if not everything:
            _check_option(name, option, named)
    free = [p for p in named.values() if p.name not in options]
    return NamedReward(
        name=name,
        function=function,
        options=options,
        required=tuple(p.name for p in free if p.default is p.empty),
        optional=tuple(p.name for p in free if p.default is not p.empty),
        everything=everything,
        is_async=_is_async(function),
    )


def _rule(source: RewardSource) -> NamedReward:
    """A built-in rule, its options tried on no completions."""
    function = BUILT_IN[source.function]
    reward = named_reward(function, source.name, source.options)
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
    maker = check_options(source)
    name = source.name or source.function
    try:
        made = maker(context, **source.options)
    except (KeelError, TypeError, ValueError) as error:
        raise KeelError(f"reward {name!r}: {one_line(error)}") from error
    return named_reward(made, name)


def check_options(source: RewardSource) -> Callable[..., Any]:
    """What makes a built-in of `MADE`. Raises KeelError for options that do not fit."""
    maker: Callable[..., Any] = load_entry(MADE[source.function], "reward")
    name = source.name or source.function
    parameters = inspect.signature(maker).parameters.values()
    named = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    for option in source.options:
        _check_option(name, option, named)
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in source.options:
            raise KeelError(f"reward {name!r}: the option {option!r} is not set: give it")
    try:
        getattr(maker, "validate", lambda options: None)(source.options)
    except KeelError as error:
        raise KeelError(f"reward {name!r}: {error}") from None
    return maker


def with_options(model: type[Options]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """For a maker whose options are a pydantic model: it is called with the context and these.

    The result takes them as keywords, and raises KeelError for options that do not fit.
    """

    def validate(options: Mapping[str, Any]) -> Options:
        try:
            return model.model_validate(options)
        except ValidationError as error:
            raise KeelError(explain_validation(error, options, model)) from None

    def decorate(maker: Callable[[RewardContext, Options], Made]) -> Callable[..., Made]:
        @functools.wraps(maker)
        def made(context: RewardContext, **options: Any) -> Made:
            return maker(context, validate(options))

        kind = inspect.Parameter.KEYWORD_ONLY
        made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name,
                    kind,
                    default=inspect.Parameter.empty
                    if field.is_required()
                    else field.get_default(call_default_factory=True),
                )
                for name, field in model.model_fields.items()
            ]
        )
        made.validate = validate  # type: ignore[attr-defined]
        return made

    return decorate


def _check_option(reward: str, option: str, named: Iterable[str]) -> None:
    """Raise KeelError for an option that a reward does not have."""
    known = [name for name in named if name not in RESERVED]
    if option in known:
        return
    guess = unknown("option", option, known) if known else f"unknown option {option!r}: it has none"
    raise KeelError(f"reward {reward!r}: {guess}")


def _is_async(function: Any) -> bool:
    if inspect.isclass(function) or inspect.isroutine(function):
        return inspect.iscoroutinefunction(function)
    # An object may have its coroutine in __call__.
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
