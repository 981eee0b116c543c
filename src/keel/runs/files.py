"""Files that exist wholly or not at all: write aside, fsync, rename. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keel.types import KeelError

ASIDE = ".tmp-"
"""Prefix of everything that is not finished yet. A reader never looks at it."""


@contextmanager
def told(path: Path, doing: str = "write") -> Iterator[None]:
    """Turns an operating system error into one line that names the path and the mend."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise KeelError(
            f"cannot {doing} {path}: {why}: mend the disk or folder, then go on with --resume"
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


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file in one instant; on the disk when this returns.

    Raises:
        KeelError: the file cannot be written.
    """
    temporary = aside(path)
    with told(path):
        try:
            temporary.write_bytes(content)
            sync_file(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of the text in UTF-8."""
    write_bytes(path, content.encode("utf-8"))


def remove(path: Path) -> None:
    """Deletes a file or folder; a folder leaves its name in one instant, then its content goes."""
    with told(path, "remove"):
        if path.is_dir() and not path.is_symlink():
            if not path.name.startswith(ASIDE):
                going = aside(path)
                shutil.rmtree(going, ignore_errors=True)
                path = path.rename(going)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Deletes what interrupted writes left in a folder; returns what went.

    Only the process that holds the run folder's lock may call this.
    """
    if not folder.is_dir():
        return []
    leftovers = sorted(path for path in folder.iterdir() if path.name.startswith(ASIDE))
    for path in leftovers:
        remove(path)
    return leftovers
