"""Keel's side of `loop.py`, which starts it: some GRPO steps, timed; and what both sides load.

python benchmarks/loop_keel.py prepare SIZE.json FOLDER
python benchmarks/loop_keel.py train JOB.json RESULT.json
"""

from __future__ import annotations

import json
import math
import random
import string
import sys
import time
from pathlib import Path
from typing import Any

ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
PROMPTS = 256
SEED = 0
NEVER = -30.0
"""The logit of an end that is not drawn: e^-30 a token."""


def recipe(job: dict[str, Any]) -> dict[str, Any]:
    """As data; what it does not name is Keel's default."""
    stage = {
        "stage": "rl",
        "steps": job["steps"],
        "algorithm": {"preset": "grpo", "divergence": "none"},
        "tasks": [{"name": "jsonl", "path": job["prompts"], "validation_path": job["validation"]}],
        "rewards": {"functions": [{"function": "benchmarks.loop_trl:vowels"}]},
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

    from benchmarks.loop_trl import differences, resident
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
    phases = ("rollout", "measure", "update", "sync", "record")
    return {
        "tokens": [row["rollout/tokens"] for row in done.metrics()],
        "seconds": differences(clock),
        "cpu": differences(cpu),
        "phases": [{key: row.get(key, 0.0) for key in phases} for row in done.timings()],
        "imported": imported,
        "peak": resident(peak=True),
    }


def prepare(size: dict[str, Any], folder: Path) -> None:
    """Into the folder: a model for each kind of lengths, and prompts."""
    import torch

    from keel.config.model import BuildModel
    from keel.models.build import build_model, build_tokenizer

    spec = BuildModel(
        alphabet=ALPHABET, hidden_size=size["hidden"], layers=size["layers"], heads=4, context=1024
    )
    tokenizer = build_tokenizer(spec)
    for lengths in ("ragged", "equal"):
        model = build_model(spec, SEED, torch.float32)
        ragged = lengths == "ragged"
        end(model, chance(size["mean"], size["most"]) if ragged else None)
        model.save_pretrained(folder / lengths)
        tokenizer.save_pretrained(folder / lengths)
    rng = random.Random(SEED)
    for name, bounds, count in (
        ("short", size["short"], PROMPTS),
        ("long", size["long"], PROMPTS),
        ("validation", size["short"], 1),
    ):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*bounds)))
                file.write(json.dumps({"prompt": text}) + "\n")


def chance(mean: float, most: int) -> float:
    """Of an end at each token, so that lengths cut at `most` have this mean.

    The mean is Σ_{t<most} (1−p)^t = (1 − (1−p)^most) / p, which falls with p.
    """
    low, high = 1e-9, 1.0
    for _ in range(100):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** most) / p > mean else (low, p)
    return (low + high) / 2


def end(model: Any, p: float | None) -> None:
    """Give the end of a sequence the same probability everywhere; None makes it never come.

    A Llama's head has no bias. So the first channel is 1 for every token, no layer writes to it,
    and only the end's row of the head reads it. After the last norm it is about the same
    everywhere: by the root mean square of the others, of which there are many.
    """
    import torch

    eos = model.config.eos_token_id
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        head[eos] = 0.0
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(2, model.config.vocab_size, (4, 64), generator=generator)
        state = model.model(input_ids=ids).last_hidden_state
        others = (state @ head.T).index_fill(-1, torch.tensor([eos]), -math.inf).logsumexp(-1)
        wanted = others.mean() + math.log(p / (1 - p)) if p is not None else torch.tensor(NEVER)
        head[eos, 0] = wanted / state[..., 0].mean()


def main(words: list[str]) -> None:
    printed = json.loads(Path(words[1]).read_text("utf-8"))
    if words[0] == "prepare":
        prepare(printed, Path(words[2]))
    else:
        Path(words[2]).write_text(json.dumps(train(printed)), "utf-8")


if __name__ == "__main__":
    # The reward `benchmarks.loop_trl:vowels` is found from the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(sys.argv[1:])
