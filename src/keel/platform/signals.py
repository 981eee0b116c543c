"""The process that trains: its signals, its memory and the machine's, and its threads.

SIGINT, SIGTERM and SIGHUP: the current step is finished and saved; a second SIGINT or SIGTERM ends
at once: the process, or the call of an interactive session.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from keel.types import KeelError

AGAIN = 0.25
"""Seconds within which a second signal is an echo of the first: timeout(1) sends one to the process
and one to its group."""
SHOW_CURSOR = b"\x1b[?25h"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_NEVER = -1
_LARGEST = 8 * 2**20
"""Larger blocks have pages of their own, which go back to the system when they are freed; they cost
little compared with their content, and leave no holes."""
_SPINS = 20_000
"""Turns of GNU OpenMP's waiting loop: about 0.4 ms on a processor of 2023."""

# ---------------------------------------------------------------- signals


class Interrupted(Exception):
    """The run was asked to stop, and has written a checkpoint."""

    def __init__(self, signum: int, folder: Path) -> None:
        self.name = signal.Signals(signum).name
        super().__init__(
            f"{self.name}: stopped with a checkpoint; go on with "
            f"keel.load({str(folder)!r}).continue_()"
        )
        self.signum = signum
        self.folder = folder

    _render_traceback_ = KeelError._render_traceback_


class Interrupt:
    """Whether the run was asked to stop: by a signal, or by a callback with a reason."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.reason: str | None = None
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.signum is not None or self.reason is not None

    def stop(self, reason: str) -> None:
        """Ask the run to stop, for a reason that its events name."""
        self.reason = reason

    def handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._since = signum, now
            name = signal.Signals(signum).name
            _write(f"keel: {name}: finishing the current step; send it again to stop at once\n")
        elif signum != signal.SIGHUP and now - self._since >= AGAIN:
            if signum == signal.SIGINT and hasattr(sys, "ps1"):  # a notebook keeps its variables
                raise KeyboardInterrupt
            _end(signum)


@contextmanager
def catching() -> Iterator[Interrupt]:
    """Catch SIGINT, SIGTERM and SIGHUP in the main thread, unless they are ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt()
        return
    interrupt, before = Interrupt(), {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, interrupt.handle)
    try:
        yield interrupt
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def noticing_interrupt() -> Iterator[Callable[[], bool]]:
    """Within the block SIGINT raises nothing; what is yielded says whether there was one."""
    noticed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: noticed.set())
    try:
        yield noticed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _end(signum: int) -> None:
    """End as a program that does not catch the signal."""
    if os.isatty(1):
        _write(SHOW_CURSOR, 1)
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


def _write(text: str | bytes, descriptor: int = 2) -> None:
    """Write without Python's buffers and rich's locks, which a signal handler may not use."""
    with suppress(OSError):
        os.write(descriptor, text.encode() if isinstance(text, str) else text)


class ProcessLost(KeelError):
    """Another process that a run needs has ended, or does not answer."""


# ---------------------------------------------------------------- memory and threads


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

    GNU OpenMP's default of 300,000 turns is several milliseconds: if another program uses one of
    the cores, a waiting thread takes the time that the thread it waits for needs. The user's own
    `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def free_memory(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that this process could take: what is free now, within the limit of its control group,
    and what it holds already. None if the system does not say."""
    free_bytes = _table(proc / "meminfo").get("MemAvailable")
    if free_bytes is None:
        return None
    free = min([free_bytes, *(max(limit - used, 0) for limit, used in _limits(cgroups))])
    return free + (resident_memory("VmRSS", proc=proc) or 0)


def resident_memory(field: str, *, proc: Path = PROC) -> int | None:
    """Bytes of this process in memory: now (`VmRSS`), or at most so far (`VmHWM`); None if the
    system does not say."""
    return _table(proc / "self/status").get(field)


def _table(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of the kernel, in bytes."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return {}
    words = [(line.partition(":")[0], line.partition(":")[2].split()) for line in lines]
    return {name: int(value[0]) * 1024 for name, value in words if value[1:] == ["kB"]}


def _limits(cgroups: Path) -> list[tuple[int, int]]:
    """Limit and use of the control group that this process is in, in versions 2 and 1."""
    found = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            numbers = [(cgroups / name).read_text("utf-8").strip() for name in (limit, used)]
        except OSError:
            continue
        if all(number.isdigit() for number in numbers):
            found.append((int(numbers[0]), int(numbers[1])))
    return found
