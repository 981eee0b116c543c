"""Files written completely or not at all (aside, fsync, rename), and the lock of a run folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from keel.types import KeelError

ASIDE = ".tmp-"
"""Prefix of everything that is not finished yet. A reader never looks at it."""
_OF_PROCESS = re.compile(re.escape(ASIDE) + r"(?P<process>\d{1,9})-[0-9a-f]{8}-(?P<name>.+)", re.S)
LOCK = ".lock"
TRIES, BETWEEN = 5, 0.02
"""Attempts to take a lock, and seconds between them: `refuse_if_taken` of another process may hold
it briefly."""
_HELD: dict[int, Path] = {}
"""The folders that this process has locked, by the descriptor of the lock."""
_IN_TEXT = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust (safetensors, tokenizers) report an operating system error."""


@contextmanager
def os_errors(path: Path, doing: str = "write") -> Iterator[None]:
    """Turns an operating system error into a KeelError that names the path and what to check."""
    try:
        yield
    except Exception as error:
        found = os_error(error)
        if found is None:
            raise
        raise KeelError(
            f"cannot {doing} {path}: {found.strerror or found}: fix the disk or folder"
        ) from error


def os_error(error: BaseException) -> OSError | None:
    """The operating system's error that an exception is, or reports in its text."""
    if isinstance(error, OSError):
        return error
    found = None if isinstance(error, KeelError) else _IN_TEXT.search(str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


@contextmanager
def locked(folder: Path, option: str = "--run") -> Iterator[None]:
    """Holds a folder for writing; the kernel releases it when the process ends.

    An advisory flock(2), of this process alone: neither a forked child nor a program that it
    starts has it. Raises KeelError if another process, or another caller in this one, holds it;
    `option` chooses another.
    """
    lock = folder / LOCK
    with os_errors(lock):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    _HELD[descriptor] = folder
    try:
        with os_errors(lock, "lock"):
            _take(folder, descriptor, option)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        try:
            yield
        finally:
            with suppress(OSError):  # the disk has already reported an error
                if descriptor in _HELD:  # else this is a fork, which has released it
                    os.ftruncate(descriptor, 0)  # a finished run's folder holds no process id
    finally:
        if _HELD.pop(descriptor, None) is not None:
            os.close(descriptor)


def _take(folder: Path, descriptor: int, option: str) -> None:
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if left == 0:
                raise _in_use(folder, descriptor, option) from None
            time.sleep(BETWEEN)


def _release_in_child() -> None:
    """A forked child that outlives its parent must not hold the parent's run folder."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_release_in_child)


def refuse_if_taken(folder: Path) -> None:
    """Raises KeelError if a process holds a run folder. Takes nothing."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return  # it was never held, or opening the run reports what is wrong
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder, descriptor) from None
    except OSError:
        return
    finally:
        os.close(descriptor)


def is_taken(folder: Path) -> bool:
    """Whether a process holds a run folder: its run is still going."""
    try:
        refuse_if_taken(folder)
    except KeelError:
        return True
    return False


def _in_use(folder: Path, descriptor: int, option: str = "--run") -> KeelError:
    holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    by = f" by process {holder}" if holder else ""
    return KeelError(
        f"folder {folder} is in use{by}: wait for it to end, or choose another with {option} DIR"
    )


def aside(target: Path) -> Path:
    """Where `target` is written before it is renamed into place (same folder, same disk)."""
    return target.with_name(ASIDE + target.name)


def sync_path(path: Path) -> None:
    """Blocks until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """A file that replaces `path` atomically once the block ends; with `sync` it is on disk then.

    Other processes may write `path` at the same time, unless this one holds a lock above it: the
    last to end has written it. What a killed process left of this is removed.
    """
    temporary = aside(path) if _holds(path) else _aside_of_process(path)
    with os_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
            if sync:
                sync_path(temporary)
            temporary.replace(path)
            if sync:
                sync_path(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _holds(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in tuple(_HELD.values()))


def _aside_of_process(target: Path) -> Path:
    """`aside` with a name that no other write uses, after those of dead processes were deleted."""
    with suppress(OSError):
        for path in target.parent.iterdir():
            found = _OF_PROCESS.fullmatch(path.name)
            if found and found["name"] == target.name and not _is_being_written(path):
                path.unlink(missing_ok=True)
    return aside(target.with_name(f"{os.getpid()}-{secrets.token_hex(4)}-{target.name}"))


def _is_being_written(path: Path) -> bool:
    """Whether the process in the name of an unfinished file runs."""
    found = _OF_PROCESS.fullmatch(path.name)
    try:
        if found:
            os.kill(int(found["process"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return found is not None


def write_bytes(path: Path, content: bytes, sync: bool = True) -> None:
    """Replaces a file atomically; with `sync` it is on the disk when this returns."""
    with replacing(path, sync) as file:
        file.write(content)


def append_bytes(path: Path, content: bytes) -> None:
    """Adds to the end of a file, which is on the disk when this returns."""
    with os_errors(path):
        with path.open("ab") as file:
            file.write(content)
        sync_path(path)
        sync_path(path.parent)


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of the text in UTF-8."""
    write_bytes(path, content.encode("utf-8"))


def remove(path: Path) -> None:
    """Deletes a file or folder; a folder is renamed first, so that no part of it is left there."""
    with os_errors(path, "remove"):
        if path.is_dir() and not path.is_symlink():
            if not path.name.startswith(ASIDE):
                going = aside(path)
                shutil.rmtree(going, ignore_errors=True)
                path = path.rename(going)
                sync_path(path.parent)  # before the first of its files goes
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder; of one that is being written, about that."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted since
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_jsonl(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Number (from 1), bytes and JSON object of each line of a file; none if there is no file.

    An incomplete last line, being written or left by a killed process, is left out.
    Raises KeelError for a damaged line.
    """
    with os_errors(path, "read"):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            record = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged_line(path, number, error) from error
        yield number, line, record


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a file, one a line, completely or not at all; its folder too."""
    make_folder(path.parent)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def damaged_line(path: Path, number: int, error: Exception) -> KeelError:
    return KeelError(f"{path}:{number} is damaged ({error}): fix or delete this line")


def make_folder(path: Path) -> None:
    """Makes a folder inside one that exists, unless it is there."""
    with os_errors(path, "make"):
        path.mkdir(exist_ok=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Deletes the files of interrupted writes; only for the process that holds the lock.

    Those of processes that run stay: a report may be written meanwhile.
    """
    if not folder.is_dir():
        return []
    unfinished = sorted(path for path in folder.iterdir() if path.name.startswith(ASIDE))
    leftovers = [path for path in unfinished if not _is_being_written(path)]
    for path in leftovers:
        remove(path)
    return leftovers
