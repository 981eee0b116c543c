"""Settings of the process: freed memory stays on the heap, OpenMP threads wait briefly."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

CHILD = """
import ctypes
import sys

import numpy

from keel.platform.signals import keep_freed


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
def test_keep_freed_keeps_memory_on_the_heap() -> None:
    for keeps in (True, False):
        words = ["keep"] if keeps else []
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=True
        )
        most, left = map(int, done.stdout.split())
        # A little may have been free on the heap before.
        assert most >= 390 * 2**20
        assert (left == most) == keeps, done.stdout


SHOWN = """
import os, sys
from keel.cli.main import main
main(["recipes"])
assert "torch" not in sys.modules, "what torch's OpenMP reads as it is loaded would come too late"
print("set:", os.environ.get("GOMP_SPINCOUNT"))
"""


def shown(**settings: str) -> str:
    around = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN],
        capture_output=True,
        text=True,
        check=True,
        env={**around, **settings},
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.quick("settings2-set: None")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set: 20000"),
        ({"GOMP_SPINCOUNT": "7"}, "set: 7"),
        ({"OMP_WAIT_POLICY": "passive"}, "set: None"),
    ],
)
def test_spin_count_is_short_unless_set_by_the_user(settings: dict[str, str], message: str) -> None:
    assert shown(**settings) == message
