"""Runs in processes of their own that are killed, resumed, and compared with an uninterrupted one.

The processes are forked from a server that has imported all they need, so that a kill costs a
fraction of a second. A process is killed by SIGKILL after a record, before an operation on the run
folder or a module's call, or after so many seconds; or in the middle of a write, by the kernel's
limit on file sizes.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from keel.config.load import to_toml
from keel.config.schema import Recipe
from keel.runs.callbacks import Callback, RunState

Kind = Literal["row", "operation", "module", "second", "byte"]

FREE = frozenset({"timings.jsonl", "events.jsonl", "trackers", ".lock"})
"""What a run folder holds that is no function of recipe and seed."""
PATIENCE = 300.0
"""Seconds after which a process counts as hanging."""
KILLS = (signal.SIGKILL, signal.SIGXFSZ)


@dataclass(frozen=True)
class Instant:
    """When a process dies: after its n-th row, before its n-th operation on the run folder or its
    n-th call of a model's module, after so many seconds, or where a file would grow past so many
    bytes."""

    kind: Kind
    at: float

    def __str__(self) -> str:
        return f"{self.kind} {self.at:.3f}" if self.kind == "second" else f"{self.kind} {self.at:g}"


@dataclass(frozen=True)
class Ended:
    """How a process ended, after so many seconds; `wrong` is why it failed.

    `rows` and `done`, the operations, are of one that finished.
    """

    killed: bool
    seconds: float
    rows: int = 0
    done: Sequence[str] = ()
    wrong: str = ""

    @property
    def operations(self) -> int:
        return len(self.done)


@dataclass
class Outcome:
    """What came of a run that was killed, perhaps more than once."""

    plan: Sequence[Instant]
    kills: list[Instant] = field(default_factory=list)
    resumes: int = 0
    differences: list[str] = field(default_factory=list)


def server() -> Any:
    """The fork server of the processes."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.warm"])
    return context


def whole(recipe: Recipe, folder: Path) -> Ended:
    """The run that is never killed. Raises RuntimeError where it does not end well."""
    ended = attempt(recipe, folder, None)
    if ended.killed or ended.wrong:
        raise RuntimeError(f"{folder}: {ended.wrong or 'killed'}")
    return ended


def killed(recipe: Recipe, folder: Path, sound: Path, plan: Sequence[Instant]) -> Outcome:
    """A run that dies at each instant of the plan in turn, is resumed each time, and compared."""
    outcome = Outcome(plan)
    for instant in (*plan, None):
        outcome.resumes += (folder / "recipe.toml").exists()
        ended = attempt(recipe, folder, instant)
        if ended.wrong:
            outcome.differences.append(ended.wrong)
            return outcome
        if not ended.killed:
            break
        assert instant is not None
        outcome.kills.append(instant)
    outcome.differences += differences(sound, folder)
    return outcome


