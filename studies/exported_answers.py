"""Greedy answers of an exported model in plain transformers, against what `keel eval` says of it.

    python studies/exported_answers.py [--families llama qwen2 ...] [--prompts 100]

Of each supported family a small model with a byte-level tokenizer learns two-digit sums for some
steps, is exported, and answers validation prompts twice: in `keel eval`, and by `generate` of the
classes that AutoModelForCausalLM and AutoTokenizer load. Ends with 1 where the scores differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import keel
from keel.models.families import FAMILIES
from keel.models.tokenizer_round_trip import quiet
from keel.rewards.rules import place_match
from studies.tokenisation import ONE_KV_HEAD_EACH

MAX_TOKENS = 6


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Sums of two digits each, with their answers."""
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def exported(family: str, folder: Path, steps: int) -> Path:
    """A model of the family that has learned a little, exported."""
    build = {
        "family": family,
        "tokenizer": "bytes",
        "hidden_size": 64,
        "layers": 2,
        "heads": 4,
        "context": 64,
    }
    if family not in ONE_KV_HEAD_EACH:
        build["kv_heads"] = 2
    recipe = {
        "model": {"build": build, "device": "cpu"},
        "stages": [
            {
                "stage": "sft",
                "steps": steps,
                "batch_size": 32,
                "tasks": [
                    {"name": "jsonl", "path": str(folder / "train.jsonl"), "answer": "answer"}
                ],
                "optimizer": {"learning_rate": 3e-3},
            }
        ],
    }
    keel.train(keel.load_recipe(recipe), folder / family)
    return keel.export(folder / family, folder / f"{family}-model")


def by_transformers(model: Path, test: list[dict[str, str]]) -> float:
    """The mean score of greedy answers, one prompt at a time, without anything of Keel's engine."""
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        answers = []
        for row in test:
            read = tokenizer(row["prompt"], return_tensors="pt")
            made = loaded.generate(**read, do_sample=False, max_new_tokens=MAX_TOKENS)
            new = made[0, read["input_ids"].shape[1] :]
            answers.append(tokenizer.decode(new, skip_special_tokens=True))
    scores = place_match(completions=answers, answer=[row["answer"] for row in test])
    return sum(score or 0.0 for score in scores) / len(scores)


def main() -> int:
    """Print a line a family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=sorted(FAMILIES))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    words = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        unique = {row["prompt"]: row for row in rows(words.prompts, 1)}
        test = list(unique.values())
        for name, some in (("train", rows(2_000, 0)), ("test", test)):
            text = "".join(json.dumps(row) + "\n" for row in some)
            (folder / f"{name}.jsonl").write_text(text)
        reward = folder / "reward.py"
        # A function of one's own is not declared as correctness: the mean score is reported.
        reward.write_text("from keel.rewards.rules import place_match as score\n")
        for family in words.families:
            model = exported(family, folder, words.steps)
            message = keel.evaluate(
                model,
                task="jsonl",
                task_keys=[f"path={folder / 'test.jsonl'}", "answer=answer"],
                rewards=[f"{reward}:score"],
                max_tokens=MAX_TOKENS,
            )
            plain = by_transformers(model, test)
            worst = max(worst, abs(plain - message["mean"]))
            print(
                f"{family:<20}{message['mean']:>8.4f} keel eval {plain:>8.4f} transformers",
                flush=True,
            )
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
