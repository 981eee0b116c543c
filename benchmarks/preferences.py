"""How fast the preference store is: import, leases and labels, selection, export.

    python -m benchmarks.preferences                    # 100,000 pairs; prints a Markdown table
    python -m benchmarks.preferences --smoke            # 200 pairs

Imports rows of prompt/chosen/rejected from JSONL into a new store, exports them, and has two
annotators take turns: `lease_next` and `submit`, timed together, each on the disk when it returns.
A selection round reads the store, learns from the labels of people (or of the judge too), checks
itself, chooses 1,000 pairs by d_optimal and sets their priorities, on random features of a width:
computing the features is not in it.
Processor time is given next to wall time: a busy machine changes it less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.statistics import Array
from keel.data.preferences.schema import Preference
from keel.preferences.pool import SelectionPlan, select_batch
from keel.preferences.store.exports import preference_rows, write_rows
from keel.preferences.store.formats import Attribution
from keel.preferences.store.imports import import_file
from keel.preferences.store.records import LabelRecord, Source
from keel.preferences.store.store import PreferenceStore

WORDS = "the answer is that a model learns from what people prefer and no more"


def write_pairs(path: Path, pairs: int) -> None:
    """TRL rows of about 600 characters, each with a prompt of its own."""
    text = " ".join([WORDS] * 3)
    with path.open("w", encoding="utf-8") as file:
        for number in range(pairs):
            row = {"prompt": f"Question {number}: {text}?", "probability": number % 3 / 2}
            row |= {"chosen": f"{text} {number}, yes", "rejected": f"{text} {pairs - number}, no"}
            file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Took:
    """Seconds of wall time, and of the processor."""

    wall: float
    cpu: float


def timed(function: Callable[[], Any]) -> Took:
    """How long a call takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def annotate(store: PreferenceStore, labels: int, overlap: int) -> list[Took]:
    """How long each lease and its label take, two annotators taking turns."""

    def one(number: int) -> None:
        annotator = f"annotator {number % 2}"
        lease = store.lease_next(annotator, float(number), overlap=overlap)
        assert lease is not None
        store.submit(lease, LabelRecord(lease.pair, 1.0, "human", annotator, seconds=5.0))

    return [timed(lambda number=number: one(number)) for number in range(labels)]  # type: ignore[misc]


def select(store: PreferenceStore, width: int, sources: Sequence[Source], count: int) -> None:
    """A selection round."""

    def features(texts: Iterable[Preference]) -> Array:
        return np.random.default_rng(0).normal(size=(sum(1 for _ in texts), width))

    select_batch(store, SelectionPlan("d_optimal", count, sources=sources), features)


def selection_rows(store: PreferenceStore, pairs: int) -> list[dict[str, Any]]:
    """Selection rounds over widths and labels."""
    count = min(1_000, pairs // 10)
    people: list[Source] = ["human"]
    rounds = {
        "H = 64, labels of people": (64, people),
        "H = 256, labels of people": (256, people),
        "H = 256, labels of all": (256, [*people, "judge"]),
    }
    return [
        summed(f"selection, {what}", [timed(partial(select, store, width, sources, count))])
        for what, (width, sources) in rounds.items()
    ]


def measure(folder: Path, pairs: int, labels: int) -> list[dict[str, Any]]:
    """The figures of each row, in seconds."""
    rows = folder / "rows.jsonl"
    write_pairs(rows, pairs)
    # Labels of a judge leave every pair to people.
    by = Attribution("judge", "model")
    with PreferenceStore(folder / "store.db", create=True) as store:

        def add() -> None:
            import_file(store, "trl", rows, by)

        def export(ending: str) -> None:
            write_rows(folder / f"out.{ending}", preference_rows(store))

        return [
            summed(f"import of {pairs:,} rows", [timed(add)]),
            summed("lease and label, overlap 1", annotate(store, labels, 1)),
            summed("lease and label, overlap 2", annotate(store, labels, 2)),
            *selection_rows(store, pairs),
            summed("export as JSONL", [timed(lambda: export("jsonl"))]),
            summed("export as Parquet", [timed(lambda: export("parquet"))]),
            summed("the same import again", [timed(add)]),
        ]


def summed(row: str, passes: Sequence[Took]) -> dict[str, Any]:
    """A row of the table; it is printed at once."""
    wall, cpu = [one.wall for one in passes], [one.cpu for one in passes]
    found = {
        "row": row,
        "median": statistics.median(wall),
        "p99": float(np.quantile(wall, 0.99)),
        "worst": max(wall),
        "cpu": statistics.median(cpu),
    }
    figures = " | ".join(f"{found[name]:.4f}" for name in ("median", "p99", "worst", "cpu"))
    print(f"| {row} | {figures} |", flush=True)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--labels", type=int, default=2_000, help="of each overlap")
    parser.add_argument("--folder", type=Path, help="where the store lies (default: temporary)")
    parser.add_argument("--smoke", action="store_true", help="200 pairs, 20 labels")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.pairs, arguments.labels = 200, 20
    print(
        "| what | median, s | p99, s | worst, s | CPU, median, s |\n|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = measure(Path(folder), arguments.pairs, arguments.labels)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
