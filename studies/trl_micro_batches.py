"""TRL's GRPO loss and gradient on one batch, cut into 1, 2 and 4 micro-batches.

`PYTHON_WITH_TRL_AND_KEEL -m studies.trl_micro_batches` writes tests/learn/trl_micro_batches.json.
What TRL reads of a batch (the quantile of the entropies, the number of tokens) it reads of each
micro-batch, so its number depends on `per_device_train_batch_size`. The test shows that Keel gives
TRL's number for the whole batch, however the batch is cut.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from studies.trl_sft import build

TARGET = Path(__file__).parents[1] / "tests" / "learn" / "trl_micro_batches.json"
CASES: dict[str, dict[str, Any]] = {
    "mean of each sequence": {"loss_type": "grpo"},
    "mean of all tokens": {"loss_type": "bnpo"},
    "tokens of high entropy": {"loss_type": "grpo", "top_entropy_quantile": 0.3},
    "entropy bonus": {"loss_type": "grpo", "entropy_coef": 0.05},
}
PARTS = (1, 2, 4)
LENGTHS = (3, 9, 5, 12, 4, 7, 11, 2)
ADVANTAGES = (1.2, -0.7, 0.4, -0.9, 1.0, -1.3, 0.8, -0.5)


def rows() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of three tokens, and completions."""
    prompts = [[3 + (7 * at + k) % 90 for k in range(3)] for at in range(len(LENGTHS))]
    answers = [
        [3 + (13 * at + 5 * k * k + k) % 90 for k in range(length)]
        for at, length in enumerate(LENGTHS)
    ]
    return prompts, answers


def padded() -> dict[str, torch.Tensor]:
    """The batch as TRL has it."""
    prompts, answers = rows()
    longest = max(LENGTHS)
    return {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        "completion_ids": torch.tensor([a + [0] * (longest - len(a)) for a in answers]),
        "completion_mask": torch.tensor([[1] * n + [0] * (longest - n) for n in LENGTHS]),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
    }


def measure(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Loss and norm of the gradient for each number of micro-batches."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    config = GRPOConfig(
        output_dir=folder,
        num_generations=2,
        per_device_train_batch_size=len(LENGTHS),
        max_completion_length=max(LENGTHS),
        beta=0.0,
        bf16=False,
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * len(LENGTHS)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.model.train()
    batch, found = padded(), {}
    for parts in PARTS:
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = parts
        total = 0.0
        for at in torch.arange(len(LENGTHS)).chunk(parts):
            loss = trainer._compute_loss(trainer.model, {k: v[at] for k, v in batch.items()})
            loss.backward()
            total += float(loss)
        norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
        found[str(parts)] = {"loss": total, "grad_norm": float(torch.stack(norms).norm())}
    return {"settings": settings, "by_parts": found}


def main() -> None:
    """Record every case."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        found = {name: measure(folder, settings) for name, settings in CASES.items()}
    TARGET.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
