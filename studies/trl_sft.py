"""TRL's supervised fine-tuning on small data, step by step, for a test of Keel's.

`PYTHON_WITH_TRL -m studies.trl_sft` writes tests/training/trl_sft.json; the test builds model, data
and settings from this module, which needs TRL in `main` alone.
"""

from __future__ import annotations

import json
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TARGET = Path(__file__).parents[1] / "tests" / "training" / "trl_sft.json"
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
BATCH, ROWS, HELD = 4, 16, 6
"""Examples of a step (a packed case: blocks), of the train data and of the validation data."""
RATE = 2e-3
CASES: dict[str, dict[str, Any]] = {
    "messages": {"form": "messages"},
    "messages, assistant": {"form": "messages", "assistant": True},
    "messages, assistant, cut": {"form": "messages", "assistant": True, "longest": 44},
    "messages, assistant, packed": {
        "form": "messages",
        "assistant": True,
        "longest": 120,
        "packed": True,
        "rows": 26,
        "batch": 2,
    },
    "messages, accumulated": {"form": "messages", "assistant": True, "accumulated": 2},
    "prompt and completion of messages": {"form": "turns"},
    "prompt and completion of text": {"form": "completion"},
    "text": {"form": "text"},
    "text, packed": {"form": "text", "longest": 40, "packed": True, "rows": 28, "batch": 2},
    "epochs with a warm-up": {"form": "text", "epochs": 3, "warm_up": 0.3},
}


def build(folder: Path) -> None:
    """Write the model, whose weights are sines, and its tokenizer of characters."""
    letters = sorted(set(map(chr, range(32, 127))) | {"\n"})
    inner = Tokenizer(
        models.WordLevel({one: at for at, one in enumerate([*SPECIAL, *letters])}, SPECIAL[0])
    )
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
    )
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            if parameter.ndim == 2:
                places = torch.arange(parameter.numel(), dtype=torch.float64)
                values = 0.2 * torch.sin(1.7 * places + at) + 0.1 * torch.sin(0.37 * places)
                parameter.copy_(values.reshape(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rows(form: str, count: int, first: int = 0) -> list[dict[str, Any]]:
    """Examples of a form: sums, of different lengths."""
    found = []
    for at in range(first, first + count):
        asked, answer = f"{7 * at % 31}+{at}=", f"{7 * at % 31 + at}" + "!" * (at * at % 7)
        more = [("user", "more"), ("assistant", f"{at} and {at + 1}")] if at % 2 else []
        turns = [("user", asked), ("assistant", answer), *more]
        messages = [{"role": role, "content": text} for role, text in turns]
        found.append(
            {
                "messages": {"messages": messages},
                "turns": {"prompt": messages[:1], "completion": messages[1:2]},
                "completion": {"prompt": asked, "completion": answer},
                "text": {"text": asked + answer},
            }[form]
        )
    return found


def rate(step: int, steps: int, rising: int) -> float:
    """Keel's warm-up with a linear decay to 0, as a share: `keel.learn.optimizer`."""
    warm = min(1.0, (step + 1) / rising) if rising else 1.0
    return warm * (1 - min(max((step - rising) / max(steps - 1 - rising, 1), 0.0), 1.0))


def digest(model: torch.nn.Module) -> dict[str, float]:
    """A weighted sum of each parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().double().flatten()
        found[name] = float((flat * torch.cos(torch.arange(len(flat)))).sum())
    return found


def arguments(case: dict[str, Any], folder: str) -> Any:
    """TRL's settings of a case."""
    import trl

    accumulated = case.get("accumulated", 1)
    return trl.SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=case.get("batch", BATCH) // accumulated,
        gradient_accumulation_steps=accumulated,
        per_device_eval_batch_size=64,
        learning_rate=RATE,
        num_train_epochs=case.get("epochs", 1),
        warmup_steps=case.get("warm_up", 0),
        lr_scheduler_type="linear" if "warm_up" in case else "constant",
        train_sampling_strategy="sequential",
        assistant_only_loss=case.get("assistant", False),
        packing=case.get("packed", False),
        eval_packing=False,
        max_length=case.get("longest", 256),
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )


def with_rates(trainer: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Give a trainer Keel's learning rates; its own, as shares, and the numbers of steps.

    TRL's first step has a rate of 0, Keel's last, so that losses compare at equal rates alone.
    """
    import transformers

    steps = math.ceil(case["epochs"] * len(trainer.get_train_dataloader()))
    rising = trainer.args.get_warmup_steps(steps)
    own: dict[str, Any] = {"steps": steps, "rising": rising}
    for kind in ("linear", "constant_with_warmup"):
        optimizer = torch.optim.SGD([torch.zeros(1)], RATE)
        schedule = transformers.get_scheduler(kind, optimizer, rising, steps)
        own[kind] = [float(schedule.lr_lambdas[0](step)) for step in range(steps)]
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, partial(rate, steps=steps, rising=rising)
    )
    return own


def record(case: dict[str, Any], place: str) -> dict[str, Any]:
    """What TRL does in a case."""
    import trl
    from datasets import Dataset

    losses: list[float] = []

    class Recorded(trl.SFTTrainer):
        def training_step(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().training_step(*arguments, **keywords)
            losses.append(float(loss))
            return loss

    build(Path(place) / "model")
    trainer = Recorded(
        model=f"{place}/model",
        args=arguments(case, place),
        train_dataset=Dataset.from_list(rows(case["form"], case.get("rows", ROWS))),
        eval_dataset=Dataset.from_list(rows(case["form"], HELD, 100)),
    )
    own = with_rates(trainer, case) if "warm_up" in case else {}
    trainer.train()
    found = trainer.evaluate()
    return {
        "loss": torch.tensor(losses).reshape(-1, case.get("accumulated", 1)).sum(1).tolist(),
        "rates": [one["learning_rate"] for one in trainer.state.log_history if "loss" in one],
        "eval_loss": found["eval_loss"],
        "eval_mean_token_accuracy": found["eval_mean_token_accuracy"],
        "weights": digest(trainer.model),
        **({"schedule": own} if own else {}),
    }


def main() -> None:
    """Run every case, and write what TRL did."""
    import transformers
    import trl

    cases = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            cases[name] = record(case, place)
    made_by = f"studies/trl_sft.py with trl {trl.__version__}, "
    text = {"made_by": f"{made_by}transformers {transformers.__version__}", "cases": cases}
    TARGET.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
