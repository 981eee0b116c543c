"""The heap keeps what is freed."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CHILD = """
import ctypes
import sys

import numpy

from keel.runs.process import keep_freed


class Info(ctypes.Structure):  # glibc's struct mallinfo2
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


if "keep" in sys.argv:
    assert keep_freed()
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
taken = lambda: libc.mallinfo2().arena + libc.mallinfo2().hblkhd
before = taken()
blocks = [numpy.empty(2**20, dtype=numpy.uint8) for _ in range(400)]
most = taken() - before
del blocks
print(most, taken() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_what_is_freed_stays_with_the_process() -> None:
    for keeps in (True, False):
        words = ["keep"] if keeps else []
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=True
        )
        most, left = map(int, done.stdout.split())
        # A little may have been free on the heap before.
        assert most >= 390 * 2**20
        assert (left == most) == keeps, done.stdout
