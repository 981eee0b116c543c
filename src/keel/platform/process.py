"""Child processes: started with a lifeline, asked by JSON lines, and ended.

No child outlives the process that started it, however that ends. Each is given a pipe of which the
parent holds the other end; when that closes, the kernel sends SIGKILL to the child's group. Neither
of the usual ways does that: `prctl(PR_SET_PDEATHSIG)` fires when the *thread* ends that started the
child, and rewards are called in short-lived threads; a thread of the child that waits for standard
input to close stands still while C code holds Python's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from keel.types import KeelError

NOTICE = 5.0
"""Seconds that a process has to end which watches its lifeline itself."""


class Lifeline:
    """The two ends: the group keeps `inner` open, the process that it must not outlive `outer`."""

    def __init__(self) -> None:
        self.inner, self.outer = os.pipe()
        _HELD.add(self)

    def tie(self, group: int, by: signal.Signals = signal.SIGKILL) -> None:
        """Let this process group get a signal when the outer end closes; from either side.

        The kernel keeps the group itself, not its number, which may be another's in time.
        """
        fcntl.fcntl(self.inner, fcntl.F_SETOWN, -group)
        if hasattr(fcntl, "F_SETSIG"):  # elsewhere than on Linux it is SIGIO, which ends too
            fcntl.fcntl(self.inner, fcntl.F_SETSIG, by)
        flags = fcntl.fcntl(self.inner, fcntl.F_GETFL)
        fcntl.fcntl(self.inner, fcntl.F_SETFL, flags | os.O_ASYNC)

    def is_cut(self) -> bool:
        """Whether the outer end is closed everywhere."""
        return bool(select.select([self.inner], [], [], 0)[0])

    def give(self) -> None:
        """Close the inner end here: the group has its own."""
        self.inner = _closed(self.inner)

    def cut(self) -> None:
        """Close the outer end here."""
        self.outer = _closed(self.outer)


_HELD: weakref.WeakSet[Lifeline] = weakref.WeakSet()
"""Those of this process. What it forks, such as a reward of the user's, must not hold them open."""


def _let_go() -> None:
    for lifeline in list(_HELD):
        lifeline.cut()


os.register_at_fork(after_in_child=_let_go)


