"""What this machine's malloc makes of the blocks that a computation takes and gives back.

On a CPU torch has its tensors of malloc, and glibc's keeps those of up to 32 MiB in one heap, where
small things that live on (a node of the graph, a tensor's own record) come to lie in the holes that
larger ones left, so that the next of the same size does not fit. Up to a half more is taken than
lives. No formula says how much; malloc itself does, if it is asked for the same blocks at the same
instants, in the process in which the small things are made too. Nothing is written into the blocks,
so they take addresses and next to no memory.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

ALIGNMENT = 64
"""Of torch's tensors on a CPU."""
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`: all fields are size_t."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


class Heap:
    """Blocks of this process's malloc, taken and given back, and never written."""

    def __init__(self, libc: Any) -> None:
        self._info, self._memalign, self._free = libc.mallinfo2, libc.posix_memalign, libc.free
        self._info.restype = _Info
        self._memalign.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        self._free.argtypes = (ctypes.c_void_p,)
        self._free.restype = None
        self._at = ctypes.c_void_p()
        self._refused = 0

    def take(self, size: int) -> int:
        """A block as torch has it for a tensor of `size` bytes; 0 where there was none to have."""
        if not size:
            return 0
        if self._memalign(ctypes.byref(self._at), ALIGNMENT, size):
            self._refused += size
            return 0
        return self._at.value or 0

    def give(self, block: int, size: int) -> None:
        """Back what `take` gave for the size."""
        if block:
            self._free(block)
        else:
            self._refused -= size

    @property
    def taken(self) -> int:
        """Bytes that malloc has of the system, holes among them, and those it could not have."""
        info = self._info()
        return int(info.arena + info.hblkhd) + self._refused

    @property
    def used(self) -> int:
        """Bytes of them that are in use."""
        info = self._info()
        return int(info.uordblks + info.hblkhd) + self._refused


def heap(overcommit: Path = OVERCOMMIT) -> Heap | None:
    """This process's heap; None where malloc is not glibc's (2.33 or later), or address space is
    counted as memory: by a limit on it, or by a kernel that grants no more than there is."""
    bounded = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    try:
        strict = overcommit.read_text("utf-8").strip() == "2"
    except OSError:
        strict = True
    libc = ctypes.CDLL(None)
    if bounded or strict or not hasattr(libc, "mallinfo2"):
        return None
    found = Heap(libc)
    # Another malloc, loaded before libc's, leaves glibc's own figures as they are.
    before, size = found.used, 2**18
    block = found.take(size)
    seen = found.used - before
    found.give(block, size)
    return found if seen >= size else None
