"""A recipe's tasks, the stream of prompts that a stage trains on, and those it is judged on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from keel.config.benchmarks import benchmarks
from keel.config.fields import unknown
from keel.config.sources import TaskSource
from keel.data.benchmarks import benchmark_task
from keel.data.gym import PREFIX, GymProcess, GymTask, gym_installed, gym_names
from keel.data.splits import KINDS, call_entry, is_task, take_options
from keel.data.tables import rows_table
from keel.data.tasks import GENERATORS, BaseTask, DataTask, Generated, Presentation, data_task
from keel.types import Completion, KeelError, Prompt, Split, Task, one_line


def build_tasks(
    sources: Sequence[TaskSource], seed: int, *, chat: bool = True, whole: bool = False
) -> tuple[Task, ...]:
    """The tasks of a mixture, each with its own name (`#2`, … for the second of a name).

    `chat`: the tokenizer has a chat template, so that benchmarks are asked in turns. `whole`: all
    stored rows are validation prompts, or those of `validation_path`: nothing is trained.
    Raises KeelError for whatever is wrong with a source.
    """
    process = GymProcess()
    tasks: list[BaseTask] = []
    for source in sources:
        if source.name in benchmarks():
            task: BaseTask = benchmark_task(source, chat=chat, whole=whole)
        else:
            task = _build(source, seed, process)
            data = stored(task)
            if whole and data is not None and source.validation_path is None:
                data.validate_on_all()
        names = {t.name for t in tasks}
        if task.name in names:
            number = next(n for n in range(2, len(names) + 3) if f"{task.name}#{n}" not in names)
            task.name = f"{task.name}#{number}"
        tasks.append(task)
    return tuple(tasks)


def build_task(source: TaskSource, seed: int, *, whole: bool = False) -> Task:
    """One task. Raises KeelError for whatever is wrong with its source."""
    return build_tasks((source,), seed, whole=whole)[0]


def stored(task: Task) -> DataTask | None:
    """The task as one of stored rows; None if it is of another kind."""
    return task if isinstance(task, DataTask) else None


def catalogue() -> list[tuple[str, str]]:
    """Every task by name, with one line on it; reasoning-gym's if it is installed."""
    rows = [(name, _first_line(task)) for name, task in sorted(GENERATORS.items())]
    rows += [(name, entry.title) for name, entry in benchmarks().items()]
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
    raise KeelError(
        unknown("task", source.name, [*GENERATORS, *benchmarks(), *KINDS, PREFIX + "NAME"])
    )


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

    @property
    def replies(self) -> bool:
        if isinstance(self.inner, BaseTask):
            return self.inner.replies
        return getattr(self.inner, "reply", None) is not None

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


P = TypeVar("P")
Item = TypeVar("Item", covariant=True)
Prepare = Callable[[P], P | None]
"""Makes a prompt ready (encodes it); None leaves it out."""


class Numbered(Protocol[Item]):
    """Numbered prompts, or other examples: a `Task`, or what has these of one.

    One that reads on and cannot be entered anywhere has `place()` and `seek(place)` too.
    """

    @property
    def name(self) -> str: ...
    def size(self, split: Split) -> int | None: ...
    def prompt(self, split: Split, index: int) -> Item | None: ...


LEFT_OUT_IN_A_ROW = 1_000
"""After this number of prompts left out one after the other, an endless task is given up."""
REPEATS_IN_A_ROW = 1_000
"""After this number of known prompts in a row, an endless task has no other validation ones."""


