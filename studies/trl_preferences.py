"""TRL's own losses of comparisons, written down for the tests to be held against.

    pip install trl==1.16.0
    python studies/trl_preferences.py    # writes tests/objective/trl_preferences.json

Runs `RewardTrainer.compute_loss` and `DPOTrainer.compute_loss` on batches that TRL's own collators
pad, with tiny models of random weights, and writes what went into the loss (scores, or summed
log-probabilities and lengths), the settings, the loss, and its gradient with regard to what went
in. The models' outputs are handed on as float64, so that TRL's arithmetic after them rounds at
1e-16 (its language head works in float32 whatever the model's type).

TRL 1.16 knows label smoothing only in the losses robust, exo_pair and aot. For a batch of ONE
comparison aot sorts nothing, and is the conservative loss −(1 − ε) log σ(βh) − ε log σ(−βh) as it
stands: hence the batches of one.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from keel.config.model import BuildModel
from keel.models.build import build_config, build_model, build_tokenizer

TARGET = Path(__file__).resolve().parent.parent / "tests" / "objective" / "trl_preferences.json"
VERSION = "1.16.0"
BUILD = BuildModel(family="qwen2", hidden_size=32, layers=2, heads=4, context=64)
PROMPTS = ("2+2=", "say a word: ", "?", "the long way home is ")
CHOSEN = ("4", "moon", "yes and no", "short")
REJECTED = ("five", "x", "no", "the very long way home, once more")
MARGINS = (0.5, 0.0, 2.25, 1.0)
REWARD_CASES: tuple[dict[str, Any], ...] = (
    {"margin": False, "centering": None},
    {"margin": True, "centering": None},
    {"margin": False, "centering": 0.01},
    {"margin": True, "centering": 0.3},
)
DPO_CASES: tuple[dict[str, Any], ...] = (
    {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0},
    {"loss_type": "sigmoid", "beta": 1.5, "label_smoothing": 0.0},
    {"loss_type": "ipo", "beta": 0.1, "label_smoothing": 0.0},
    {"loss_type": "ipo", "beta": 0.7, "label_smoothing": 0.0},
    {"loss_type": "aot", "beta": 0.3, "label_smoothing": 0.1},
    {"loss_type": "aot", "beta": 0.1, "label_smoothing": 0.4},
)


def main() -> None:
    """Run every case and write the file."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    if trl.__version__ != VERSION:
        raise SystemExit(f"trl {trl.__version__} is installed: pip install trl=={VERSION}")
    tokenizer = build_tokenizer(BUILD)
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "made_by": f"studies/trl_preferences.py with trl {VERSION}",
            "reward": [reward_case(case, rows, tokenizer, folder) for case in REWARD_CASES],
            "dpo": [
                dpo_case(case, part, tokenizer, folder)
                for case in DPO_CASES
                # A batch of one for aot, which else would sort.
                for part in ([[row] for row in rows] if case["loss_type"] == "aot" else [rows])
            ],
        }
    text = json.dumps(found).replace("}, {", "},\n{")  # a case a line
    TARGET.write_text(f"{text}\n", encoding="utf-8")
    print(f"{TARGET}: {len(found['reward'])} and {len(found['dpo'])} cases")


def reward_case(
    case: dict[str, Any], rows: list[dict[str, Any]], tokenizer: Any, folder: str
) -> dict[str, Any]:
    """`RewardTrainer.compute_loss` of the comparisons."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    if case["margin"]:
        rows = [{**row, "margin": margin} for row, margin in zip(rows, MARGINS, strict=True)]
    config = build_config(BUILD)
    config.num_labels = 1
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64)
    spread(model, 5)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            folder, center_rewards_coefficient=case["centering"], **plain(RewardConfig)
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    outputs = caught(trainer.model, "logits")
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    scores, gradient = outputs[0][:, 0], outputs[0].grad[:, 0]
    half = len(rows)
    return {
        **case,
        "margins": batch["margin"].double().tolist() if case["margin"] else [0.0] * half,
        "chosen": scores[:half].tolist(),
        "rejected": scores[half:].tolist(),
        "loss": loss.item(),
        "chosen_gradient": gradient[:half].tolist(),
        "rejected_gradient": gradient[half:].tolist(),
    }


def dpo_case(
    case: dict[str, Any], rows: list[dict[str, Any]], tokenizer: Any, folder: str
) -> dict[str, Any]:
    """`DPOTrainer.compute_loss` of the comparisons, against a reference of other weights."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    models = [spread(build_model(BUILD, seed, torch.float32), seed) for seed in (1, 2)]
    trainer = DPOTrainer(
        model=models[0],
        ref_model=models[1],
        args=DPOConfig(
            folder,
            loss_type=[case["loss_type"]],
            beta=case["beta"],
            label_smoothing=case["label_smoothing"],
            **plain(DPOConfig),
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    own = caught(trainer.model, "log_probs")
    others = caught(trainer.ref_model, "log_probs")
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    written = batch["completion_mask"][:, 1:].bool()
    half = len(rows)
    sums = (own[0].detach()[:, -written.shape[1] :] * written).sum(1)
    other_sums = (others[0].detach()[:, -written.shape[1] :] * written).sum(1)
    gradient = one_each(own[0].grad[:, -written.shape[1] :], written)
    return {
        **case,
        "chosen": sums[:half].tolist(),
        "rejected": sums[half:].tolist(),
        "reference_chosen": other_sums[:half].tolist(),
        "reference_rejected": other_sums[half:].tolist(),
        "chosen_lengths": written.sum(1)[:half].tolist(),
        "rejected_lengths": written.sum(1)[half:].tolist(),
        "loss": loss.item(),
        "chosen_gradient": gradient[:half].tolist(),
        "rejected_gradient": gradient[half:].tolist(),
    }


def plain(kind: Any) -> dict[str, Any]:
    """Settings that a tiny CPU run needs, whatever the loss; nothing is truncated."""
    return {
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "max_length": None,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def caught(model: nn.Module, name: str) -> list[Tensor]:
    """Collects one output of each forward pass, which goes on as a float64 leaf with a gradient."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        seen.append(output[name].detach().double().requires_grad_())
        output[name] = seen[-1]
        return output

    model.register_forward_hook(hook)
    return seen


def one_each(gradient_BT: Tensor, written_BT: Tensor) -> Tensor:
    """The gradient of a sum's terms, which is that of the sum: the same at every written token."""
    values = []
    for row, mask in zip(gradient_BT, written_BT, strict=True):
        assert bool((row[mask] == row[mask][0]).all())
        values.append(row[mask][0])
    return torch.stack(values)


def spread(model: Any, seed: int) -> Any:
    """Enlarge the weights, so that scores and log-probabilities are far apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.15)
    return model


if __name__ == "__main__":
    main()
