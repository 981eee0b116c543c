"""TRL's side of `loop.py`, in an environment with TRL: some GRPO steps, timed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.sides import answer, resident, vowels


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Tokens, seconds (also of the CPU, and in `generate`) of each step; the most memory."""
    import torch
    from datasets import Dataset  # type: ignore[import-untyped,unused-ignore]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(job["threads"])
    imported = resident(peak=False)
    clock, cpu, tokens, generating = [0.0], [0.0], [0], [0.0]

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
    plain = trainer.model.generate

    def generate(*values: Any, **named: Any) -> Any:
        start = time.perf_counter()
        out = plain(*values, **named)
        generating[-1] += time.perf_counter() - start
        return out

    trainer.model.generate = generate
    clock[0], cpu[0] = time.perf_counter(), time.process_time()
    trainer.train()
    return {
        "tokens": tokens[:-1],
        "seconds": [after - before for before, after in pairwise(clock)],
        "cpu": [after - before for before, after in pairwise(cpu)],
        "phases": [{"generate": seconds} for seconds in generating[:-1]],
        "imported": imported,
        "peak": resident(peak=True),
    }


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """Of the trainer. What is not named is TRL's default: β 0, ε 0.2, one epoch a batch."""
    return {
        "output_dir": job["folder"],
        "seed": job["seed"],
        "use_cpu": job.get("device", "cpu") == "cpu",
        "bf16": job["bf16"],
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["micro"],
        "gradient_accumulation_steps": job["completions"] // job["micro"],
        "num_generations": job["group"],
        "max_completion_length": job["max_tokens"],
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


if __name__ == "__main__":
    answer(train)
