"""Memory and threads of the process: the heap, what is free, how long OpenMP's threads wait."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from keel.platform.signals import free_memory, resident_memory
from tests.platform.processes import run_python

KB = 1024
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
        done = run_python(CHILD, *words)
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


@pytest.mark.quick("settings2-set: None")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set: 20000"),
        ({"GOMP_SPINCOUNT": "7"}, "set: 7"),
        ({"OMP_WAIT_POLICY": "passive"}, "set: None"),
    ],
)
def test_spin_count_is_short_unless_set_by_the_user(
    settings: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in os.environ if one.startswith(("OMP_", "GOMP_"))]:
        monkeypatch.delenv(name)
    assert run_python(SHOWN, **settings).stdout.splitlines()[-1] == message


def test_free_memory_includes_that_of_this_process(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "group"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n")
    (proc / "self/status").write_text("Name:\tpython\nVmHWM:\t 99 kB\nVmRSS:\t 50 kB\n")
    assert free_memory(proc=proc, cgroups=group) == 650 * KB
    assert resident_memory("VmHWM", proc=proc) == 99 * KB
    assert free_memory(proc=tmp_path, cgroups=group) is None


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_control_group_bounds_the_free_memory(tmp_path: Path, limit: str, used: str) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 600 kB\n")
    (tmp_path / "memory").mkdir()
    for most, now, found in ((400, 100, 300), (400, 900, 0), ("max", 100, 600)):
        (tmp_path / limit).write_text(f"{most * KB if isinstance(most, int) else most}\n")
        (tmp_path / used).write_text(f"{now * KB}\n")
        assert free_memory(proc=tmp_path, cgroups=tmp_path) == found * KB