def _closed(end: int) -> int:
    if end >= 0:
        os.close(end)
    return -1


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module; no file of the working folder replaces a module."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(**variables: str) -> dict[str, str]:
    """The environment of now, in which this package can be imported, with further variables."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


class Child:
    """A process in a session of its own, with all that it starts; ends with this process.

    Ctrl-C does not reach it. `ends` are file descriptors that it is given, and that are closed
    here; `held` is closed once it has ended. `end` kills it, by `kill`; so does the collection of
    this object. The group ends with this process as long as it has the lifeline's inner end open.
    A process that is `watching` waits for the end of the given `lifeline` itself; it is killed only
    if it does not end by that. `by` is the signal that the group gets if this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] | None = None,
        ends: Sequence[int] = (),
        held: contextlib.ExitStack | None = None,
        kill: Callable[[subprocess.Popen[bytes]], None] | None = None,
        lifeline: Lifeline | None = None,
        watching: bool = False,
        by: signal.Signals = signal.SIGKILL,
    ) -> None:
        lifeline = lifeline or Lifeline()
        try:
            self.process = subprocess.Popen(
                command,
                env=None if environment is None else dict(environment),
                cwd=folder,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(lifeline.inner, *ends),
                start_new_session=True,
                bufsize=0,
            )
            if not watching:
                # Before it is asked anything: until then it ends with its standard input.
                lifeline.tie(self.process.pid, by)
        except BaseException:
            lifeline.cut()
            raise
        finally:
            lifeline.give()
            close_all(ends)
        self.end = weakref.finalize(
            self, _end, os.getpid(), self.process, lifeline, held, kill, watching
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> bool:
        """Whether it has ended. It is not reaped, so that `end` still finds its group."""
        return not self.end.alive or has_ended(self.process)


def output_of(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    given: bytes | None = None,
) -> bytes:
    """What a command prints that is `given` this. Raises OSError if it does not start, fails or
    takes longer."""
    child = Child(
        command,
        environment=environment,
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        printed, _ = child.process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
    finally:
        child.end()
    if child.process.returncode != 0:
        raise OSError(f"{command[0]} ended with exit status {child.process.returncode}")
    return printed


def close_all(ends: Sequence[int]) -> None:
    """Close file descriptors."""
    for end in ends:
        os.close(end)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def exit_status(process: subprocess.Popen[Any]) -> int | None:
    """That of a process that has ended (negative: the signal that killed it), else None; it is left
    unreaped, so that its group keeps its id."""
    if process.returncode is not None:
        return int(process.returncode)
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def has_ended(process: subprocess.Popen[Any]) -> bool:
    """Whether a process has ended; see `exit_status`."""
    return exit_status(process) is not None


def _end(
    owner: int,
    process: subprocess.Popen[bytes],
    lifeline: Lifeline,
    held: contextlib.ExitStack | None,
    kill: Callable[[subprocess.Popen[bytes]], None] | None,
    watching: bool,
) -> None:
    if os.getpid() != owner:
        return  # a fork of this process owns nothing
    try:
        if watching:
            lifeline.cut()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(NOTICE)
        if process.returncode is None:
            (kill or kill_group)(process)
        process.wait()
    finally:
        lifeline.cut()  # and with it what the process left behind in its group
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None and not isinstance(pipe, int):
                pipe.close()
        if held is not None:
            held.close()


class JsonChild(Child):
    """A child that answers each JSON line on its standard input with one on its standard output.

    From one thread at a time. See `serve` for its own side.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        held = options.pop("held", None) or contextlib.ExitStack()
        self._errors = held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        pipe = subprocess.PIPE
        super().__init__(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, held=held, **options
        )
        self._replies: queue.Queue[bytes] = queue.Queue()
        # Not the pipe itself, which `end` closes while the thread may be reading it.
        replies = os.fdopen(os.dup(_number(self.process.stdout)), "rb")
        threading.Thread(
            target=_read, args=(replies, self._replies), name="keel-replies", daemon=True
        ).start()

    def ask(self, seconds: float, request: Any) -> Any:
        """The reply to a request.

        Raises TimeoutError if none comes in time, and ends the process; ChildProcessError, with the
        last line of its errors, if it ended by itself or was ended from outside.
        """
        try:
            self._send(request)
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            self.end()
            raise TimeoutError from None
        except BaseException:
            self.end()  # interrupted in between: the reply would answer the next request
            raise
        if not line:
            message = self._last_line()
            self.end()
            raise ChildProcessError(message)
        return json.loads(line)

    def first(self, seconds: float, request: Any) -> Any:
        """The reply to the first request. Raises KeelError if the process does not start."""
        try:
            return self.ask(seconds, request)
        except TimeoutError:
            cause = f"no answer within {seconds:g} s"
        except ChildProcessError as error:
            cause = str(error) or f"exit status {self.process.returncode}"
        raise self._not_started(cause)

    def _not_started(self, cause: str) -> KeelError:
        return KeelError(f"a child process does not start ({cause})")

    def _send(self, request: Any) -> None:
        rest = memoryview(json.dumps(request).encode() + b"\n")
        # It has ended, which the reply says; or another thread has ended it (ValueError).
        with contextlib.suppress(BrokenPipeError, ValueError):
            while rest:
                rest = rest[os.write(_number(self.process.stdin), rest) :]

    def _last_line(self) -> str:
        with contextlib.suppress(ValueError):  # ended by another thread
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            return next((line.strip()[-200:] for line in reversed(lines) if line.strip()), "")
        return ""


def _number(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    return pipe.fileno()


def _read(replies: IO[bytes], lines: queue.Queue[bytes]) -> None:
    with replies:
        for line in replies:
            lines.put(line)
    lines.put(b"")  # the process has ended


class Restarting:
    """A `JsonChild` that starts when first asked, and again after it has ended.

    Safe to use from any thread: calls wait for each other.
    """

    def __init__(self, start: Callable[[], JsonChild]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._closed = False
        self._abandoned = 0
        self.child: JsonChild | None = None

    def ask(self, seconds: float, request: Any) -> Any:
        """The reply to a request.

        Raises TimeoutError if none comes in time, and KeelError if the process ends twice at the
        request (killed from outside, or for want of memory), or is closed or abandoned.
        """
        abandoned = self._abandoned
        message = ""
        with self._lock:
            for _ in range(2):
                if self.child is not None and self.child.ended():
                    self.child.end()
                    self.child = None
                self._refuse_after(abandoned)
                if self.child is None:
                    self.child = self._start()
                    self._refuse_after(abandoned)
                try:
                    return self.child.ask(seconds, request)
                except ChildProcessError as error:
                    message = str(error)
        raise KeelError(
            f"a child process was killed twice ({message or 'no output'}): is the machine out of "
            "memory?"
        )

    def abandon(self) -> None:
        """End the process, and requests that other threads have made with a KeelError."""
        self._abandoned += 1
        if self.child is not None:
            self.child.end()

    def close(self) -> None:
        """End the process. A call that another thread has made ends with a KeelError."""
        self._closed = True
        self.abandon()

    def _refuse_after(self, abandoned: int) -> None:
        if self._closed or abandoned != self._abandoned:
            if self.child is not None:
                self.child.end()
            why = "the child process is closed" if self._closed else "the request was abandoned"
            raise KeelError(why)


def serve(answer: Callable[[Any], Any], memory_mb: int = 0) -> None:
    """A child's own side: answer JSON lines from standard input until it closes.

    A reply is {"ok": value} or {"error": message}. Whatever `answer` prints goes to standard error.
    `memory_mb` limits the address space, unless it is 0.
    """
    if memory_mb:
        limit = memory_mb * 1_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        try:
            reply = {"ok": answer(json.loads(line))}
        except KeelError as error:
            reply = {"error": str(error)}
        except Exception as error:
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
