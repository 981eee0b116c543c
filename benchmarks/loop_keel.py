"""Keel's side of `loop.py`: some GRPO steps, timed."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.sides import answer, resident


def recipe(job: dict[str, Any]) -> dict[str, Any]:
    """As data; what it does not name is Keel's default."""
    stage = {
        "stage": "rl",
        "steps": job["steps"],
        "algorithm": {"preset": "grpo", "divergence": "none"},
        "tasks": [{"name": "jsonl", "path": job["prompts"], "validation_path": job["validation"]}],
        "rewards": {"functions": [{"function": "benchmarks.sides:vowels"}]},
        "rollout": {
            "prompts_per_step": job["completions"] // job["group"],
            "group_size": job["group"],
            "max_tokens": job["max_tokens"],
        },
        "optimizer": {"learning_rate": job["learning_rate"]},
        "evaluation": {"prompts": 0},
        "checkpoints": {"every": 10**6},
        "rollouts_every": 0,
    }
    model = {"name": job["model"], "device": "cpu"}
    return {"seed": job["seed"], "threads": job["threads"], "model": model, "stages": [stage]}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Tokens, seconds (also of the CPU, and of each phase) of each step; the most memory."""
    from keel.platform.signals import sleep_soon

    sleep_soon()  # as `keel train`
    import torch

    from keel.config.load import load_recipe
    from keel.runs.callbacks import Callback
    from keel.runs.reader import load
    from keel.training.run import train as run

    clock, cpu = [0.0], [0.0]

    class Steps(Callback):
        """Notes when each step ends."""

        def on_step(self, *_: Any) -> None:
            clock.append(time.perf_counter())
            cpu.append(time.process_time())

    torch.set_num_threads(job["threads"])
    read = load_recipe(recipe(job), job["keel"])
    imported = resident(peak=False)
    clock[0], cpu[0] = time.perf_counter(), time.process_time()
    done = load(run(read, Path(job["folder"]), callbacks=[Steps()]).path)
    phases = ("rollout", "score", "update", "sync", "record")
    return {
        "tokens": [row["rollout/tokens"] for row in done.metrics()],
        "seconds": [after - before for before, after in pairwise(clock)],
        "cpu": [after - before for before, after in pairwise(cpu)],
        "phases": [{key: row.get(key, 0.0) for key in phases} for row in done.timings()],
        "imported": imported,
        "peak": resident(peak=True),
    }


if __name__ == "__main__":
    answer(train)
