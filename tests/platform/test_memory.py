"""Free memory and memory of the process, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.platform.signals import free_memory, resident_memory

KB = 1024


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
