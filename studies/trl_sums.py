"""TRL's GRPO on the model, task and settings of the recipe smollm2-grpo, for some minutes.

    make real-model
    PYTHON_WITH_TRL_AND_KEEL -m studies.trl_sums --minutes 15 --threads 2

Prints a line of JSON for each step: seconds since the start, mean reward, tokens sampled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from keel.config.load import load_recipe
from keel.data.splits import split_of
from keel.data.sums import sums
from keel.rewards.rules import numeric_match
from studies.common import ROOT


def train(minutes: float, micro: int, steps: int) -> None:
    """Train until the minutes are over."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    stage: Any = load_recipe("smollm2-grpo").stages[0]
    start = time.perf_counter()
    sampled: list[tuple[float, int]] = []

    def reward(*, completions: Any, completion_ids: Sequence[Any], **keys: Any) -> list[Any]:
        scores = numeric_match(completions=completions, answer=keys["answer"])
        sampled.extend(zip(scores, map(len, completion_ids), strict=True))  # type: ignore[arg-type]
        return scores

    class Report(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Prints a step, and ends in time."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rewards, tokens = zip(*sampled, strict=True)
            seconds = time.perf_counter() - start
            mean = sum(rewards) / len(rewards)
            row = {"step": state.global_step, "seconds": seconds, "reward": mean}
            print(json.dumps({**row, "tokens": sum(tokens)}), flush=True)
            sampled.clear()
            control.should_training_stop = seconds > 60 * minutes

    rollout, rate = stage.rollout, stage.optimizer.learning_rate
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in sums()
        if split_of(row["prompt"]) == "train"
    ]
    completions = rollout.prompts_per_step * rollout.group_size
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=completions // micro,
            num_generations=rollout.group_size,
            max_completion_length=rollout.max_tokens,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            scale_rewards="group",
            learning_rate=rate,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=str(ROOT / ".models" / "smollm2-135m-instruct"),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Report()],
        ).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro", type=int, default=64, help="completions in a micro-batch")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train(given.minutes, given.micro, given.steps)
