"""The lock of a run folder: one process writes it at a time."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keel.runs import files
from keel.runs.layout import LOCK, RunFolder
from keel.types import KeelError

TRIES, BETWEEN = 5, 0.02
"""Attempts to take the lock, and seconds between them: `refuse_if_taken` of another process may
hold it briefly."""
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK
"""The lock's content is overwritten: a link in its place must not lead to another file, nor a FIFO
make whoever opens it wait."""
_OPEN: set[int] = set()
"""The descriptors that hold a lock of this process."""


class _Taken(Exception):
    """The lock is held."""


def _take(descriptor: int) -> None:
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if left == 0:
                raise _Taken from error
            time.sleep(BETWEEN)


def _release_in_child() -> None:
    """A forked child that outlives its parent must not hold the parent's run folder."""
    for descriptor in _OPEN:
        os.close(descriptor)
    _OPEN.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Holds the run folder for writing; the kernel releases it when the process ends.

    An advisory flock(2), of this process alone: neither a forked child nor a program that it
    starts has it. Writes below the folder are refused once the folder is not this one any more.

    Raises:
        KeelError: another process, or another caller in this one, holds it.
    """
    with files.os_errors(folder.lock):
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | _PLAIN, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise KeelError(f"{folder.lock} is no file: delete it")
    owner = os.getpid()
    _OPEN.add(descriptor)
    try:
        try:
            with files.os_errors(folder.lock, "lock"):
                _take(descriptor)
        except _Taken:
            raise _in_use(folder.path, descriptor) from None
        with files.os_errors(folder.lock):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        try:
            with files.held(folder.path, folder.lock, descriptor):
                yield
        finally:
            if os.getpid() == owner:
                with suppress(OSError):  # the disk has already reported an error
                    os.ftruncate(descriptor, 0)  # a finished run's folder holds no process id
    finally:
        if os.getpid() == owner:
            _OPEN.discard(descriptor)
            os.close(descriptor)


def refuse_if_taken(path: Path) -> None:
    """Raises KeelError where a process holds the run folder at `path`. Takes nothing."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | _PLAIN)
    except OSError:
        return  # it was never held, or opening the run reports what is wrong
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, descriptor) from None
    except OSError:
        return
    finally:
        os.close(descriptor)


def is_taken(path: Path) -> bool:
    """Whether a process holds the run folder at `path`: its run is still going."""
    try:
        refuse_if_taken(path)
    except KeelError:
        return True
    return False


def _in_use(path: Path, descriptor: int) -> KeelError:
    holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    by = f" by process {holder}" if holder else ""
    return KeelError(
        f"run folder {path} is in use{by}: wait for it to end, or choose another with --run DIR"
    )
