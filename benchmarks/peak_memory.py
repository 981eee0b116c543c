"""Peak memory and time: what `keel check` predicts against what the run takes.

Each recipe is predicted in one fresh process, which takes no optimizer step, and run in another.
"Peak" is the most resident memory (VmHWM, Linux, CPU) less what was resident when the process had
imported Keel and read the recipe, before anything of it was loaded.

    python benchmarks/peak_memory.py [NAME ...] [--json FILE] [--mapped]

`--mapped` runs with malloc's bound for large blocks fixed at 256 KiB (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TUNED = ("ppo", "grpo", "grpo-lora", "sft", "dpo", "reward-model")
HELD_OUT = ("grpo-checkpointing", "ppo-head")
"""Looked at once, after the model of memory was done."""
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
                rollout={"prompts_per_step": 2, "group_size": 8, "max_tokens": 96},
                token_budget=2048,
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
                "demonstration": "keel.tasks.demonstrations:gold",
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


def resident(peak: bool) -> int:
    """Bytes of resident memory of this process: now, or the most it ever was (Linux)."""
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status: this benchmark needs Linux")


def run(name: str, folder: Path) -> dict[str, float]:
    """The recipe for real: its peak above the start, and its seconds."""
    from keel.config.load import load_recipe
    from keel.train.run import train

    recipe = load_recipe(recipes(folder)[name])
    start, clock = resident(peak=False), time.perf_counter()
    with tempfile.TemporaryDirectory() as target:
        train(recipe, Path(target) / "run")
    return {"bytes": resident(peak=True) - start, "seconds": time.perf_counter() - clock}


def predict(name: str, folder: Path, mapped: bool) -> dict[str, Any]:
    """What the check would say, with answers that run to the budget."""
    from keel.config.load import load_recipe
    from keel.pipelines.memory import stage_footprint

    recipe = load_recipe(recipes(folder)[name])
    stage = recipe.stages[0]
    held = _held(recipe)
    batches, heldout = _batches(recipe, held)
    clock = time.perf_counter()
    found = stage_footprint(recipe.model, stage, held, batches, heldout)
    return {
        "bytes": found.peak,
        "phase": found.highest.name,
        "parts": {part.name: part.bytes for part in found.highest.parts},
        "seconds": time.perf_counter() - clock,
    }


def _held(recipe: Any) -> Any:
    """The models of the recipe's only stage."""
    from keel.config.model import Model
    from keel.models.policy import load_policy
    from keel.models.reference import reference_for
    from keel.models.reward import load_reward_model, reward_model_from
    from keel.models.value import critic_from_policy, value_head_for
    from keel.pipelines.memory import Held

    stage, policy = recipe.stages[0], load_policy(recipe.model, recipe.seed)
    found: dict[str, Any] = {}
    if stage.stage == "dpo" or (stage.stage == "rl" and stage.keeps_reference):
        found["reference"] = reference_for(policy)
    if stage.stage == "reward_model":
        found["reward_model"] = reward_model_from(policy, "outcome", 0)
    if stage.stage == "rl":
        if stage.algorithm.value is not None and stage.value.kind == "head":
            found["value_head"] = value_head_for(policy)
        elif stage.algorithm.value is not None:
            found["critic"] = critic_from_policy(policy)
        names = [f.options["model"] for f in stage.rewards.functions if "model" in f.options]
        judges = [("outcome", load_reward_model(Model(name=n), "outcome")) for n in names]
        found["judges"] = tuple(judges)
    return Held(policy, **found)