class ItemStream(Generic[P]):
    """Train examples of a weighted mixture, one after the other, without end.

    Which task the n-th draw takes is drawn by weight from `SeedSequence([seed, 0, n])`. A task
    with a size is gone through in epochs, each a permutation seeded by
    `SeedSequence([seed, 1, task, epoch])`, so that each prompt comes once an epoch; an endless one
    by rising index, as every one is without `shuffle`. So the stream is a function of the seed and
    of `state()`.
    """

    def __init__(
        self,
        tasks: Sequence[Numbered[P]],
        weights: Sequence[float],
        seed: int,
        prepare: Prepare[P] | None = None,
        *,
        shuffle: bool = True,
    ) -> None:
        self.tasks = _check(tasks, weights)
        self.shares = np.asarray(weights, dtype=np.float64) / float(sum(weights))
        self.seed = seed
        self.prepare = prepare
        self.shuffle = shuffle
        self._draws = 0
        self._taken = {task.name: 0 for task in tasks}
        self._left_out = {task.name: 0 for task in tasks}
        self._order: dict[int, tuple[int, Any]] = {}

    def take(self, k: int) -> list[P]:
        """The next `k` prompts that were not left out.

        Raises KeelError if every prompt of a task is left out.
        """
        return [self._next() for _ in range(k)]

    @property
    def left_out(self) -> Mapping[str, int]:
        """How many prompts of each task were left out so far."""
        return dict(self._left_out)

    def state(self) -> dict[str, Any]:
        """All that decides what comes next, as JSON can hold it."""
        places = {t.name: t.place() for t in self.tasks if hasattr(t, "place")}
        return {
            "draws": self._draws,
            "taken": dict(self._taken),
            "left_out": dict(self._left_out),
            **({"places": places} if places else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`. Raises KeelError if it is of another mixture."""
        names = [task.name for task in self.tasks]
        if set(state.get("taken", {})) != set(names):
            raise KeelError(
                f"the checkpoint's prompt stream is of the tasks {sorted(state.get('taken', {}))}, "
                f"the recipe's of {sorted(names)}: resume with the recipe of the run"
            )
        self._draws = int(state["draws"])
        self._taken = {name: int(state["taken"][name]) for name in names}
        self._left_out = {name: int(state["left_out"][name]) for name in names}
        for task in self.tasks:
            if task.name in state.get("places", {}):
                task.seek(state["places"][task.name])  # type: ignore[attr-defined]

    def _next(self) -> P:
        at = self._choose()
        self._draws += 1
        task = self.tasks[at]
        size = task.size("train")
        if size == 0:
            raise KeelError(f"task {task.name!r} has no train prompt: give it rows")
        for _ in range(LEFT_OUT_IN_A_ROW if size is None else 2 * size):
            prompt = task.prompt("train", self._index(at, size))
            self._taken[task.name] += 1
            if self.prepare is not None and prompt is not None:
                prompt = self.prepare(prompt)
            if prompt is not None:
                return prompt
            self._left_out[task.name] += 1
        raise _all_left_out(task.name, "train")

    def _choose(self) -> int:
        if len(self.tasks) == 1:
            return 0
        key = np.random.SeedSequence([self.seed, 0, self._draws])
        uniform = np.random.default_rng(key).random()
        return min(
            int(np.searchsorted(self.shares.cumsum(), uniform, "right")), len(self.tasks) - 1
        )

    def _index(self, at: int, size: int | None) -> int:
        taken = self._taken[self.tasks[at].name]
        if size is None:
            return taken
        epoch, place = divmod(taken, size)
        if not self.shuffle:
            return place
        if self._order.get(at, (-1, None))[0] != epoch:
            key = np.random.SeedSequence([self.seed, 1, at, epoch])
            self._order[at] = (epoch, np.random.default_rng(key).permutation(size))
        return int(self._order[at][1][place])


class PromptStream(ItemStream[Prompt]):
    """Train prompts of a weighted mixture of tasks; see `ItemStream`."""


def validation_prompts(
    tasks: Sequence[Task],
    weights: Sequence[float],
    n: int,
    prepare: Prepare[Prompt] | None = None,
) -> list[Prompt]:
    """The first `n` validation prompts, each task in proportion to its weight; of a task without
    end, the first different ones.

    Fewer if the validation splits have no more. Nothing is random. Raises KeelError if there is
    none at all.
    """
    _check(tasks, weights)
    found: list[Prompt] = []
    counts = [0] * len(tasks)
    walks = [_walk(task, prepare) for task in tasks]
    live = set(range(len(tasks)))
    while live and len(found) < n:
        # The task that lags furthest behind its weight; the earlier one of two equal ones.
        at = min(live, key=lambda i: ((counts[i] + 1) / weights[i], i))
        prompt = next(walks[at], None)
        if prompt is None:
            live.remove(at)
            continue
        counts[at] += 1
        found.append(prompt)
    if not found and n > 0:
        raise KeelError(
            "there is no validation prompt: give validation_path or more rows, or set "
            "evaluation.prompts = 0"
        )
    return found


def _walk(task: Task, prepare: Prepare[Prompt] | None) -> Any:
    """Validation prompts of a task in order of their index.

    All rows of a stored task, whose number is a published one; of a task without end those that
    differ from earlier ones.
    """
    size = task.size("validation")
    seen: set[str] = set()
    index = idle = left_out = found = 0
    while idle < REPEATS_IN_A_ROW if size is None else index < size:
        prompt: Prompt | None = task.prompt("validation", index)
        index += 1
        idle += 1
        assert prompt is not None
        key = repr((prompt.content, prompt.tools))
        if size is None and key in seen:
            continue
        seen.add(key)
        if prepare is not None:
            prompt = prepare(prompt)
        if prompt is None:
            left_out += 1
            continue
        idle = 0
        found += 1
        yield prompt
    if left_out and not found:
        raise _all_left_out(task.name, "validation")


def _check(tasks: Sequence[Numbered[P]], weights: Sequence[float]) -> tuple[Numbered[P], ...]:
    if len(tasks) != len(weights) or not tasks:
        raise ValueError(f"{len(tasks)} tasks and {len(weights)} weights: give one weight a task")
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"two tasks share a name: {sorted(names)}")
    return tuple(tasks)


def _all_left_out(name: str, split: str) -> KeelError:
    return KeelError(
        f"task {name!r}: every {split} prompt is left out because it is too long: raise "
        "prompts.max_tokens, or use a model with a longer context"
    )
