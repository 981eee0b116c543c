"""One verdict, one process: it can compute, and say one number; nothing of it is left.

The side of `resident` that runs in the sandbox, without the rest of Keel. Parsers of
what a model wrote may evaluate it, crash or not end. Therefore a process is forked for each
verdict; it is confined further by a filter of system calls (no file to write, no process, no
thread, no signal), and the parent, which no such text is parsed in, takes eight bytes from it and
ends it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from keel.platform.inside import confine, limit, run_as_init

MEMORY = 8 * 2**30
"""Address space, in bytes, of the parent."""
VERDICT_MEMORY = 2**30
"""Bytes of address space that a verdict may take beyond what there was before."""
# Of linux/prctl.h.
_NO_DUMPS, _NO_NEW_PRIVILEGES, _FILTER_CALLS = 4, 38, 22

Request = Mapping[str, Any]


class Confined:
    """Computes values in processes of their own, under a filter of system calls.

    `prepare` is called in each of them first. Raises OSError if the filter does not take hold.
    """

    def __init__(self, program: bytes, prepare: Callable[[], None] = lambda: None) -> None:
        self.prepare = prepare
        self.killed = 0
        self.library = ctypes.CDLL(None, use_errno=True)
        self.program = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: how many instructions, and where.
        self.filter = ctypes.create_string_buffer(
            struct.pack("@HP", len(program) // 8, ctypes.addressof(self.program))
        )
        if self.value(_cannot_fork, 10.0, 60.0) != 1.0:
            raise OSError("the filter of system calls does not take hold")
        self.reap()

    def value(
        self, compute: Callable[[], float], cpu: float, patience: float
    ) -> float | Literal["timed out", "died"]:
        """What `compute` returns; else whether it took too long, in computing or by the clock.

        `cpu` is in whole seconds, at least 1. Deterministic but for the limits, if `compute` is.
        """
        self.reap()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self.confine(writing, cpu)
                os.write(writing, struct.pack("<d", compute()))
            finally:
                os._exit(0)
        os.close(writing)
        try:
            ready, _, _ = select.select([reading], [], [], patience)
            data = os.read(reading, 16) if ready else b""
        finally:
            os.kill(child, signal.SIGKILL)
            self.killed = child
            os.close(reading)
        if len(data) == 8:
            return float(struct.unpack("<d", data)[0])
        seconds = self.reap()
        return "timed out" if not ready or seconds >= whole(cpu) - 0.1 else "died"

    def reap(self) -> float:
        """Wait for the end of the last process: the kernel takes it apart while others compute.

        Returns the seconds that it computed.
        """
        if not self.killed:
            return 0.0
        _, _, used = os.wait4(self.killed, 0)
        self.killed = 0
        return used.ru_utime + used.ru_stime

    def confine(self, kept: int, cpu: float) -> None:
        """Leave this process nothing but computing, and one file descriptor to write to."""
        gc.disable()  # it would write to, and so copy, all that there is
        os.closerange(3, kept)
        os.closerange(kept + 1, 64)
        self.prepare()
        seconds = whole(cpu)
        limit(resource.RLIMIT_CPU, seconds, seconds)
        with open("/proc/self/statm", "rb") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        limit(resource.RLIMIT_AS, held + VERDICT_MEMORY, held + VERDICT_MEMORY)
        self.control(_NO_NEW_PRIVILEGES, 1)
        self.control(_FILTER_CALLS, 2, ctypes.addressof(self.filter))

    def control(self, *what: int) -> None:
        """prctl. Raises OSError if it fails."""
        given = [ctypes.c_ulong(one) for one in (*what, 0, 0, 0, 0)][:5]
        if self.library.prctl(*given) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def hide() -> None:
    """Let no other process of this user read or write this one's memory."""
    if ctypes.CDLL(None, use_errno=True).prctl(_NO_DUMPS, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def serve(
    start: Callable[[bytes], Callable[[Request], Any]],
    known: Callable[[Request], list[str]] = lambda request: [],
) -> None:
    """Answer requests, JSON lines on stdin, until it ends: {"ok": value} or {"error", "known"}.

    `start` is given the filter of system calls, and returns what answers a request; `known` are
    the options to name if a request is refused.
    """
    lifeline = int(sys.argv[-1])
    run_as_init(lifeline)
    os.close(lifeline)
    # Libraries may print and read; the channel is kept out of their reach.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    settings = json.loads(requests.readline())
    limits = {"AS": MEMORY, "CORE": 0, "FSIZE": 2**23, "NOFILE": 64, "NPROC": settings["processes"]}
    confine(settings["uid"], {f"RLIMIT_{name}": value for name, value in limits.items()})
    hide()
    answer = start(bytes.fromhex(settings["filter"]))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    for line in requests:
        request = json.loads(line)
        try:
            reply = {"ok": answer(request)}
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            reply = {"error": message, "known": known(request)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def whole(seconds: float) -> int:
    """Seconds as the limit on computing counts them."""
    return max(1, round(seconds))


def _cannot_fork() -> float:
    try:
        os.fork()
    except PermissionError:
        return 1.0
    return 0.0
