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


HEAD = f"{'case':<22}{'seed':>5}{'before':>9}{'after':>9}{'points':>9}{'seconds':>10}"


def run_case(name: str, seed: int, folder: Path, extra: list[str]) -> str:
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
    *_, evaluation = json.loads((target / "run.json").read_text())["evaluation"].values()
    before, after = evaluation["before"]["mean"], evaluation["after"]["mean"]
    points = 100 * (after - before)
    return f"{name:<22}{seed:>5}{before:>9.3f}{after:>9.3f}{points:>+9.1f}{seconds:>10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", help="a case or preset (default: all cases)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.runs or Path(scratch)
        print(HEAD)
        for name in arguments.preset or list(CASES):
            for seed in arguments.seeds:
                print(run_case(name, seed, folder, arguments.overrides), flush=True)


if __name__ == "__main__":
    main()
