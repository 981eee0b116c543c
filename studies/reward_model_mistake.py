"""Process reward models, trained from nothing, on BIG-Bench Mistake: the first wrong step.

    python studies/reward_model_mistake.py --data ../shared/data/bigbench-mistake --seeds 0 1

For each task, seed and fold `keel train` runs two stages of a Llama of 0.2 M random weights: `sft`
on the right beginnings of the train traces, then `process_reward_model` on the train traces and on
copies with a mistake that a program put in. `studies/mistake_traces.py` says how they are
written. Folds are by input and differ from seed to seed; inputs that are the same
but for names are on one side. What is counted is how often the first step whose probability of
being right is under 1/2 is the first wrong one (none under it: all are right), over the validation
traces of all folds, next to the most frequent answer of these traces; a trace that is too long
counts as missed. Intervals are Wilson's. Nothing is fetched: `--data` is a folder with the data
set's JSONL files (https://github.com/WHGTyen/BIG-Bench-Mistake).
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
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from keel.analysis.proportions import share_interval  # noqa: E402
from keel.models.loading import quiet  # noqa: E402
from studies.mistake_traces import (  # noqa: E402
    TASKS,
    UNKNOWN,
    Trace,
    fold_of,
    read_traces,
    renamed,
    with_mistake,
)

TRAIN = (sys.executable, "-m", "keel", "train", "--quiet")
SPECIAL = ("<pad>", UNKNOWN, "<end>")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a task is learned. `copies` are the changed traces to one real one."""

    hidden: int = 64
    layers: int = 3
    sft_steps: int = 300
    sft_batch: int = 64
    steps: int = 600
    batch: int = 64
    learning_rate: float = 3e-3
    copies: int = 1
    longest: int = 1600


SETTINGS = {
    "dyck_languages": Settings(sft_steps=150, sft_batch=48, steps=450, batch=48, copies=2),
    "tracking_shuffled_objects": Settings(),
}
LONG = Settings(sft_batch=12, batch=12, copies=2)
"""For the other tasks, whose traces are longer and of which no result is claimed."""


def recipe(settings: Settings, folder: Path, seed: int) -> str:
    """The two stages, as TOML."""
    return f"""
seed = {seed}
threads = 1
[model]
name = "{folder / "model"}"
device = "cpu"
[[stages]]
stage = "sft"
steps = {settings.sft_steps}
batch_size = {settings.sft_batch}
token_budget = 4096
{_optimizer(3e-3, settings.sft_steps)}
[[stages.tasks]]
name = "jsonl"
path = "{folder / "right.jsonl"}"
validation_path = "{folder / "validation.jsonl"}"
answer = "gold"
[[stages]]
stage = "process_reward_model"
steps = {settings.steps}
batch_size = {settings.batch}
token_budget = 4096
{_optimizer(settings.learning_rate, settings.steps)}
[stages.data]
name = "jsonl"
path = "{folder / "train.jsonl"}"
validation_path = "{folder / "validation.jsonl"}"
group = "key"
"""


def _optimizer(learning_rate: float, steps: int) -> str:
    return f"""[stages.optimizer]
learning_rate = {learning_rate}
schedule = "cosine"
min_lr_ratio = 0.03
warmup_steps = {steps // 20}
betas = [0.9, 0.95]
weight_decay = 0.1
[stages.checkpoints]
every = {steps}
keep = 1"""


def make_model(words: Iterable[str], settings: Settings, folder: Path, seed: int) -> None:
    """A Llama of random weights, one token a word, to `folder`."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*SPECIAL, "\n", *words]))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^\s]+"), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=SPECIAL[0], unk_token=UNKNOWN, eos_token=SPECIAL[2]
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        max_position_embeddings=2 * settings.longest,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    with quiet():
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(
    task: str,
    train: Sequence[Trace],
    held: Sequence[Trace],
    settings: Settings,
    folder: Path,
    seed: int,
) -> list[str]:
    """Write the files of both stages; the words of the train side."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < settings.steps * settings.batch:
        for trace in rng.sample(train, len(train)):
            trace = renamed(task, trace, rng)
            made = [with_mistake(task, trace, rng) for _ in range(settings.copies)]
            rows += [row(one, len(rows), settings.longest) for one in (trace, *made) if one]
    right: list[dict[str, Any]] = []
    begun = [trace for trace in train if trace.right]
    while len(right) < settings.sft_steps * settings.sft_batch:
        for trace in rng.sample(begun, len(begun)):
            right.append(row(renamed(task, trace, rng), len(right), settings.longest))
    texts = (text for row in (*rows, *right) for text in (row["prompt"], *row["steps"]))
    known = dict.fromkeys(word for text in (*texts, "0 1 2 3 4 5 6 7 8 9") for word in text.split())
    judged = [row(trace, len(rows) + i, settings.longest, known) for i, trace in enumerate(held)]
    write(folder / "train.jsonl", rows)
    write(folder / "right.jsonl", right)
    write(folder / "validation.jsonl", judged)
    return list(known)


