"""TRL's losses of a policy on judged answers, for a test of Keel's.

`PYTHON_WITH_TRL -m studies.trl_preferences` writes tests/training/trl_preferences.json: the loss
and the norm of its gradient for two batches of each case, by TRL's own trainers and collators. The
test builds model, rows and settings from this module, which needs TRL in `main` alone. TRL 1.16 has
the NLL of `rpo_alpha` as the loss type `sft`, weighed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from studies import trl_sft

TARGET = Path(__file__).parents[1] / "tests" / "training" / "trl_preferences.json"
BATCH, BATCHES = 5, 2
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss": "sigmoid", "beta": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.3},
    "hinge": {"loss": "hinge", "beta": 0.2},
    "robust": {"loss": "robust", "beta": 0.3, "smoothing": 0.1},
    "length-normalised": {"loss": "sigmoid_norm", "beta": 5.0},
    "sigmoid with NLL": {"loss": "sigmoid", "beta": 0.1, "nll": 0.7},
    "hinge with NLL": {"loss": "hinge", "beta": 0.2, "nll": 0.3},
    "cpo": {"loss": "cpo", "beta": 0.1},
    "cpo, smoothed": {"loss": "cpo", "beta": 0.4, "nll": 0.5, "smoothing": 0.1},
    "simpo": {"loss": "simpo", "beta": 2.0, "margin": 1.0},
    "simpo with NLL": {"loss": "simpo", "beta": 2.5, "margin": 0.5, "nll": 1.0},
    "orpo": {"loss": "orpo", "beta": 0.1},
    "orpo, stronger": {"loss": "orpo", "beta": 2.0},
    "kto": {"loss": "kto", "beta": 0.1},
    "kto, weighed": {
        "loss": "kto",
        "beta": 0.3,
        "desirable_weight": 1.3,
        "undesirable_weight": 0.8,
        "moved": -2.0,
    },
    "kto, above the reference": {"loss": "kto", "beta": 0.1, "moved": -1.0},
}
"""Keys of Keel's stage; `moved` is how far the policy has moved from the reference."""


def move(model: nn.Module, by: float) -> None:
    """Move the weights of a model away from those that it was built with, to a policy's."""
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            change = 0.03 * by * torch.cos(0.9 * places + 2 * at)
            parameter.add_(change.reshape(parameter.shape).to(parameter.dtype))


def rows(labels: bool) -> list[dict[str, Any]]:
    """Pairs, or labelled answers, of ragged lengths."""
    found = []
    for at in range(BATCH * BATCHES):
        asked = [{"role": "user", "content": f"{7 * at % 31}+{at * at}="}]
        texts = [f"{at}" + "!" * (at * at % 7), "no" + "?" * (3 * at % 5)]
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in texts)
        if labels:
            one = {"completion": chosen if at % 3 else rejected, "label": bool(at % 3)}
            found.append({"prompt": asked, **one})
        else:
            found.append({"prompt": asked, "chosen": chosen, "rejected": rejected})
    return found


def trainer_of(case: dict[str, Any], place: str) -> Any:
    """TRL's trainer for a case."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    loss, more = case["loss"], {"beta": case["beta"]}
    kind, settings = {
        "cpo": (CPOTrainer, CPOConfig),
        "simpo": (CPOTrainer, CPOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
    }.get(loss, (trl.DPOTrainer, trl.DPOConfig))
    if kind is CPOTrainer:
        more["loss_type"] = {"cpo": "sigmoid"}.get(loss, loss)
        more["cpo_alpha"] = case.get("nll", float(loss == "cpo"))
        more["simpo_gamma"] = case.get("margin", 0.5)
        more["label_smoothing"] = case.get("smoothing", 0.0)
    elif kind is trl.KTOTrainer:
        more |= {key: case[key] for key in case if key.endswith("_weight")}
    elif kind is trl.DPOTrainer:
        more["label_smoothing"] = case.get("smoothing", 0.0)
        more["loss_type"] = [loss, "sft"] if "nll" in case else [loss]
        more["loss_weights"] = [1.0, case["nll"]] if "nll" in case else None
    model, reference = (
        AutoModelForCausalLM.from_pretrained(f"{place}/model", dtype=torch.float64)
        for _ in range(2)
    )
    move(model, case.get("moved", 1.0))
    arguments = settings(
        output_dir=place,
        per_device_train_batch_size=BATCH,
        max_length=256,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **more,
    )
    return kind(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows(loss == "kto")),
        processing_class=AutoTokenizer.from_pretrained(f"{place}/model"),
        **({} if kind in (CPOTrainer, ORPOTrainer) else {"ref_model": reference}),
    )


def norm(parameters: Sequence[nn.Parameter]) -> float:
    """Of all gradients together."""
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def record(case: dict[str, Any], place: str) -> list[dict[str, float]]:
    """What TRL computes of each batch."""
    trl_sft.build(Path(place) / "model")
    trainer = trainer_of(case, place)
    examples, found = list(trainer.train_dataset), []
    trainer.model.train()
    for start in range(0, len(examples), BATCH):
        trainer.model.zero_grad()
        batch = trainer.data_collator(examples[start : start + BATCH])
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        parameters = list(trainer.model.parameters())
        found.append({"loss": float(loss), "norm": norm(parameters)})
        if case["loss"] == "kto":
            found[-1]["kl"] = trainer._metrics["train"]["kl"][-1]
    return found


def main() -> None:
    """Run every case, and write what TRL computed."""
    import transformers
    import trl

    cases = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            cases[name] = record(case, place)
    made_by = f"studies/trl_preferences.py with trl {trl.__version__}, "
    text = {"made_by": f"{made_by}transformers {transformers.__version__}", "cases": cases}
    TARGET.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
