"""Part a of `gpu.py`: tests/gpu, counted as they end. It imports nothing before pytest does."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Counts:
    """Writes the counts of each file and of all, and the last line of each failure, after each
    test: what a cut leaves out can be seen."""

    def __init__(self, rows: Path, dry: bool) -> None:
        self.rows, self.dry = rows, dry
        self.files: dict[str, Counter[str]] = {}
        self.faults = 0

    def row(self, what: str, **figures: Any) -> None:
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **figures}) + "\n")

    def counted(self) -> None:
        whole = sum(self.files.values(), Counter[str]())
        met = not self.faults and (self.dry or whole["passed"] > 0)
        self.row("tests/gpu", measured=words(whole), asked="none failed", met=met)

    def fault(self, report: Any) -> None:
        self.faults += 1
        last = (report.longreprtext.strip().splitlines() or [""])[-1]
        print(report.longreprtext[-4000:], flush=True)
        self.row(f"failed: {report.nodeid}", note=last[:200], failed=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            file = report.nodeid.partition("::")[0]
            counts = self.files.setdefault(file, Counter())
            counts[report.outcome] += 1
            if report.failed:
                self.fault(report)
            self.row(file, measured=words(counts))
            self.counted()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.fault(report)


def words(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))


def main() -> None:
    _, given, rows = sys.argv[1:]
    counts = Counts(Path(rows), json.loads(Path(given).read_text("utf-8"))["dry"])
    try:
        import pytest
    except ImportError as error:
        return counts.row("tests/gpu", note=f"skipped: {error}; see --wheels")
    options = ["-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", "tests/gpu"]
    if find_spec("xdist") is not None:
        options += ["-n", str(min(8, os.cpu_count() or 1))]
    status = pytest.main(options, plugins=[counts])
    counts.counted()
    if status not in (0, 1):  # what the tests import may be missing: the log's last line says so
        raise SystemExit(f"pytest ended with {status!r}")
    return None


if __name__ == "__main__":
    main()