def row(
    trace: Trace, number: int, longest: int, known: Container[str] | None = None
) -> dict[str, Any]:
    """A trace as a line of both stages' files, up to its first error; with `known`, words of the
    train side, it is a validation one: whole, and other words are unknown ones."""
    steps, error = trace.steps, trace.first_error
    if known is None:
        # One step behind the error stays: else the end of a row would give the error away.
        steps = steps[: trace.right + 2]
        while Trace("", trace.prompt, steps, None).length > longest:
            steps = steps[:-1]
        error = None if error is None or error >= len(steps) else error

    def text(words: Sequence[str]) -> str:
        return " ".join(word if known is None or word in known else UNKNOWN for word in words)

    # No two prompts may be the same on both sides: for want of one, the row's number.
    return {
        "key": trace.key,
        "prompt": text(trace.prompt or tuple(str(number))) + " \n",
        "steps": [text(step) for step in steps],
        "first_error": error,
        "gold": "\n".join(text(step) for step in steps[: trace.right]),
    }


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_fold(
    task: str,
    traces: Sequence[Trace],
    fold: int,
    folds: int,
    settings: Settings,
    folder: Path,
    seed: int,
) -> dict[str, Any]:
    """One fold: how many of its validation traces are right, of how many, in how many seconds."""
    start = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    held = [trace for trace in traces if fold_of(trace.key, folds, seed) == fold]
    train = [trace for trace in traces if fold_of(trace.key, folds, seed) != fold]
    fit = [trace for trace in held if trace.length <= settings.longest]
    words = write_rows(task, train, fit, settings, folder, seed)
    make_model(words, settings, folder / "model", seed)
    (folder / "recipe.toml").write_text(recipe(settings, folder, seed), encoding="utf-8")
    subprocess.run(
        [*TRAIN, str(folder / "recipe.toml"), "--run", str(folder / "run")],
        check=True,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    said = json.loads((folder / "run" / "run.json").read_text())
    after = said["measured"]["process_reward_model"]["after"]
    if after["n"] != len(fit):
        raise SystemExit(f"{folder}: {after['n']} of {len(fit)} traces were judged")
    return {
        "task": task,
        "seed": seed,
        "fold": fold,
        "right": round(after["accuracy"]["mean"] * after["n"]),
        "too_long": len(held) - len(fit),
        "answers": [trace.first_error for trace in held],
        "seconds": round(time.perf_counter() - start, 1),
        "after": after,
    }


def pooled(rows: Sequence[dict[str, Any]]) -> str:
    """A line of the table: accuracy over all folds, and of the best constant answer."""
    answers = [answer for row in rows for answer in row["answers"]]
    right, n = sum(row["right"] for row in rows), len(answers)
    (constant, count), *_ = Counter(answers).most_common(1)
    cells = [rows[0]["task"], str(rows[0]["seed"]), str(len(rows)), str(n)]
    for hits in (right, count):
        share = share_interval(np.repeat([1.0, 0.0], [hits, n - hits]))
        cells.append(f"{share.mean:.3f} [{share.low:.3f}, {share.high:.3f}]")
    cells += [
        "none" if constant is None else str(constant),
        f"{sum(row['seconds'] for row in rows):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = "| task | seed | folds | n | accuracy | best constant | it is | seconds |\n|" + "---|" * 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/bigbench-mistake")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(SETTINGS))
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="+", help="run only these of the folds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, help="keep the files and runs here")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="other settings")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    changed = {key: json.loads(value) for key, value in (word.split("=") for word in arguments.set)}
    lines, everything = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        for task in arguments.tasks:
            settings = replace(SETTINGS.get(task, LONG), **changed)
            traces = read_traces(arguments.data, task)
            for seed in arguments.seeds:
                rows = []
                for fold in arguments.only or range(arguments.folds):
                    place = folder / f"{task}-{seed}-{fold}"
                    rows.append(
                        run_fold(task, traces, fold, arguments.folds, settings, place, seed)
                    )
                    print(pooled(rows[-1:]), flush=True)
                lines.append(pooled(rows))
                everything += rows
        print("\n".join([HEADER, *lines]))
        if arguments.json:
            arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
