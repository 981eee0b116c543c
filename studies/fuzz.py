"""Bad input: recipes, rows of tasks and preferences, Parquet, tokenizers, command lines.

    python studies/fuzz.py --inputs 10000 --seed 0        # prints a Markdown table
    python studies/fuzz.py --inputs 500 --kinds preferences parquet

Each input ends well, or with exit code 2 and one line, or with rows in the quarantine; a Python
exception, a line too many, a file left behind or a row that is neither used nor left out with a
reason is a fault, and the smallest input that shows it is printed. The command ends with 1 then.
Inputs are drawn by hypothesis and a function of the seed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.kinds import KINDS, Kind

BATCH = 250
"""Inputs between two looks at whether there was a fault, after which drawing goes on."""


def main(words: Sequence[str] | None = None) -> int:
    """0 where there was no fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    chosen = parser.parse_args(words)
    kinds = {name: KINDS[name] for name in chosen.kinds}
    total = sum(kind.share for kind in kinds.values())
    print(
        "| kind | inputs | ok | refused | quarantined | rows | used | left out | faults | CPU s |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    tally: Counter[str] = Counter()
    faults: list[str] = []
    for name, kind in kinds.items():
        wanted = max(1, round(chosen.inputs * kind.share / total))
        found = fuzz(kind, wanted, chosen.seed)
        print(_row(name, found.count), flush=True)
        tally += found.count
        faults += [f"## {name}\n\n{fault}" for fault in found.faults]
    print(_row("all", tally))
    print("\n\n".join(["", *faults]) if faults else "\nno fault")
    return int(bool(faults))


class Found:
    """What came of the inputs of a kind."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.faults: list[str] = []


def fuzz(kind: Kind, inputs: int, start: int) -> Found:
    """So many inputs of a kind, in batches that each shrink at most one fault."""
    found = Found()
    began = time.process_time()
    batch = 0
    while found.count["inputs"] < inputs:
        room = min(BATCH, inputs - found.count["inputs"])
        _batch(kind, room, start * 1_000_003 + batch, found)
        batch += 1
    found.count["seconds"] = round(time.process_time() - began)
    return found


def _batch(kind: Kind, inputs: int, start: int, found: Found) -> None:
    failing: list[object] = []

    @seed(start)
    @settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.inputs)
    def one(value: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = kind.hold(value, Path(folder))
            except Exception:
                if not failing:  # shrinking tries it again and again
                    found.count["inputs"] += 1
                failing.append(value)
                raise
        if not failing:
            found.count.update(
                {
                    "inputs": 1,
                    outcome.how: 1,
                    "rows": outcome.rows,
                    "used": outcome.used,
                    "left_out": outcome.left_out,
                }
            )

    before = found.count["inputs"]
    warnings.filterwarnings("ignore", "Generating overly large repr")
    try:
        one()
    except Exception:
        found.count["faults"] += 1
        shown = repr(failing[-1])
        message = traceback.format_exc().strip().splitlines()[-25:]
        found.faults.append("\n".join([shown[:2_000], "", *(line[:300] for line in message)]))
    if found.count["inputs"] == before:  # there are no other inputs of this kind
        found.count["inputs"] += inputs


def _row(name: str, count: Counter[str]) -> str:
    keys = ("inputs", "ok", "refused", "quarantined", "rows", "used", "left_out", "faults")
    return f"| {name} | " + " | ".join(str(count[key]) for key in (*keys, "seconds")) + " |"


if __name__ == "__main__":
    sys.exit(main())
