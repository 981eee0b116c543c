"""What the machine has, read from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from keel.preflight.memory.machine import Machine, machine, resident
from keel.preflight.memory.prediction import Footprint, MemoryPart, Phase

CPU = torch.device("cpu")
KB = 1024


def kernel(folder: Path, total: int, free: int, own: int) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"MemTotal:       {total} kB\nMemAvailable:   {free} kB\nHugePages_Total: 0\n"
    )
    (folder / "self/status").write_text(f"Name:\tpython\nVmHWM:\t 9999 kB\nVmRSS:\t {own} kB\n")
    return folder


def test_what_the_process_holds_counts_as_room_but_not_its_start(tmp_path: Path) -> None:
    proc = kernel(tmp_path / "proc", 1000, 600, 50)
    found = machine(CPU, start=20 * KB, proc=proc, cgroups=tmp_path)
    assert found == Machine("cpu", 1000 * KB, 630 * KB)
    assert resident(proc=proc) == 50 * KB


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_control_group_bounds_both(tmp_path: Path, limit: str, used: str) -> None:
    proc = kernel(tmp_path / "proc", 1000, 600, 50)
    group = tmp_path / "group"
    (group / "memory").mkdir(parents=True)
    (group / limit).write_text(f"{400 * KB}\n")
    (group / used).write_text(f"{100 * KB}\n")
    found = machine(CPU, proc=proc, cgroups=group)
    assert found == Machine("cpu", 400 * KB, 350 * KB)
    (group / used).write_text(f"{900 * KB}\n")
    full = machine(CPU, proc=proc, cgroups=group)
    assert full is not None
    assert full.room == 50 * KB
    (group / limit).write_text("max\n")
    free = machine(CPU, proc=proc, cgroups=group)
    assert free == Machine("cpu", 1000 * KB, 650 * KB)


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert machine(CPU, proc=tmp_path, cgroups=tmp_path) is None
    assert resident(proc=tmp_path) is None


def test_a_footprint_against_the_room() -> None:
    small = Footprint("cpu", (Phase("update", (MemoryPart("weights", 30),)),))
    large = Footprint("cpu", (Phase("update", (MemoryPart("weights", 41),)),))
    here = Machine("cpu", 100, 40)
    assert here.fits(small)
    assert not here.fits(large)
    assert here.fits(Footprint("cpu", (Phase("update", (MemoryPart("weights", 40),)),)))
    assert here.share(small) == 0.75
    assert Machine("cpu", 100, 0).share(small) == float("inf")


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="not Linux")
def test_this_machine() -> None:
    here, own = machine(CPU), resident()
    assert here is not None
    assert own is not None
    assert own <= here.room <= here.total + own
