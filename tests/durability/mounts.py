"""Small disks that fill, mounted for a test. Root only."""

from __future__ import annotations

import ctypes
import errno
import functools
import multiprocessing.forkserver
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096
CLONE_NEWNS = 0x00020000


@functools.cache
def own_namespace() -> bool:
    """Gives this process, and those it starts from now on, mounts of its own; whether it could.

    They go with it, however it ends, and no one else sees them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(CLONE_NEWNS) != 0:
        return False
    # One that another test has started has the mounts of before; the next starts with these.
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {' '.join(done.stderr.split())}")


def _need_own() -> None:
    if not own_namespace():
        pytest.skip("mounts of one's own need root")


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes at `place`."""
    _need_own()
    place.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def free(disk: Path) -> int:
    """The bytes that are left."""
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_frsize


def fill(disk: Path, leave: int) -> None:
    """Takes all but so many bytes (a multiple of the page) of a disk with one file."""
    assert os.path.ismount(disk), f"{disk} is no disk of its own"
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while free(disk) > leave:
                file.write(bytes(min(free(disk) - leave, 1 << 20)))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def empty(disk: Path) -> None:
    (disk / "ballast").unlink()
