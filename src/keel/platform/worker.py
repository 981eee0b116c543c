"""A worker's own side: it answers one JSON line with another, and ends when its parent does."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

READY = "ready"


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer items from standard input until it closes: `[true, value]` or `[false, why]`.

    The arguments of the process are the lifeline's file descriptor and the limit of its address
    space in MB (0: none). Whatever `answer` prints goes to standard error.
    """
    _hold(int(sys.argv[1]))
    limit = int(sys.argv[2]) * 1_000_000
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    _say(replies, READY)
    for line in sys.stdin.buffer:
        try:
            reply = [True, answer(json.loads(line))]
        except Exception as error:
            reply = [False, f"{type(error).__name__}: {error}"[:300]]
        _say(replies, reply)


def _say(replies: Any, what: Any) -> None:
    replies.write(json.dumps(what) + "\n")
    replies.flush()


def _hold(lifeline: int) -> None:
    """Let the kernel end this process when the other end of a pipe closes.

    A thread that waits for standard input to close would do no such thing while C code holds
    Python's lock, and `prctl(PR_SET_PDEATHSIG)` fires when the parent's thread ends, not the
    parent. SIGIO's default is the end of the process.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    # The parent may have ended before the line above; nothing is ever written to the pipe.
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)
