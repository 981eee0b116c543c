"""Sampling ahead (`rollout.async_level`) against sampling in turn, where generation is slow.

    python -m studies.ray_async --seeds 0,1,2,3,4

Each run is the quickstart's supervised stage and then GRPO by Ray: one trainer, and two rollout
workers whose engine sleeps a millisecond for each token (`slow_engine`). Level 0 and `--level`
take the same steps on the same prompts, with the same truncated importance sampling; with
`--ahead-steps` the level takes more of them, to see what it reaches in the time of level 0 (the
learning rate falls to the same value over all steps). It prints the seconds of the steps of the
stage rl, of which starting Ray is no part, and greedy validation accuracy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.statistics import bootstrap_interval
from tests.cluster.ray_runs import finished, keel, metrics

KEYS = (
    "threads=1",
    "cluster.ray=local",
    "cluster.rollout_workers=2",
    "rl.rollout.engine=studies.slow_engine:slow",
    "rl.algorithm.correction.kind=truncate",
    "rl.checkpoints.every=1000",
    "rl.evaluation.every=0",
)


def run(seed: int, level: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run: accuracy before and after, seconds of its steps, and the largest staleness."""
    keys = (*KEYS, f"seed={seed}", f"rl.rollout.async_level={level}", f"rl.steps={steps}")
    finished(keel("train", "quickstart", *keys, "--run", folder, "--quiet"), 3600)
    lines = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    seconds = [row["total"] for row in lines if row["stage"] == "rl"]
    results = json.loads((folder / "run.json").read_text())["evaluation"]["rl"]
    rows = [row for row in metrics(folder) if row["stage"] == "rl"]
    return {
        "seed": seed,
        "level": level,
        "steps": steps,
        "before": results["before"]["mean"],
        "after": results["after"]["mean"],
        "seconds": sum(seconds),
        "staleness": max(row.get("rollout/staleness/max", 0) for row in rows),
        "reward": float(np.mean([row["reward"] for row in rows[-10:]])),
    }


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ahead-steps", type=int, help="steps of the level (--steps)")
    arguments = parser.parse_args()
    runs = ((0, arguments.steps), (arguments.level, arguments.ahead_steps or arguments.steps))
    pairs: list[Sequence[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in map(int, arguments.seeds.split(",")):
            both = [
                run(seed, level, steps, Path(place) / f"{seed}-{level}") for level, steps in runs
            ]
            pairs.append(both)
            for one in both:
                print(json.dumps(one), flush=True)
    ratio = bootstrap_interval([one["seconds"] / ahead["seconds"] for one, ahead in pairs])
    gain = bootstrap_interval([ahead["after"] - one["after"] for one, ahead in pairs])
    print(f"seconds in turn / ahead: {ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")
    points = [100 * x for x in (gain.mean, gain.low, gain.high)]
    print("accuracy ahead − in turn: {:+.1f} [{:+.1f}, {:+.1f}] points".format(*points))


if __name__ == "__main__":
    main()
