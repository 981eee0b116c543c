"""Reward functions by name, and what each asks for."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from keel.config.entry import load_entry
from keel.config.sources import RewardSource
from keel.config.suggest import unknown
from keel.rewards.context import RewardContext
from keel.rewards.rules import BUILT_IN as RULES
from keel.rewards.texture import repetition
from keel.types import KeelError

TASK = "task"
"""The built-in reward that is the task's own verdict."""
BUILT_IN = {**RULES, "repetition": repetition}
"""Built-ins that are plain functions."""
CORRECTNESS = ("exact_match", "numeric_match", "place_match", "math", "code")
"""Built-ins whose 1 means that the answer is right."""
MADE: Mapping[str, str] = {
    "math": "keel.rewards.math:math",
    "code": "keel.rewards.code:code",
    "language": "keel.rewards.language:language",
    "judge": "keel.rewards.judge.reward:judge",
    "outcome": "keel.rewards.learned:outcome",
    "process": "keel.rewards.learned:process",
    "step_match": "keel.rewards.steps:step_match",
}
"""Built-ins that hold something (a model, processes, a connection), by what makes them.

A maker takes the run's `RewardContext`, and the recipe's options as keyword-only arguments; it
returns a function with TRL's signature, which may have a `close`.
"""
RESERVED = (
    "prompts",
    "completions",
    "completion_ids",
    "turns",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""The arguments that are not data columns."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function, its weight, and the keyword arguments that the recipe binds.

    `function` None is the task's own verdict. `required` and `optional` are the arguments that it
    names and that are not bound; `everything` says that it takes all there are. `clip`,
    `normalise`, `gate_below` and `gated_reward` are the recipe's (`RewardSource`). `correctness`
    says whether its value means right or wrong; None: the recipe does not say, and the function is
    no such rule.
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
        """Whether the function is handed an argument of this name."""
        if name in self.options:
            return False
        if name == "turns":  # others' words too: only where they are asked for by name
            return name in (*self.required, *self.optional)
        return self.everything or name in self.required or name in self.optional


def catalogue() -> list[tuple[str, str]]:
    """Every built-in reward by name, with one line on it. Imports none that is made."""
    found = [(TASK, "The task's own verdict: the reward where a recipe names no other.")]
    for name, function in BUILT_IN.items():
        found.append((name, _first_paragraph(inspect.getdoc(function))))
    for name, entry in MADE.items():
        spec = importlib.util.find_spec(entry.partition(":")[0])
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        found.append((name, _first_paragraph(ast.get_docstring(ast.parse(source)))))
    return found


def _first_paragraph(doc: str | None) -> str:
    return " ".join((doc or "").partition("\n\n")[0].split())


def check_column(option: str, column: str) -> None:
    """Raise KeelError for a column that a reward's option names and that no argument can be."""
    if column in RESERVED:
        raise KeelError(f"{option} = {column!r} comes from the run: name a column of the data")
    if not column.isidentifier() or keyword.iskeyword(column):
        raise KeelError(
            f"{option} = {column!r} cannot be an argument's name: rename the column in the data, "
            "to letters, digits and _"
        )


def load_reward(source: RewardSource, around: RewardContext | None = None) -> NamedReward:
    """The reward of a recipe: a built-in, `module:function`, or `path/to/file.py:function`.

    Raises KeelError where there is none of that name, or its options do not fit.
    """
    return replace(
        _load(source, around or RewardContext()),
        clip=source.clip,
        normalise=source.normalise,
        gate_below=source.gate_below,
        gated_reward=source.gated_reward,
        correctness=source.function in CORRECTNESS or None
        if source.correctness is None
        else source.correctness,
    )


def _load(source: RewardSource, around: RewardContext) -> NamedReward:
    if source.function == TASK:
        if source.options:
            raise KeelError(f"reward {TASK!r}: unknown option {next(iter(source.options))!r}")
        return NamedReward(source.name or TASK, None, source.weight)
    if ":" in source.function:
        function = load_entry(source.function, "reward")
    elif source.function in BUILT_IN:
        return _built_in(source)
    elif source.function in MADE:
        return _made(source, around)
    else:
        guess = unknown("reward", source.function, [*BUILT_IN, *MADE, TASK])
        raise KeelError(f"{guess}; functions of your own are module:function")
    if not callable(function):
        kind = type(function).__name__
        raise KeelError(f"reward {source.function!r} is a {kind}, not a function")
    return named_reward(function, source.name, source.weight, source.options)


def named_reward(
    function: Callable[..., Any],
    name: str | None = None,
    weight: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> NamedReward:
    """A function as a reward; its own name unless one is given. Raises KeelError for wrong options.

    An object with `__call__` will do.
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
        if option not in named and not everything:
            raise KeelError(f"reward {name!r}: {_unknown_option(option, named)}")
    free = [p for p in named.values() if p.name not in options]
    return NamedReward(
        name=name,
        function=function,
        weight=weight,
        options=options,
        required=tuple(p.name for p in free if p.default is p.empty),
        optional=tuple(p.name for p in free if p.default is not p.empty),
        everything=everything,
        is_async=_is_async(function),
    )


def _built_in(source: RewardSource) -> NamedReward:
    """A built-in rule, its options tried on no completions."""
    function: Callable[..., Any] = BUILT_IN[source.function]
    reward = named_reward(function, source.name, source.weight, source.options)
    where = f"reward {reward.name!r}"
    given = ("completions", "completion_ids", "answer")
    for option in reward.required:
        if option not in given:
            raise KeelError(f"{where}: the option {option!r} is not set: give it in `options`")
    try:
        function(**{name: [] for name in reward.required}, **source.options)
    except (KeelError, TypeError, ValueError) as error:
        raise KeelError(f"{where}: {' '.join(str(error).split())}") from None
    return reward


def _made(source: RewardSource, around: RewardContext) -> NamedReward:
    """A built-in that is made from its options; it keeps them to itself."""
    maker: Callable[..., Any] = load_entry(MADE[source.function], "reward")
    name = source.name or source.function
    parameters = inspect.signature(maker).parameters.values()
    named = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    for option in source.options:
        if option not in named:
            raise KeelError(f"reward {name!r}: {_unknown_option(option, named)}")
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in source.options:
            raise KeelError(f"reward {name!r}: the option {option!r} is not set: give it")
    try:
        made = maker(around, **source.options)
    except (KeelError, TypeError, ValueError) as error:
        raise KeelError(f"reward {name!r}: {' '.join(str(error).split())}") from error
    return named_reward(made, name, source.weight)


def _unknown_option(option: str, named: Mapping[str, Any]) -> str:
    known = [n for n in named if n not in RESERVED]
    return unknown("option", option, known) if known else f"unknown option {option!r}: it has none"


def _is_async(function: Any) -> bool:
    if inspect.isclass(function) or inspect.isroutine(function):
        return inspect.iscoroutinefunction(function)
    # An object may have its coroutine in __call__.
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
