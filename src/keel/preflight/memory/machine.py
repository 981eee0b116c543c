"""What the machine has: memory for a process, on a CPU within its control group, or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from keel.preflight.memory.prediction import Footprint

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes in all on a device, and those that a stage could have: what is free now, and what this
    process holds itself, which a run of its own would not find taken."""

    device: str
    total: int
    room: int

    def fits(self, footprint: Footprint) -> bool:
        """Whether the stage's peak has room."""
        return footprint.peak <= self.room

    def share(self, footprint: Footprint) -> float:
        """The stage's peak as a share of the room."""
        return footprint.peak / self.room if self.room > 0 else float("inf")


def machine(
    device: torch.device, start: int = 0, *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> Machine | None:
    """The machine as it is now; None where the system does not say.

    `start` are the bytes that the process took before it loaded anything of the recipe, which a
    footprint leaves out. On a GPU torch's own allocations count as room.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Machine(str(device), total, free + torch.cuda.memory_reserved(device))
    known = _table(proc / "meminfo")
    if "MemTotal" not in known or "MemAvailable" not in known:
        return None
    total, free = known["MemTotal"], known["MemAvailable"]
    for limit, used in _limits(cgroups):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    own = _table(proc / "self/status").get("VmRSS", 0)
    return Machine(str(device), total, max(free + own - start, 0))


def resident(*, proc: Path = PROC) -> int | None:
    """Bytes that this process takes now; None where the system does not say."""
    return _table(proc / "self/status").get("VmRSS")


def _table(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of the kernel's, in bytes."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return {}
    words = [(line.partition(":")[0], line.partition(":")[2].split()) for line in lines]
    return {name: int(said[0]) * 1024 for name, said in words if said[1:] == ["kB"]}


def _limits(cgroups: Path) -> list[tuple[int, int]]:
    """Limit and use of the control group that this process is in, in versions 2 and 1."""
    found = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            numbers = [(cgroups / name).read_text("utf-8").strip() for name in (limit, used)]
        except OSError:
            continue
        if all(number.isdigit() for number in numbers):
            found.append((int(numbers[0]), int(numbers[1])))
    return found
