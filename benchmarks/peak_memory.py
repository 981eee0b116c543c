"""Peak memory and time: what `keel check` predicts against what the run takes.

Each recipe is checked in one fresh process and run in another. Seconds are those of the wall clock,
so that they agree only where nothing else runs. "Peak" is the most resident memory of the process
that trains (VmHWM, Linux, CPU).

    python benchmarks/peak_memory.py [NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("ppo", "grpo", "grpo-lora", "sft", "dpo", "reward-model",
         "grpo-checkpointing", "ppo-head", "rloo-lora-bf16", "dpo-softcap")  # fmt: skip
MIB = 2**20


def model(family: str, layers: int, **keys: Any) -> dict[str, Any]:
    """At least 100 M parameters, made on the spot."""
    build = {
        "family": family,
        "tokenizer": "bytes",
        "hidden_size": 768,
        "layers": layers,
        "heads": 12,
        "context": 320,
    }
    return {"build": build, **keys}


def rl(folder: Path, algorithm: str, *, learned: bool, **stage: Any) -> dict[str, Any]:
    """A stage that samples 2 steps; `learned`: judged by the reward model in the folder."""
    reward = {"function": "outcome", "options": {"model": str(folder / "reward")}}
    varied = {"function": "benchmarks.peak_memory:length"}
    return {
        "stage": "rl",
        "algorithm": algorithm,
        "steps": 2,
        "tasks": [task(folder)],
        "rewards": {"functions": [reward if learned else varied]},
        "evaluation": {"prompts": 4},
        **stage,
    }


def task(folder: Path) -> dict[str, Any]:
    return {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "answer": "answer"}


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """By name, as the recipe's data; files lie in the folder."""
    pairs = {"name": "jsonl", "path": str(folder / "pairs.jsonl")}
    stages: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "ppo": (
            model("qwen2", 15),
            rl(
                folder,
                "ppo",
                learned=True,
                rollout={"prompts_per_step": 12, "group_size": 1, "max_tokens": 72},
                token_budget=600,
                epochs=1,
                minibatches=2,
            ),
        ),
        "grpo": (
            model("llama", 15),
            rl(
                folder,
                "grpo",
                learned=True,
                rollout={"prompts_per_step": 3, "group_size": 4, "max_tokens": 64},
                token_budget=1024,
                epochs=1,
            ),
        ),
        "grpo-lora": (
            model("gpt2", 15, lora={"rank": 16}),
            rl(
                folder,
                "grpo",
                learned=False,
                # More than a pass takes, so that one is full whatever lengths are drawn.
                rollout={"prompts_per_step": 1, "group_size": 16, "max_tokens": 96},
                token_budget=1024,
                epochs=1,
                checkpoints={"every": 1},
            ),
        ),
        "sft": (
            model("llama", 15, dtype="bfloat16"),
            {
                "stage": "sft",
                "steps": 2,
                "batch_size": 16,
                "token_budget": 1024,
                "tasks": [task(folder)],
                "demonstration": "keel.data.tasks.generated:gold",
            },
        ),
        "dpo": (
            model("qwen2", 15),
            {"stage": "dpo", "steps": 2, "batch_size": 6, "token_budget": 600, "data": pairs},
        ),
        "reward-model": (
            model("gpt2", 16),
            {
                "stage": "reward_model",
                "steps": 2,
                "batch_size": 8,
                "token_budget": 2048,
                "data": pairs,
            },
        ),
        "grpo-checkpointing": (
            model("qwen3", 16, activation_checkpointing=True),
            rl(
                folder,
                "gspo",
                learned=True,
                rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 48},
                token_budget=1500,
                epochs=1,
            ),
        ),
        "ppo-head": (
            model("gpt2", 16),
            rl(
                folder,
                "ppo",
                learned=False,
                value={"kind": "head"},
                rollout={"prompts_per_step": 10, "group_size": 1, "max_tokens": 100},
                token_budget=900,
                epochs=1,
                minibatches=1,
            ),
        ),
        "rloo-lora-bf16": (
            model("qwen3", 15, lora={"rank": 8}, dtype="bfloat16"),
            rl(
                folder,
                "rloo",
                learned=False,
                rollout={"prompts_per_step": 3, "group_size": 6, "max_tokens": 40},
                token_budget=1700,
                epochs=1,
            ),
        ),
        "dpo-softcap": (
            model("gemma2", 12, activation_checkpointing=True),
            {"stage": "dpo", "steps": 3, "batch_size": 5, "token_budget": 1000, "data": pairs},
        ),
    }
    return {
        name: {"name": name, "seed": 3, "threads": 1, "model": made, "stages": [stage]}
        for name, (made, stage) in stages.items()
    }


