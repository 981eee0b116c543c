"""The heap keeps what is freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.preflight.test_memory_heap import GLIBC

CHILD = """
import sys
import numpy
from keel.preflight.memory.heap import heap
from keel.runs.process import keep_freed

if "keep" in sys.argv:
    assert keep_freed()
found = heap()
before = found.taken
blocks = [numpy.empty(2**20, dtype=numpy.uint8) for _ in range(400)]
most = found.taken - before
del blocks
print(most, found.taken - before)
"""


@pytest.mark.skipif(not GLIBC, reason="needs glibc's malloc")
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
