"""Advantages and surrogates that are a user's own functions (`module:function`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch import Tensor

from keel.algorithms.spec import Algorithm, CustomAdvantage, CustomSurrogate
from keel.config.entry import load_entry
from keel.learn.token_budget import out_of_memory
from keel.types import KeelError

ADVANTAGE, SURROGATE = "algorithm.advantage", "algorithm.surrogate"


def reads_steps(algorithm: Algorithm) -> bool:
    """Whether an algorithm's advantage uses where rewards of steps are given.

    A function of the user's does where it names `reward_N` or the steps.
    """
    if not isinstance(algorithm.advantage, CustomAdvantage):
        return algorithm.reads_steps
    names = inspect.signature(load_entry(algorithm.advantage.function, ADVANTAGE)).parameters
    return "reward_N" in names or "step_reward_K" in names


def check_entries(algorithm: Algorithm) -> None:
    """Load the user's own functions. Raises KeelError for one that cannot be loaded."""
    if isinstance(algorithm.advantage, CustomAdvantage):
        load_entry(algorithm.advantage.function, ADVANTAGE)
    if isinstance(algorithm.surrogate, CustomSurrogate):
        load_entry(algorithm.surrogate.function, SURROGATE)


def call_custom(
    what: str, choice: CustomAdvantage | CustomSurrogate, signals: Mapping[str, Tensor]
) -> Tensor:
    """Call a user's function with its options and the signals that its parameters name.

    Raises KeelError for a parameter that is neither, and for whatever the function raises but a
    lack of memory, for which a smaller micro-batch may help.
    """
    function: Callable[..., Tensor] = load_entry(choice.function, what)
    available = {**choice.options, **signals}
    try:
        parameters = inspect.signature(function).parameters
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in available]
        if missing:
            raise KeelError(
                f"{function.__module__}:{function.__name__} asks for {', '.join(missing)}: "
                f"there are {', '.join(sorted(available))}"
            )
        return function(**{name: available[name] for name in parameters if name in available})
    except KeelError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"{what}: {choice.function} raised {message}") from error
