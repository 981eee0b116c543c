"""Settings of the process for training: what malloc keeps, and how OpenMP threads wait."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_NEVER = -1
_LARGEST = 8 * 2**20
"""Larger blocks have pages of their own, which go back to the system when they are freed; they cost
little compared with their content, and leave no holes."""
_SPINS = 20_000
"""Turns of GNU OpenMP's waiting loop: about 0.4 ms on a processor of 2023."""


def keep_freed() -> bool:
    """Keep freed memory on the heap for the life of the process; False if malloc is not glibc's.

    glibc returns the free top of its heap to the system, so that every phase of a training step
    requests its memory again, page by page: up to a third of a small model's update. The cost is
    that holes between live blocks stay with the process too.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False
    # Setting either switches off glibc's own adjustment of both.
    settings = ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER))
    return all(bool(libc.mallopt(name, value)) for name, value in settings)


def sleep_soon() -> None:
    """Let OpenMP threads sleep after a short wait. Call it before torch is imported.

    GNU OpenMP's default of 300,000 turns is several milliseconds: where another program uses one of
    the cores, a waiting thread takes the time that the thread it waits for needs. The user's own
    `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
