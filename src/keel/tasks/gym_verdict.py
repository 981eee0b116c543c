"""One answer, one process: it can compute, and say one number; nothing of it is left.

Runs in the sandbox, without the rest of Keel. Some scorers of reasoning-gym evaluate the answer, or
hand it to parsers that crash or do not end. Therefore a process is forked for each verdict; it is
confined further by a filter of system calls (no file to write, no process, no thread, no signal),
and the parent, which no answer has been in, takes eight bytes from it and ends it.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

import sympy

from .gym_expression import arithmetic, formula

MEMORY = 2**30
"""Bytes of address space that a verdict may take beyond what there was before."""
# Of linux/prctl.h.
_NO_DUMPS, _NO_NEW_PRIVILEGES, _FILTER_CALLS = 4, 38, 22


class Confined:
    """Computes values in processes of their own, under a filter of system calls.

    Raises OSError where the filter does not take hold.
    """

    def __init__(self, program: bytes) -> None:
        self.killed = 0
        self.library = ctypes.CDLL(None, use_errno=True)
        self.program = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: how many instructions, and where.
        self.filter = ctypes.create_string_buffer(
            struct.pack("@HP", len(program) // 8, ctypes.addressof(self.program))
        )
        if self.value(_cannot_fork, 10.0, 60.0) != 1.0:
            raise OSError("the filter of system calls does not take hold")
        self.bury()

    def value(self, compute: Callable[[], float], cpu: float, patience: float) -> float:
        """What `compute` returns; 0 where it takes too long, in computing or by the clock, or dies.

        Deterministic but for the limits, if `compute` is.
        """
        self.bury()
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
            said = os.read(reading, 16) if ready else b""
        finally:
            os.kill(child, signal.SIGKILL)
            self.killed = child
            os.close(reading)
        return bounded(struct.unpack("<d", said)[0]) if len(said) == 8 else 0.0

    def bury(self) -> None:
        """Wait for the end of the last process: the kernel takes it apart while others compute."""
        if self.killed:
            os.waitpid(self.killed, 0)
            self.killed = 0

    def confine(self, kept: int, cpu: float) -> None:
        """Leave this process nothing but computing, and one file descriptor to write to."""
        gc.disable()  # it would write to, and so copy, all that there is
        os.closerange(3, kept)
        os.closerange(kept + 1, 64)
        prepare()
        seconds = max(1, round(cpu))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with open("/proc/self/statm", "rb") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        self.control(_NO_NEW_PRIVILEGES, 1)
        self.control(_FILTER_CALLS, 2, ctypes.addressof(self.filter))

    def control(self, *what: int) -> None:
        """prctl. Raises OSError where it fails."""
        given = [ctypes.c_ulong(one) for one in (*what, 0, 0, 0, 0)][:5]
        if self.library.prctl(*given) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def hide() -> None:
    """Let no other process of this user read or write this one's memory."""
    if ctypes.CDLL(None, use_errno=True).prctl(_NO_DUMPS, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def bounded(value: Any) -> float:
    """A verdict: from 0 to 1, and 0 for what is no number."""
    number = float(value)
    return min(max(number, 0.0), 1.0) if number == number else 0.0


def prepare() -> None:
    """Replace what scorers evaluate an answer with; for this process alone.

    Formulas are read, not evaluated; other scorers get a literal of Python, or nothing. And where
    a comparison with what is no number would pass for equality, there is no such number.
    """
    sympy.parse_expr = formula
    for path, name, replacement in (
        ("games.countdown", "parse_expr", arithmetic),
        ("games.puzzle24", "parse_expr", arithmetic),
        ("algorithmic.string_insertion", "eval", ast.literal_eval),
        ("algorithmic.spiral_matrix", "eval", ast.literal_eval),
        ("algorithmic.binary_matrix", "eval", ast.literal_eval),
        ("games.n_queens", "eval", ast.literal_eval),
        ("algorithmic.number_sorting", "float", _number(float)),
        ("algebra.complex_arithmetic", "float", _number(float)),
        ("algebra.complex_arithmetic", "complex", _number(complex)),
    ):
        setattr(sys.modules[f"reasoning_gym.{path}"], name, replacement)


def _number(kind: Callable[..., Any]) -> Callable[..., Any]:
    def number(*given: Any) -> Any:
        value = kind(*given)
        if value != value:
            raise ValueError("not a number")
        return value

    return number


def _cannot_fork() -> float:
    try:
        os.fork()
    except PermissionError:
        return 1.0
    return 0.0
