"""Ctrl-C and SIGTERM: the step in hand is finished and saved; a second signal ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(Exception):
    """The run was asked to stop, and has left a checkpoint."""

    def __init__(self, signum: int, folder: Path) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.folder = folder


class Interrupt:
    """Which signal, if any, has asked the run to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.signum = signum


@contextmanager
def catching() -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM for the duration; only the main thread may."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.signal(signum, interrupt.handle) for signum in wanted}
    try:
        yield interrupt
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