def attempt(recipe: Recipe, folder: Path, instant: Instant | None) -> Ended:
    """One process: it starts the run, or goes on with it where the folder holds a recipe.

    A run that died before its recipe was written is started again, as a user would.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = server().Process(target=_run, args=(to_toml(recipe), str(folder), instant, theirs))
    process.start()
    theirs.close()
    printed: dict[str, Any] = _next(ours)
    start = time.perf_counter()
    if instant is not None and instant.kind == "second":
        process.join(instant.at)
        process.kill()
    printed |= _next(ours)
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        return Ended(False, PATIENCE, wrong=f"hung at {instant}")
    seconds, code = time.perf_counter() - start, process.exitcode
    if code in [-signum for signum in KILLS]:
        return Ended(True, seconds)
    wrong = "" if code == 0 else str(printed.get("wrong") or f"exit code {code}")
    return Ended(False, seconds, printed.get("rows", 0), printed.get("done", ()), wrong)


def differences(a: Path, b: Path) -> list[str]:
    """Files and folders that only one run has, and files whose bytes differ."""
    left, right = _files(a), _files(b)
    found = [f"only in {a.name}: {name}" for name in sorted(left.keys() - right.keys())]
    found += [f"only in {b.name}: {name}" for name in sorted(right.keys() - left.keys())]
    both = sorted(left.keys() & right.keys())
    return found + [f"differs: {name}" for name in both if left[name] != right[name]]


def _files(folder: Path) -> dict[str, bytes | None]:
    """The content of every file by its name, None for a folder."""
    return {
        str(path.relative_to(folder)): _content(path) if path.is_file() else None
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] not in FREE
    }


def _content(path: Path) -> bytes:
    """What a file holds; of a database its rows, since its pages depend on who wrote them when."""
    if path.suffix != ".db":
        return path.read_bytes()
    with closing(sqlite3.connect(path)) as database:
        return "\n".join(database.iterdump()).encode()


def _next(connection: Connection) -> dict[str, Any]:
    """The next message of the process; empty where it died."""
    try:
        return dict(connection.recv()) if connection.poll(PATIENCE) else {}
    except EOFError:
        return {}


# ---------------------------------------------------------------- in the process


class Countdown:
    """Counts its calls; at the one that an instant of this kind names, the process dies."""

    def __init__(self, instant: Instant | None, kind: Kind) -> None:
        self.fatal = instant.at if instant is not None and instant.kind == kind else -1
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


class Rows(Callback):
    """Counts rows."""

    def __init__(self, count: Countdown) -> None:
        self.count = count

    def on_record(self, state: RunState) -> None:
        self.count()


class Operations:
    """Counts what is done to the run folder, before it is done.

    Operations are files opened for writing, synced, renamed or removed, folders made or removed,
    tensors written. What trackers do, in a thread of theirs, is none.
    """

    def __init__(self, folder: Path, count: Countdown) -> None:
        self.folder, self.free = f"{folder}{os.sep}", f"{folder / 'trackers'}"
        self.count = count
        self.done: list[str] = []

    def watch(self) -> None:
        """Install the audit hook, for the life of the process."""
        import safetensors.torch

        sys.addaudithook(self._hear)
        os.fsync = self._before(os.fsync)
        # Written in Rust, so that no audit event reports it.
        save = safetensors.torch.serialize_file
        safetensors.torch.serialize_file = self._before(save)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) and self._ours(path):
                self._count("write", path)
        elif event in ("os.rename", "os.mkdir", "os.truncate"):
            if self._ours(arguments[0]):
                self._count(event, arguments[0])
        # Where a tree is removed, its names are reported without their folder.
        elif event in ("os.remove", "os.rmdir") and (
            self._ours(arguments[0]) or arguments[-1] not in (-1, None)
        ):
            self._count(event, arguments[0])

    def _ours(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.fsdecode(path)
        return name.startswith(self.folder) and not name.startswith(self.free)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._count(function.__name__, "")
            return function(*arguments, **named)

        return counted

    def _count(self, what: str, path: Any) -> None:
        self.done.append(f"{what} {os.path.basename(os.fsdecode(path))}")
        self.count()


def _run(recipe: str, folder: str, instant: Instant | None, out: Connection) -> None:
    """The whole life of a process."""
    import tomllib

    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    from keel.config.load import load_recipe
    from keel.preferences.labeller import PeopleLabeller
    from keel.training.run import train

    torch.set_num_threads(1)
    place = Path(folder)
    rows = Countdown(instant, "row")
    operations = Operations(place, Countdown(instant, "operation"))
    resume = (place / "recipe.toml").exists()
    parsed = None if resume else load_recipe(tomllib.loads(recipe))
    out.send({})
    operations.watch()
    if instant is not None and instant.kind == "module":
        # In scoring, updates and evaluation.
        register_module_forward_pre_hook(Countdown(instant, "module"))
    if instant is not None and instant.kind == "byte":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(instant.at), int(instant.at)))
    try:
        train(parsed, place, resume=resume, callbacks=[Rows(rows)], labeller=PeopleLabeller())
    except BaseException as error:
        message = traceback.format_exception(error)
        out.send({"wrong": f"{type(error).__name__}: {error}\n{''.join(message)}"})
        os._exit(1)
    out.send({"rows": rows.calls, "done": operations.done})
    os._exit(0)
