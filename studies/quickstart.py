"""The quickstart over seeds: what it lifts validation accuracy by, and how long it takes.

    python -m studies.quickstart                          # GRPO, PPO, GSPO, wrong-sign twin
    python -m studies.quickstart --preset dapo --seeds 0  # any preset on the same task
    python -m studies.quickstart --preset rm-ppo --preset rm-grpo --preset rm-process

Each run is a whole `keel train` in its own process, one after the other.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from torch import Tensor

from keel.objective.group import group_relative
from studies.common import keel

CASES: dict[str, list[str]] = {
    "grpo": ["quickstart"],
    "ppo": ["quickstart-ppo"],
    "gspo": ["quickstart-gspo"],
    "twin": [
        "quickstart",
        "algorithm.advantage.kind=custom",
        "algorithm.advantage.function=studies.quickstart:turned",
    ],
}
LEARNED_REWARD: dict[str, list[str]] = {
    "rm-ppo": ["reward-model-quickstart"],
    "rm-grpo": ["reward-model-quickstart-grpo"],
    "rm-process": ["reward-model-quickstart-process"],
}


def turned(reward_S: Tensor, groups_S: Tensor) -> Tensor:
    """The twin that must not learn: −A of GRPO, A_i = (R_i − mean) / (std + ε)."""
    return -group_relative(reward_S, groups_S, scale="std", epsilon=1e-4)


def run_case(name: str, seed: int, target: Path, extra: list[str]) -> str:
    """One run: accuracy before and after on the validation split, and seconds of wall time."""
    words = {**CASES, **LEARNED_REWARD}.get(name, ["quickstart", f"algorithm.preset={name}"])
    start = time.perf_counter()
    keel("train", *words, f"seed={seed}", *extra, "--run", target, "--quiet")
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
    print(f"{'case':<22}{'seed':>5}{'before':>9}{'after':>9}{'points':>9}{'seconds':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.runs or Path(scratch)).absolute()
        for name in arguments.preset or list(CASES):
            for seed in arguments.seeds:
                target = folder / f"{name}-{seed}"
                print(run_case(name, seed, target, arguments.overrides), flush=True)


if __name__ == "__main__":
    main()
