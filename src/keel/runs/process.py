"""The process that trains: its signals, standard streams, memory and threads.

SIGINT, SIGTERM and SIGHUP: the current step is finished and saved; a second SIGINT or SIGTERM ends
at once. A SIGHUP because the terminal closed does not stop the run, nor does a closed stream.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from keel.types import KeelError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

AGAIN = 0.25
"""Seconds within which a second signal is an echo of the first: timeout(1) sends one to the process
and one to its group."""
SHOW_CURSOR = b"\x1b[?25h"
NAMES = ("stdout", "stderr")
GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""Errors of a pipe whose reader has ended, and of a terminal that has closed."""
_ESCAPE = "keel.escape"
_lost: dict[str, str] = {}
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
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.folder = folder

    _render_traceback_ = KeelError._render_traceback_


class Interrupt:
    """Whether the run was asked to stop: by a signal, or by a callback with a reason."""

    def __init__(self, terminal: int | None = None) -> None:
        self.signum: int | None = None
        self.reason: str | None = None
        self._since = 0.0
        self._terminal = terminal

    def __bool__(self) -> bool:
        return self.signum is not None or self.reason is not None

    def stop(self, reason: str) -> None:
        """Ask the run to stop, for a reason that its events name."""
        self.reason = reason

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP and self._terminal is not None and not os.isatty(self._terminal):
            return  # it has closed; kill -HUP leaves it open
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._since = signum, now
            name = signal.Signals(signum).name
            _write(f"keel: {name}: finishing the current step; send it again to stop at once\n")
        elif signum != signal.SIGHUP and now - self._since >= AGAIN:
            _end(signum)


@contextmanager
def catching() -> Iterator[Interrupt]:
    """Catch SIGINT, SIGTERM and SIGHUP in the main thread, unless they are ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt()
        return
    terminal = _terminal()
    interrupt, before = Interrupt(terminal), {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, interrupt.handle)
    try:
        yield interrupt
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if terminal is not None:
            os.close(terminal)


def _terminal() -> int | None:
    """A descriptor of the terminal that controls this process; None where there is none."""
    try:
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return None


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


# ---------------------------------------------------------------- standard streams


def lost_streams() -> dict[str, str]:
    """The streams that have lost their reader since the last call, each with its error."""
    found = dict(_lost)
    _lost.clear()
    return found


@contextmanager
def outlasting() -> Iterator[None]:
    r"""Lets the process continue when the reader of its standard output or error ends.

    Within the block, what is written to such a stream is dropped, by child processes too. A
    descriptor (0 to 2) that was closed from the start leads to the null device, so that no file of
    a run gets its number. A character outside the stream's encoding is written as in JSON, as
    `\uXXXX`. A stream that a caller has replaced is left as it is.
    """
    _open_closed()
    before = {name: getattr(sys, name) for name in NAMES}
    for name, stream in before.items():
        if stream is None:
            setattr(sys, name, os.fdopen(os.dup(1 + NAMES.index(name)), "w", encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _wrapped(stream, name))
    try:
        yield
    finally:
        for name, stream in before.items():
            with suppress(OSError, ValueError):
                getattr(sys, name).flush()
            setattr(sys, name, stream)


class _Raw(io.FileIO):
    """A descriptor that leads to the null device once its reader has ended."""

    def __init__(self, descriptor: int, stream: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream = stream

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                error.filename = self._stream
                raise
            _lost[self._stream] = os.strerror(error.errno)
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            return super().write(data)


def _wrapped(stream: io.TextIOWrapper, name: str) -> TextIO:
    with suppress(OSError):
        stream.flush()
    raw = _Raw(stream.fileno(), name)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=_ESCAPE,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _open_closed() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


codecs.register_error(_ESCAPE, _escape)


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

    GNU OpenMP's default of 300,000 turns is several milliseconds: where another program uses one of
    the cores, a waiting thread takes the time that the thread it waits for needs. The user's own
    `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
