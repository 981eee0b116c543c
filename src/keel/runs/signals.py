"""Ctrl-C, SIGTERM, SIGHUP: the current step is finished and saved.

A second Ctrl-C or SIGTERM ends at once. A SIGHUP because the terminal closed does not stop the run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

AGAIN = 0.25
"""Seconds within which a second signal is the first one's echo: timeout(1) and supervisors send
one to the process and one to its group."""
SHOW_CURSOR = b"\x1b[?25h"


class Interrupted(Exception):
    """The run was asked to stop, and has written a checkpoint."""

    def __init__(self, signum: int, folder: Path) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.folder = folder


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
            _say(f"keel: {name}: stopping once the step in hand is saved; again: at once\n")
        elif signum != signal.SIGHUP and now - self._since >= AGAIN:
            _end(signum)


@contextmanager
def catching() -> Iterator[Interrupt]:
    """Catch SIGINT, SIGTERM and SIGHUP for the duration; only the main thread may.

    A signal that was ignored before (nohup) stays ignored.
    """
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
    """End as the signal ends a program that does not catch it."""
    if os.isatty(1):
        _say(SHOW_CURSOR, 1)
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


def _say(text: str | bytes, descriptor: int = 2) -> None:
    """Past Python's buffers and rich's locks, which a signal handler may not touch."""
    with suppress(OSError):
        os.write(descriptor, text.encode() if isinstance(text, str) else text)
