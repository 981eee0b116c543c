"""The quickstart over seeds: what it lifts validation accuracy by, and how long it takes.

    python studies/quickstart.py                          # GRPO, PPO, GSPO, wrong-sign twin
    python studies/quickstart.py --preset dapo --seeds 0  # any preset on the same task
    python studies/quickstart.py --preset rm-ppo --preset rm-grpo --preset rm-process

Each run is a whole `keel train` in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TWIN = "twin"
LEARNED_REWARD: dict[str, list[str]] = {
    "rm-ppo": ["reward-model-quickstart"],
    "rm-grpo": ["reward-model-quickstart-grpo"],
    "rm-process": ["reward-model-quickstart-process"],
}
CASES: dict[str, list[str]] = {
    "grpo": ["quickstart"],
    "ppo": ["quickstart-ppo"],
    "gspo": ["quickstart-gspo"],
    TWIN: [
        "quickstart",
        "algorithm.advantage.kind=custom",
        "algorithm.advantage.function=studies.twin:turned",
    ],
}


def run_case(name: str, seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One run: accuracy before and after on the validation split, and seconds of wall time."""
    words = {**CASES, **LEARNED_REWARD}.get(name, ["quickstart", f"algorithm.preset={name}"])
    target = folder / f"{name}-{seed}"
    command = [sys.executable, "-m", "keel", "train", *words, f"seed={seed}", *extra]
    start = time.perf_counter()
    subprocess.run(
        [*command, "--run", str(target), "--quiet"],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    seconds = time.perf_counter() - start
    stages = json.loads((target / "run.json").read_text())["evaluation"]
    evaluation = list(stages.values())[-1]
    return {
        "case": name,
        "seed": seed,
        "before": evaluation["before"]["mean"],
        "after": evaluation["after"]["mean"],
        "low": evaluation["after"]["low"],
        "high": evaluation["after"]["high"],
        "n": evaluation["after"]["n"],
        "seconds": round(seconds, 1),
        "run": str(target),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, aligned."""
    lines = [f"{'case':<22}{'seed':>5}{'before':>9}{'after':>9}{'points':>9}{'seconds':>10}"]
    for row in rows:
        points = 100 * (row["after"] - row["before"])
        lines.append(
            f"{row['case']:<22}{row['seed']:>5}{row['before']:>9.3f}{row['after']:>9.3f}"
            f"{points:>+9.1f}{row['seconds']:>10.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", help="a case or preset (default: all cases)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.runs or Path(scratch)
        rows = []
        for name in arguments.preset or list(CASES):
            for seed in arguments.seeds:
                rows.append(run_case(name, seed, folder, arguments.overrides))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
        print(table(rows))
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