def _batches(recipe: Any, held: Any) -> tuple[list[Any], list[int]]:
    """Lengths of the steps' rows, and of the held-out prompts."""
    from keel.config.seeds import derive
    from keel.models.encode import Encoder, encode_text
    from keel.models.reading import Reader
    from keel.pipelines.memory import Extent
    from keel.tasks import PromptStream, build_tasks, heldout, preferences
    from keel.train.rows_judged import of_step, pair_encoder, ready

    stage, policy, seed = recipe.stages[0], held.policy, derive(recipe.seed, recipe.stages[0].name)
    steps = range(1, stage.steps + 1)
    if stage.stage not in ("rl", "sft"):
        sides = preferences.read_pairs(stage.data, recipe.seed)
        encode = pair_encoder(Reader(policy.tokenizer, policy.context))
        rows = ready(sides, encode, None, 1000, stage.name).train
        drawn = [
            of_step(rows, stage.batch_size, n, derive(recipe.seed, stage.name, "rows"))
            for n in steps
        ]
        return [
            [
                tuple(Extent(a.begins, len(a.tokens) - a.begins) for a in (r.chosen, r.rejected))
                for r in batch
            ]
            for batch in drawn
        ], []
    tasks = {t.name: t for t in build_tasks(stage.tasks, recipe.seed)}
    encoder = Encoder(policy.tokenizer, None, stage.prompts.chat_template)
    every = list(tasks.values())
    stream = PromptStream(every, [1.0], derive(seed, "prompts"), encoder)
    if stage.stage == "sft":
        drawn = [stream.take(stage.batch_size) for _ in steps]
        return [
            [
                (
                    Extent(
                        len(p.tokens),
                        len(encode_text(tasks[p.task].gold(p) or "", p.id, policy.tokenizer)) + 1,
                    ),
                )
                for p in batch
            ]
            for batch in drawn
        ], []
    choice = stage.rollout
    prompts = stream.take(choice.prompts_per_step)
    rows = [(Extent(len(p.tokens), choice.max_tokens),) for p in prompts]
    held_prompts = heldout(every, [1.0], stage.evaluation.prompts, encoder)
    return (
        [[row for row in rows for _ in range(choice.group_size)]],
        [len(p.tokens) for p in held_prompts],
    )


def child(what: str, name: str, folder: Path, mapped: bool) -> dict[str, Any]:
    """A figure from a process of its own."""
    command = [sys.executable, __file__, name, "--child", what, "--folder", str(folder)]
    environment = dict(os.environ)
    if mapped:
        command.append("--mapped")
        environment["MALLOC_MMAP_THRESHOLD_"] = str(256 * 1024)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{what} {name}: {done.stderr[-2000:]}")
    last = done.stdout.splitlines()[-1:] or ["{}"]
    found: dict[str, Any] = json.loads(last[0])
    return found


def measure(names: list[str], mapped: bool) -> list[dict[str, Any]]:
    """A row for each recipe, printed as it comes."""
    rows = []
    print(f"{'recipe':20} {'predicted MiB':>14} {'measured MiB':>13} {'ratio':>6}  at")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        child("prepare", "-", folder, mapped)
        for name in names:
            said = child("predict", name, folder, mapped)
            was = child("run", name, folder, mapped)
            ratio = said["bytes"] / was["bytes"]
            rows.append({"recipe": name, "predicted": said, "measured": was, "ratio": ratio})
            held = "  (held out)" if name in HELD_OUT else ""
            print(
                f"{name:20} {said['bytes'] / MIB:>14,.0f} {was['bytes'] / MIB:>13,.0f} "
                f"{ratio:>6.2f}  {said['phase']}{held}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TUNED + HELD_OUT))
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--mapped", action="store_true", help="malloc maps large blocks")
    parser.add_argument("--child", choices=("prepare", "predict", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    choice = parser.parse_args()
    if choice.child == "prepare":
        prepare(choice.folder)
    elif choice.child == "predict":
        print(json.dumps(predict(choice.names[0], choice.folder, choice.mapped)))
    elif choice.child == "run":
        print(json.dumps(run(choice.names[0], choice.folder)))
    else:
        rows = measure(choice.names or [*TUNED, *HELD_OUT], choice.mapped)
        if choice.json:
            Path(choice.json).write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    # The reward `benchmarks.peak_memory:length` is found from the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
