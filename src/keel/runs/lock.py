"""One process to a run folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from keel.runs import files
from keel.runs.layout import RunFolder
from keel.types import KeelError


class _Taken(Exception):
    """Somebody holds the lock."""


def _take(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _Taken from error


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Holds the run folder for writing; the kernel lets go when the process ends, however it ends.

    An advisory flock(2). A forked child shares it until the child ends or executes a program.

    Raises:
        KeelError: another process, or another caller in this one, holds it.
    """
    with files.told(folder.lock):
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            with files.told(folder.lock, "lock"):
                _take(descriptor)
        except _Taken:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            by = f" by process {holder}" if holder else ""
            raise KeelError(
                f"run folder {folder.path} is in use{by}: "
                "wait for it to end, or choose another with --run DIR"
            ) from None
        with files.told(folder.lock):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)  # a finished run's folder holds no process id
    finally:
        os.close(descriptor)
