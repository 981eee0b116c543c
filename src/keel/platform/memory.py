"""The memory of this machine and of this process, as Linux says it."""

from __future__ import annotations

from pathlib import Path

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def free_memory(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that this process could take: what is free now, within the limit of its control group,
    and what it holds already. None if the system does not say."""
    free_bytes = _table(proc / "meminfo").get("MemAvailable")
    if free_bytes is None:
        return None
    free = min([free_bytes, *(max(limit - used, 0) for limit, used in _limits(cgroups))])
    return free + (resident_memory("VmRSS", proc=proc) or 0)


def resident_memory(field: str, *, proc: Path = PROC) -> int | None:
    """Bytes of this process in memory: now (`VmRSS`), or at most so far (`VmHWM`); None if the
    system does not say."""
    return _table(proc / "self/status").get(field)


def _table(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of the kernel, in bytes."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return {}
    words = [(line.partition(":")[0], line.partition(":")[2].split()) for line in lines]
    return {name: int(value[0]) * 1024 for name, value in words if value[1:] == ["kB"]}


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
