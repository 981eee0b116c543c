"""TRL's side of `loop.py`, which starts it: some GRPO steps, timed, by an environment with TRL.

    python benchmarks/loop_trl.py JOB.json RESULT.json

Imports nothing of Keel. What both sides need alike stands here too: the reward and the memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

LETTERS = frozenset("aeiou")


def vowels(*, completions: Sequence[str], **columns: Any) -> list[float]:
    """The share of vowels in a text: cheap, and never the same for all of a group."""
    return [sum(map(LETTERS.__contains__, text)) / max(len(text), 1) for text in completions]


def resident(peak: bool) -> int:
    """Bytes of resident memory of this process: now, or the most it ever was (Linux)."""
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status: this benchmark needs Linux")


def differences(times: Sequence[float]) -> list[float]:
    """Of each and the one before."""
    return [after - before for before, after in pairwise(times)]


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Tokens, seconds (also of the CPU, and in `generate`) of each step; the most memory."""
    import torch
    from datasets import Dataset  # type: ignore[import-untyped,unused-ignore]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(job["threads"])
    imported = resident(peak=False)
    clock, cpu = [0.0], [0.0]
    tokens = [0]
    generating = [0.0]

    class Steps(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Notes when each step ends, and begins the next one's counts."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.append(time.perf_counter())
            cpu.append(time.process_time())
            tokens.append(0)
            generating.append(0.0)

    def reward(*, completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float]:
        tokens[-1] += sum(map(len, completion_ids))
        return vowels(completions=completions)

    rows = [json.loads(line) for line in Path(job["prompts"]).read_text("utf-8").splitlines()]
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=GRPOConfig(**settings(job)),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Steps()],
    )
    name = "generate_batch" if job["continuous"] else "generate"
    setattr(trainer.model, name, timed(getattr(trainer.model, name), generating))
    clock[0], cpu[0] = time.perf_counter(), time.process_time()
    trainer.train()
    return {
        "tokens": tokens[:-1],
        "seconds": differences(clock),
        "cpu": differences(cpu),
        "phases": [{"generate": seconds} for seconds in generating[:-1]],
        "imported": imported,
        "peak": resident(peak=True),
    }


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """Of the trainer. What is not named is TRL's default: β 0, ε 0.2, one epoch a batch."""
    parts = job["completions"] // job["micro"]
    return {
        "output_dir": job["folder"],
        "seed": job["seed"],
        "use_cpu": True,
        "bf16": job["bf16"],
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["micro"],
        "gradient_accumulation_steps": parts,
        "num_generations": job["group"],
        "max_completion_length": job["max_tokens"],
        "use_transformers_continuous_batching": job["continuous"],
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function; what each call takes is added to the last of `seconds`."""

    def call(*values: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*values, **named)
        finally:
            seconds[-1] += time.perf_counter() - start

    return call


if __name__ == "__main__":
    result = train(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), "utf-8")
