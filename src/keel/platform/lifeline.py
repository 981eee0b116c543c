"""A pipe by which the kernel ends a process group once the process that started it is gone.

Nothing is ever written to it; when its outer end closes, which it does however its holder ends, the
kernel sends SIGKILL to the group. Neither of the usual ways does that: `prctl(PR_SET_PDEATHSIG)`
fires when the *thread* ends that started a process, and rewards are called in passing threads; a
thread that waits for standard input to close stands still while C code holds Python's lock.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import weakref


class Lifeline:
    """The two ends: the group keeps `inner` open, the process that it must not outlive `outer`."""

    def __init__(self) -> None:
        self.inner, self.outer = os.pipe()
        _HELD.add(self)

    def tie(self, group: int) -> None:
        """Let this process group end with the outer end; from either side.

        The kernel keeps the group itself, not its number, which may be another's in time.
        """
        fcntl.fcntl(self.inner, fcntl.F_SETOWN, -group)
        if hasattr(fcntl, "F_SETSIG"):  # elsewhere than on Linux it is SIGIO, which ends too
            fcntl.fcntl(self.inner, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(self.inner, fcntl.F_GETFL)
        fcntl.fcntl(self.inner, fcntl.F_SETFL, flags | os.O_ASYNC)

    def is_cut(self) -> bool:
        """Whether the outer end is closed everywhere."""
        return bool(select.select([self.inner], [], [], 0)[0])

    def give(self) -> None:
        """Close the inner end here: the group has its own."""
        self.inner = _closed(self.inner)

    def cut(self) -> None:
        """Close the outer end here."""
        self.outer = _closed(self.outer)


_HELD: weakref.WeakSet[Lifeline] = weakref.WeakSet()
"""Those of this process. What it forks, such as a reward of the user's, must not hold them open."""


def _let_go() -> None:
    for lifeline in list(_HELD):
        lifeline.cut()


os.register_at_fork(after_in_child=_let_go)


def _closed(end: int) -> int:
    if end >= 0:
        os.close(end)
    return -1
