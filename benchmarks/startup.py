"""How long Keel takes to start: commands, the import, and the first steps of a run.

    python -m benchmarks.startup                      # prints a Markdown table
    python -m benchmarks.startup --rows help import --repeats 15 --json startup.json
    python -m benchmarks.startup --smoke              # each case that takes about a second, once

Every measurement is a fresh process: seconds of wall time from start to end, and of CPU time in it
and its children. The last two cases are of one `keel train quickstart`, which is then ended: `first
step` is when the first step begins, by timings.jsonl (no CPU time); `first update` is when that
record is written, after the first optimizer step of the sft stage. Reported are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.runs.reader import load

KEEL = (sys.executable, "-m", "keel")
ROWS: dict[str, tuple[str, ...]] = {
    "help": (*KEEL, "--help"),
    "import": (sys.executable, "-c", "import keel"),
    "explain": (*KEEL, "explain", "grpo"),
    "check": (*KEEL, "check", "tiny"),
    "train": (*KEEL, "train", "tiny", "steps=1", "--quiet", "--run", "run"),
}
QUICKSTART = "quickstart"
SAID = {
    "help": "`keel --help`",
    "import": "`python -c 'import keel'`",
    "explain": "`keel explain grpo`",
    "check": "`keel check tiny`",
    "train": "`keel train tiny steps=1`",
    "first_step": "`keel train quickstart`, to its first step",
    "first_update": "`keel train quickstart`, to its first update done",
}
SMOKE = ("help", "import", "explain")
LIMIT = 600.0
"""Seconds after which a run without a first step is given up."""


@dataclass(frozen=True)
class Took:
    """Seconds; those of the CPU where they are known."""

    wall: float
    cpu: float | None


@contextmanager
def started(command: Sequence[str], threads: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in an empty folder, both gone at the end; its prints are in `log` there."""
    around = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place, open(f"{place}/log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=place, stdout=log, stderr=log, env={**os.environ, **around}
        )
        try:
            yield process, Path(place)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()


def failed(command: Sequence[str], folder: Path) -> SystemExit:
    """What to raise for a process that went wrong: its last words."""
    return SystemExit(f"{' '.join(command)}:\n{(folder / 'log').read_text('utf-8')[-3000:]}")


def whole(command: Sequence[str], threads: int) -> Took:
    """A process, from start to end."""
    start = time.perf_counter()
    with started(command, threads) as (process, folder):
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise failed(command, folder)
    return Took(wall, usage.ru_utime + usage.ru_stime)


def first(recipe: str, threads: int) -> dict[str, Took]:
    """A run until its first step begins, and until its first update is done; it is ended then."""
    command = (*KEEL, "train", recipe, f"threads={threads}", "--quiet", "--run", "run")
    start = time.perf_counter()
    with started(command, threads) as (process, folder):
        file = folder / "run" / "timings.jsonl"
        while not (file.exists() and b"\n" in file.read_bytes()):
            if process.poll() is not None or time.perf_counter() - start > LIMIT:
                raise failed(command, folder)
            time.sleep(0.005)
        wall, cpu = time.perf_counter() - start, used(process.pid)
        step = load(folder / "run").timings()[0]["total"]
    return {"first_step": Took(wall - step, None), "first_update": Took(wall, cpu)}


def used(pid: int) -> float:
    """Seconds of the CPU that a running process has used, in all of its threads (Linux)."""
    # The name, in brackets, may hold anything; 14th and 15th are ticks in and out of the program.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(rows: Sequence[str], threads: int, repeats: int) -> list[dict[str, Any]]:
    """The rows' figures: medians over processes, the rows taking turns."""
    passes: dict[str, list[Took]] = {}
    for _ in range(repeats):
        for name in rows:
            if name == QUICKSTART:
                found = first(QUICKSTART, threads)
            else:
                found = {name: whole(ROWS[name], threads)}
            for key, took in found.items():
                passes.setdefault(key, []).append(took)
    return [summed(name, some) for name, some in passes.items()]


def summed(name: str, passes: Sequence[Took]) -> dict[str, Any]:
    """The medians of a row."""
    cpu = [one.cpu for one in passes if one.cpu is not None]
    return {
        "row": name,
        "what": SAID[name].replace("`", ""),
        "wall": statistics.median(one.wall for one in passes),
        "cpu": statistics.median(cpu) if cpu else None,
        "fastest": min(one.wall for one in passes),
        "passes": [asdict(one) for one in passes],
    }


HEAD = "| what | wall, s | CPU, s | fastest, s |\n|---|---|---|---|"


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    cpu = "" if row["cpu"] is None else f"{row['cpu']:.2f}"
    return f"| {SAID[row['row']]} | {row['wall']:.2f} | {cpu} | {row['fastest']:.2f} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*ROWS, QUICKSTART]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="the quick rows, once")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(words)
    if min(arguments.repeats, arguments.threads) < 1:
        parser.error("--repeats and --threads have to be 1 or more")
    repeats = 1 if arguments.smoke else arguments.repeats
    rows = measure(
        arguments.rows or (SMOKE if arguments.smoke else names), arguments.threads, repeats
    )
    print(
        f"{os.cpu_count()} cores, {arguments.threads} threads, medians of {repeats} processes\n\n"
        + "\n".join([HEAD, *map(line, rows)])
    )
    written = {
        **{f"{row['row']}_seconds": row["wall"] for row in rows},
        "rows": rows,
        "settings": {"threads": arguments.threads, "repeats": repeats, "smoke": arguments.smoke},
        "versions": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