def prepare(folder: Path) -> None:
    """The rows, and a reward model of more than 100 M parameters."""
    from keel.config.model import Model
    from keel.models.policy import load_policy
    from keel.models.reward import reward_model_from

    def text(seed: int, length: int) -> str:
        return "".join(random.Random(seed).choices("abcdefgh ", k=length)).strip() or "a"

    prompts = [{"prompt": text(i, 50 + i % 9), "answer": text(i, 90 + i % 7)} for i in range(120)]
    pairs = [
        {
            "prompt": text(i, 40 + i % 9),
            "chosen": text(i + 500, 70 + i % 31),
            "rejected": text(i + 900, 60 + i % 23),
        }
        for i in range(120)
    ]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
    policy = load_policy(Model.model_validate(model("llama", 15)), 1)
    reward_model_from(policy, "outcome", 0).save(folder / "reward")


def length(*, completions: Any) -> list[float]:
    """A reward that varies."""
    return [float(len(str(text)) % 7) for text in completions]


def run(name: str, folder: Path) -> dict[str, float]:
    """The recipe for real: its peak and its seconds."""
    from keel.config.load import load_recipe
    from keel.preflight.memory import resident_memory
    from keel.training.run import train

    recipe = load_recipe(recipes(folder)[name])
    clock = time.perf_counter()
    with tempfile.TemporaryDirectory() as target:
        train(recipe, Path(target) / "run")
    return {"bytes": resident_memory("VmHWM") or 0, "seconds": time.perf_counter() - clock}


def predict(name: str, folder: Path) -> dict[str, Any]:
    """The prediction for the recipe: bytes by phase, and seconds."""
    from keel.preflight.check import check

    clock = time.perf_counter()
    report = check(recipes(folder)[name])
    said = report.stages[0].predicted
    if not said:
        raise SystemExit(f"{name}: {report.stages[0].unseen}")
    return {
        "bytes": said["memory"]["peak"],
        "seconds": said["seconds"],
        "phase": said["memory"]["phase"],
        "phases": said["memory"]["phases"],
        "time": said["time"],
        "check": time.perf_counter() - clock,
    }


def child(what: str, name: str, folder: Path) -> dict[str, Any]:
    """A figure from a process of its own."""
    command = [sys.executable, __file__, name, "--child", what, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} {name}: {done.stderr[-2000:]}")
    last = done.stdout.splitlines()[-1:] or ["{}"]
    found: dict[str, Any] = json.loads(last[0])
    return found


def measure(names: list[str]) -> list[dict[str, Any]]:
    """A row for each recipe, printed as it comes."""
    rows = []
    print(f"{'':20} {'peak, MiB':>21}        {'seconds':>15}")
    head = f"{'predicted':>10} {'used':>10} {'ratio':>6}  {'pred.':>7} {'used':>7} {'ratio':>6}"
    print(f"{'recipe':20} {head}  at")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        child("prepare", "-", folder)
        for name in names:
            said = child("predict", name, folder)
            was = child("run", name, folder)
            ratio = said["bytes"] / was["bytes"]
            rows.append({"recipe": name, "predicted": said, "measured": was, "ratio": ratio})
            print(
                f"{name:20} {said['bytes'] / MIB:>10,.0f} {was['bytes'] / MIB:>10,.0f} "
                f"{ratio:>6.2f}  {said['seconds']:>7.0f} {was['seconds']:>7.0f} "
                f"{said['seconds'] / was['seconds']:>6.2f}  {said['phase']}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--child", choices=("prepare", "predict", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    choice = parser.parse_args()
    if choice.child == "prepare":
        prepare(choice.folder)
    elif choice.child == "predict":
        print(json.dumps(predict(choice.names[0], choice.folder)))
    elif choice.child == "run":
        print(json.dumps(run(choice.names[0], choice.folder)))
    else:
        rows = measure(choice.names or list(NAMES))
        if choice.json:
            Path(choice.json).write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    # The reward `benchmarks.peak_memory:length` is found from the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
