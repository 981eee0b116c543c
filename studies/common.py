"""What the studies share: commands of Keel, tables as Markdown, figures, files of rows."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv

from keel.analysis.statistics import Array, Interval

ROOT = Path(__file__).resolve().parent.parent


def keel(*words: object) -> None:
    """Run a command of Keel from the root of the repository, so that it finds `studies`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    subprocess.run(
        [sys.executable, "-m", "keel", *map(str, words)], check=True, cwd=ROOT, env=environment
    )


def line(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def heading(*cells: str) -> str:
    """The first two lines of a Markdown table."""
    return f"{line(cells)}\n{line(['---'] * len(cells))}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join([heading(*head), *map(line, rows)])


def shown(one: Interval, scale: float = 1, sign: str = "", digits: int = 1) -> str:
    """A figure with its interval."""
    low, high = (f"{scale * end:.{digits}f}" for end in (one.low, one.high))
    return f"{scale * one.mean:{sign}.{digits}f} [{low}, {high}]"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, numbers as numbers; None for an empty cell."""
    rows: list[dict[str, Any]] = pyarrow.csv.read_csv(path).to_pylist()
    return rows


def courses(path: Path, *columns: str, **only: str) -> dict[str, list[Array]]:
    """By arm, and then for each seed (one if the file names none), an array (columns, rows) of the
    rows with these values."""
    found: dict[str, dict[int | None, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for row in read_csv(path):
        if all(row[key] == value for key, value in only.items()):
            found[row["arm"]][row.get("seed")].append([row[column] for column in columns])
    return {
        arm: [np.array(rows, dtype=np.float64).T for rows in seeds.values()]
        for arm, seeds in found.items()
    }


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
