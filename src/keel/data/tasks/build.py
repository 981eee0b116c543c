"""Tasks from a recipe's sources, a user's own among them, and the list of what there is."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from keel.config.fields import unknown
from keel.config.sources import TaskSource
from keel.data.splits import KINDS, call_entry, is_task, take_options
from keel.data.tables import rows_table
from keel.data.tasks.base import BaseTask, Presentation
from keel.data.tasks.generated import Addition, Generated, Reverse, SortDigits
from keel.data.tasks.gym import PREFIX, GymProcess, GymTask, gym_installed, gym_names
from keel.data.tasks.stored import DataTask, data_task
from keel.types import Completion, KeelError, Prompt, Split, Task, one_line

GENERATORS: dict[str, type[Generated]] = {
    "addition": Addition,
    "reverse": Reverse,
    "sort_digits": SortDigits,
}


def build_tasks(sources: Sequence[TaskSource], seed: int) -> tuple[Task, ...]:
    """The tasks of a mixture, each with its own name (`#2`, … for the second of a name).

    Raises KeelError for whatever is wrong with a source.
    """
    process = GymProcess()
    tasks: list[BaseTask] = []
    for source in sources:
        task = _build(source, seed, process)
        names = {t.name for t in tasks}
        if task.name in names:
            number = next(n for n in range(2, len(names) + 3) if f"{task.name}#{n}" not in names)
            task.name = f"{task.name}#{number}"
        tasks.append(task)
    return tuple(tasks)


def build_task(source: TaskSource, seed: int) -> Task:
    """One task. Raises KeelError for whatever is wrong with its source."""
    return build_tasks((source,), seed)[0]


def stored(task: Task) -> DataTask | None:
    """The task as one of stored rows; None if it is of another kind."""
    return task if isinstance(task, DataTask) else None


def catalogue() -> list[tuple[str, str]]:
    """Every task by name, with one line on it; reasoning-gym's if it is installed."""
    rows = [(name, _first_line(task)) for name, task in sorted(GENERATORS.items())]
    rows += list(KINDS.items())
    rows.append(("module:function", "a Python function that returns a task, or rows of dicts"))
    if gym_installed():
        try:
            rows += [(PREFIX + name, line) for name, line in gym_names(GymProcess()).items()]
        except KeelError as error:
            rows.append((f"{PREFIX}NAME", f"not available: {error}"))
    return rows


def _build(source: TaskSource, seed: int, process: GymProcess) -> BaseTask:
    if source.name.startswith(PREFIX):
        _no_files(source)
        presentation = Presentation(source.prompt, source.system)
        task = GymTask(source.name, seed, presentation, source.options, process)
        task.prompt("train", 0)  # wrong options show here, before anything is spent
        return task
    if source.name in GENERATORS:
        _no_files(source)
        return _generator(source, seed)
    if source.name in KINDS:
        return data_task(source)
    if ":" in source.name:
        _no_files(source)
        return entry_task(source, seed)
    raise KeelError(unknown("task", source.name, [*GENERATORS, *KINDS, PREFIX + "NAME"]))


def _generator(source: TaskSource, seed: int) -> BaseTask:
    kind = GENERATORS[source.name]
    where = f"task {source.name!r}"
    take_options(kind.configure, source.options, where, own=("self",))
    presentation = Presentation(source.prompt, source.system)
    task = kind(source.name, seed, presentation, **source.options)
    for split in ("train", "validation"):
        task.prompt(split, 0)  # too few different prompts show here
    return task


def _no_files(source: TaskSource) -> None:
    for key in ("path", "validation_path"):
        if getattr(source, key) is not None:
            raise KeelError(f"task {source.name!r} reads no file: drop task.{key}")
    if source.answer is not None and (source.name in GENERATORS or PREFIX in source.name):
        raise KeelError(f"task {source.name!r} knows its answers: drop task.answer")


def _first_line(task: type[Generated]) -> str:
    return (task.__doc__ or "").strip().partition("\n")[0]  # none under python -OO


def entry_task(source: TaskSource, seed: int) -> UserTask | DataTask:
    """The task of a Python entry: what the function returns, a Task or rows.

    It is called with the options, and with the recipe's seed if it has a parameter `seed`.
    """
    made = call_entry(source, "task", seed)
    name = source.name.rpartition("/")[2]  # ids of prompts do not depend on the file's folder
    if is_task(made):
        return UserTask(name, made)
    return DataTask(name, source, rows_table(made, source.name))


class UserTask(BaseTask):
    """Hands every question on to the user's object; the defaults hold for what it lacks.

    If it is given another `name`, the ids of its prompts get it too.
    """

    def __init__(self, name: str, inner: Any) -> None:
        self.entry = name
        self.inner = inner
        self.name = self.own_name = str(getattr(inner, "name", name))
        self.correctness = bool(getattr(inner, "correctness", False))

    def size(self, split: Split) -> int | None:
        return cast("int | None", self._ask("size", split))

    def prompt(self, split: Split, index: int) -> Prompt:
        made = self._ask("prompt", split, index)
        if not isinstance(made, Prompt):
            raise KeelError(
                f"task {self.entry!r}: prompt({split!r}, {index}) returned a "
                f"{type(made).__name__}: return a keel.types.Prompt(id, content, columns, task)"
            )
        if self.name == self.own_name:
            return made
        rest = made.id.removeprefix(self.own_name)
        return replace(made, id=self.name + rest, task=self.name)

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        return cast("float | None", self._ask("score", prompt, completion))

    def gold(self, prompt: Prompt) -> str | None:
        return cast("str | None", self._ask("gold", prompt))

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return cast("str | None", self._ask("reply", prompt, text))

    def _ask(self, what: str, *arguments: Any) -> Any:
        method = getattr(self.inner, what, None)
        if method is None:
            return None
        try:
            return method(*arguments)
        except KeelError:
            raise
        except Exception as error:
            message = one_line(error, named=True)
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise KeelError(
                f"task {self.entry!r}: {what} raised {message} ({at.filename}:{at.lineno})"
            ) from error
