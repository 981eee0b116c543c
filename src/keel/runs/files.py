"""Files that exist wholly or not at all: write aside, fsync, rename. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keel.types import KeelError

ASIDE = ".tmp-"
"""Prefix of everything that is not finished yet. A reader never looks at it."""


_HELD: dict[Path, tuple[Path, int, int]] = {}
"""The folders that this process writes, and a file in each with its device and inode."""
_IN_TEXT = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust (safetensors, tokenizers) report an operating system error."""


@contextmanager
def os_errors(path: Path, doing: str = "write") -> Iterator[None]:
    """Turns an operating system error into one line that names the path and what to check.

    Raises KeelError at once below a `held` folder that is gone.
    """
    present(path)
    try:
        yield
    except Exception as error:
        found = os_error(error)
        if found is None:
            raise
        present(path)
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
def held(folder: Path, witness: Path, descriptor: int) -> Iterator[None]:
    """While the block lasts, writes below `folder` are refused once it is another folder.

    `witness` is a file in it, open as `descriptor`. A mount that vanished would otherwise let the
    run go on in the empty folder underneath it, and one that was moved in its successor.
    """
    facts = os.fstat(descriptor)
    _HELD[folder] = (witness, facts.st_dev, facts.st_ino)
    try:
        yield
    finally:
        _HELD.pop(folder, None)


def present(path: Path) -> None:
    """Raises KeelError where the path lies below a `held` folder that is gone."""
    for folder, (witness, device, inode) in _HELD.items():
        if not path.is_relative_to(folder):
            continue
        try:
            now = os.stat(witness)
            same = (now.st_dev, now.st_ino) == (device, inode)
        except OSError:
            same = False
        if not same:
            raise KeelError(
                f"run folder {folder} is gone, or another has its place: mount or move it back"
            )


def check_name(path: Path) -> None:
    """Raises KeelError where a path is no UTF-8, which model and tokenizer files need it to be."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise KeelError(
            f"the name of {path} is not UTF-8, or the locale cannot read it: choose another "
            "folder, or set a UTF-8 locale (LC_ALL=C.UTF-8)"
        ) from error


def aside(target: Path) -> Path:
    """Where `target` is written before it is renamed into place (same folder, same disk)."""
    return target.with_name(ASIDE + target.name)


def sync_file(path: Path) -> None:
    """Blocks until the file's content is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Blocks until the folder's list of names is on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes, sync: bool = True) -> None:
    """Replaces the file in one instant; with `sync` it is on the disk when this returns.

    Raises:
        KeelError: the file cannot be written.
    """
    temporary = aside(path)
    with os_errors(path):
        try:
            temporary.unlink(missing_ok=True)  # a link that lies there is not followed
            with temporary.open("xb") as file:
                file.write(content)
            if sync:
                sync_file(temporary)
            temporary.replace(path)
            if sync:
                sync_folder(path.parent)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


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
                sync_folder(path.parent)  # before the first of its files goes
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_jsonl(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Number (from 1), bytes and JSON object of each line of a file; none where there is no file.

    A last line without its end, which is being written or whose process ended, is left out.

    Raises:
        KeelError: the file cannot be read, or a line is damaged.
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


def damaged_line(path: Path, number: int, error: Exception) -> KeelError:
    return KeelError(f"{path}:{number} is damaged ({error}): fix or delete this line")


def make_folder(path: Path) -> None:
    """Makes a folder inside one that exists, unless it is there."""
    with os_errors(path, "make"):
        path.mkdir(exist_ok=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Deletes what interrupted writes left in a folder; returns the deleted paths.

    Only the process that holds the run folder's lock may call this.
    """
    if not folder.is_dir():
        return []
    leftovers = sorted(path for path in folder.iterdir() if path.name.startswith(ASIDE))
    for path in leftovers:
        remove(path)
    return leftovers
