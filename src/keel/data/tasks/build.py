"""Tasks from a recipe's sources, and the list of what there is."""

from __future__ import annotations

from collections.abc import Sequence

from keel.config.fields import unknown
from keel.config.sources import TaskSource
from keel.data.tasks.base import BaseTask, Presentation
from keel.data.tasks.generated import Addition, Generated, take_options
from keel.data.tasks.gym import PREFIX, GymProcess, GymTask, gym_installed, gym_names
from keel.data.tasks.splits import KINDS
from keel.data.tasks.stored import DataTask, data_task, entry_task
from keel.data.tasks.symbols import Reverse, SortDigits
from keel.types import KeelError, Task

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
    take_options(kind, source.options, where, own=("name", "seed", "presentation"))
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
