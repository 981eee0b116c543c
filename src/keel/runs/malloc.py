"""What this process's malloc does with memory that is free again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's `mallopt` parameters."""
_NEVER = -1
_LARGEST = 8 * 2**20
"""Larger blocks have pages of their own, which the system takes back when they are freed: they are
worth that, and leave no holes."""


def keep_freed() -> bool:
    """Keep what is freed on the heap, for good: False where malloc is not glibc's.

    glibc gives the free top of its heap back to the system, so that every phase of a training step
    takes its memory anew, page by page: up to a third of a small model's update. In return the
    holes between blocks that live on stay with the process too.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False
    # Setting either ends glibc's own adjustment of both.
    asked = ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER))
    return all(bool(libc.mallopt(name, value)) for name, value in asked)
