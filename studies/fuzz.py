"""Bad input: recipes, rows of tasks and preferences, Parquet, tokenizers, command lines.

    python -m studies.fuzz --inputs 10000 --seed 0        # prints a Markdown table
    python -m studies.fuzz --inputs 500 --kinds preferences parquet

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
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, Phase, given, seed, settings

from studies.common import line
from tests.fuzz.kinds import KINDS, Kind

BATCH = 250
"""Inputs between two looks at whether there was a fault, after which drawing goes on."""
KEYS = ["inputs", "ok", "refused", "quarantined", "rows", "used", "left out", "faults", "CPU s"]


def main(words: Sequence[str] | None = None) -> int:
    """0 where there was no fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    chosen = parser.parse_args(words)
    kinds = {name: KINDS[name] for name in chosen.kinds}
    total = sum(kind.share for kind in kinds.values())
    print(line(("kind", *KEYS)), f"|---|{'---:|' * len(KEYS)}", sep="\n", flush=True)
    tally: Counter[str] = Counter()
    faults: list[str] = []
    for name, kind in kinds.items():
        wanted = max(1, round(chosen.inputs * kind.share / total))
        count, found = fuzz(kind, wanted, chosen.seed)
        print(line((name, *(count[key] for key in KEYS))), flush=True)
        tally += count
        faults += [f"## {name}\n\n{fault}" for fault in found]
    print(line(("all", *(tally[key] for key in KEYS))))
    print("\n\n".join(["", *faults]) if faults else "\nno fault")
    return int(bool(faults))


def fuzz(kind: Kind, inputs: int, start: int) -> tuple[Counter[str], list[str]]:
    """So many inputs of a kind, in batches that each shrink at most one fault: what became of
    them, and the faults."""
    count: Counter[str] = Counter()
    faults: list[str] = []
    began = time.process_time()
    batch = 0
    while count["inputs"] < inputs:
        size = min(BATCH, inputs - count["inputs"])
        faults += _batch(kind, size, start * 1_000_003 + batch, count)
        batch += 1
    count["CPU s"] = round(time.process_time() - began)
    return count, faults


def _batch(kind: Kind, inputs: int, start: int, count: Counter[str]) -> Iterator[str]:
    """Tries the inputs, counts what became of them; the fault, if there is one."""
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
                count["inputs"] += not failing  # shrinking tries it again and again
                failing.append(value)
                raise
        if not failing:
            rows = {"rows": outcome.rows, "used": outcome.used, "left out": outcome.left_out}
            count.update({"inputs": 1, outcome.how: 1, **rows})

    before = count["inputs"]
    warnings.filterwarnings("ignore", "Generating overly large repr")
    try:
        one()
    except Exception:
        count["faults"] += 1
        shown = repr(failing[-1])
        message = traceback.format_exc().strip().splitlines()[-25:]
        yield "\n".join([shown[:2_000], "", *(row[:300] for row in message)])
    if count["inputs"] == before:  # there are no other inputs of this kind
        count["inputs"] += inputs


if __name__ == "__main__":
    sys.exit(main())
