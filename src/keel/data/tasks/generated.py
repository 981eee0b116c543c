"""Tasks whose prompts are drawn, not stored: endless, seeded, and addressed by index."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keel.config.entry import load_entry
from keel.config.fields import unknown
from keel.config.sources import PreferenceData, TaskSource
from keel.data.tables import list_rows
from keel.data.tasks.base import BaseTask, Presentation, prompt_id, split_of
from keel.graders.stated import answer_part
from keel.types import Completion, KeelError, Prompt, Split, one_line

ATTEMPTS = 5_000
"""Draws for one prompt until one falls on its split; nine in ten validation draws do not."""


class Generated(BaseTask):
    """A task that generates a question and its answer; the score is exact match, 1 or 0.

    The prompt at (seed, split, index) is the first of the draws seeded by
    `SeedSequence([seed, split, index, attempt])` whose text the hash puts on that split.
    """

    correctness = True

    def __init__(self, name: str, seed: int, presentation: Presentation | None = None) -> None:
        self.name = name
        self.seed = seed
        self.presentation = presentation or Presentation()

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A question and its answer."""
        raise NotImplementedError

    def columns(self, rng: np.random.Generator, split: Split, index: int) -> dict[str, Any]:
        """The columns of a prompt; `prompt` is the question."""
        question, answer = self.draw(rng)
        return {"prompt": question, "answer": answer}

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at an index. Raises KeelError if no draw falls on the split."""
        for attempt in range(ATTEMPTS):
            key = [self.seed, int(split == "validation"), index, attempt]
            rng = np.random.default_rng(np.random.SeedSequence(key))
            columns = self.columns(rng, split, index)
            if split_of(columns["prompt"]) == split:
                body = self.presentation.body(columns, self.name)
                content = self.presentation.frame(body, self.name)
                return Prompt(prompt_id(self.name, split, index), content, columns, self.name)
        raise KeelError(
            f"task {self.name!r}: none of {ATTEMPTS} draws is on the {split} split, since there "
            "are too few different prompts: widen its options"
        )

    def gold(self, prompt: Prompt) -> str | None:
        """The right answer."""
        return str(prompt.columns["answer"])

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """1 for the right answer and nothing but it, else 0."""
        stated = answer_part(completion.text, prompt.opening) or ""
        return float(stated.strip() == self.gold(prompt))


def take_options(
    function: Any, options: Mapping[str, Any], where: str, *, own: tuple[str, ...] = ()
) -> None:
    """Raise KeelError for an option that `function` has no parameter for; `own` are not options."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    names = [n for n in parameters if n not in own]
    for option in options:
        if option not in names:
            none = f"unknown option {option!r}: it has no options"
            raise KeelError(f"{where}: {unknown('option', option, names) if names else none}")


def call_entry(source: TaskSource | PreferenceData, what: str, seed: int) -> Any:
    """What a Python entry returns: a task, or rows as a list; `what` is "task" or the data's name.

    It is called with the options, and with `seed` if it has a parameter of that name. Raises
    KeelError.
    """
    where = f"{what} {source.name!r}"
    function: Callable[..., Any] = load_entry(source.name, what)
    if not callable(function):
        raise KeelError(f"{where}: it is a {type(function).__name__}, not a function")
    options = dict(source.options)
    take_options(function, options, where)
    if "seed" in inspect.signature(function).parameters:
        options.setdefault("seed", seed)
    try:
        made = function(**options)
        if what == "task" and is_task(made):
            return made
        if not isinstance(made, str | bytes | Mapping) and _is_iterable(made):
            return list_rows(made)
    except KeelError:
        raise
    except Exception as error:
        raise KeelError(f"{where} raises {one_line(error, named=True)}") from error
    wanted = "a task or rows of dicts" if what == "task" else "rows of dicts"
    raise KeelError(f"{where} returns a {type(made).__name__}: return {wanted}")


def _is_iterable(made: Any) -> bool:
    """Whether it can be iterated, also by `__getitem__` alone, as data sets of torch."""
    try:
        iter(made)
    except TypeError:
        return False
    return True


def is_task(made: Any) -> bool:
    """Whether an object is a task and not rows."""
    return all(callable(getattr(made, part, None)) for part in ("prompt", "size", "score"))


def check_range(where: str, **bounds: int) -> None:
    """The options are whole numbers from 1 on, in rising order. Raises KeelError."""
    last = 1
    for name, value in bounds.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < last:
            raise KeelError(f"{where}: {name} = {value!r}: give a whole number from {last} on")
        last = value


MAX_DIGITS = 18
"""Most digits of a number that fits into 64 bits."""


class Addition(Generated):
    """Add two numbers of at most `digits` digits: `27+5=` asks for `32`."""

    def __init__(
        self,
        name: str = "addition",
        seed: int = 0,
        presentation: Presentation | None = None,
        *,
        digits: int = 2,
    ) -> None:
        super().__init__(name, seed, presentation)
        check_range(f"task {name!r}", digits=digits)
        if digits > MAX_DIGITS:
            raise KeelError(f"task {name!r}: digits = {digits}: give at most {MAX_DIGITS}")
        self.digits = digits

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length for each number, then the number, so that short ones are not rare."""
        lengths = [int(rng.integers(1, self.digits + 1)) for _ in range(2)]
        a, b = (int(rng.integers(0, 10**n)) for n in lengths)
        return f"{a}+{b}=", str(a + b)


MISTAKE_SHARE = 0.6
"""How often the careless teacher makes its mistake."""


def gold(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer itself."""
    return gold


def careless(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer with, in six of ten, one and the same mistake: first and last exchanged.

    Imitation takes the mistake over as well; a verifier does not.
    """
    if rng.random() < MISTAKE_SHARE and len(gold) > 1:
        return gold[-1] + gold[1:-1] + gold[0]
    return gold
