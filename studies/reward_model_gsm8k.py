"""An outcome reward model, from scratch, on solutions of word problems that models wrote (GSM8K).

    python studies/reward_model_gsm8k.py --data ../shared/data/gsm8k --seeds 0 1 2

A Llama of 0.7 M random weights goes through one `keel train` a seed: language modelling on the
problems and gold solutions of train.jsonl; Bradley–Terry there, gold against the same solution with
one mistake that a program made; then, for each fold, one epoch of Bradley–Terry on the right and
wrong solutions that models wrote to the problems of the other folds. It is tested on the pairs of
the fold's own problems, next to a bag of words on the same folds. The folds are by problem and
differ from seed to seed; the intervals are clustered by problem. Nothing of the files is fetched:
`--data` is a folder with train.jsonl and example_model_solutions.jsonl of
https://github.com/openai/grade-school-math.

`--development` trains and measures on a split of its own: a fifth of the problems, on which the
settings here were chosen. The last line of the table leaves them out.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from keel.analysis.proportions import share_interval  # noqa: E402
from keel.config.model import Model  # noqa: E402
from keel.models.reward import (  # noqa: E402
    Reader,
    load_reward_model,
)
from studies.gsm8k_pairs import (  # noqa: E402
    Array,
    Pair,
    bag_of_words,
    broken,
    gold_solutions,
    in_order,
    laid_out,
    real_pairs,
    share_of,
)

CONTEXT = 1024
BROKEN_VALIDATION = 300
"""Problems of train.jsonl whose broken solutions are not learned from."""
NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NOTHING, WORDS, LOGS, BROKEN, REAL = (
    "chance",
    "bag of words (counts)",
    "bag of words (log counts)",
    "reward model, broken solutions only",
    "reward model",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Chosen on the development problems and on broken solutions; the same for every seed."""

    vocabulary: int = 2000
    width: int = 128
    layers: int = 2
    language_steps: int = 800
    language_rows: int = 16
    language_rate: float = 3e-3
    broken_steps: int = 600
    broken_rows: int = 16
    broken_rate: float = 1e-3
    broken_probability: float = 0.9
    real_rows: int = 32
    real_rate: float = 3e-4


@dataclass(frozen=True, slots=True)
class Fold:
    """One split of the pairs by problem; `name` is also its stage's."""

    name: str
    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]


# ---------------------------------------------------------------- the model before training


def tokenizer_of(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without blanks or capitals, a number in one form: 1,000 and 20.0 and three.

    So the numbers of a problem and of its solution are the same tokens.
    """
    made = Tokenizer(models.BPE())
    one_form = [
        normalizers.Replace(Regex(r"(?<=\d),(?=\d{3})"), ""),
        normalizers.Replace(Regex(r"(?<=\d)\.0+(?!\d)"), ""),
    ]
    words = [
        normalizers.Replace(Regex(rf"\b{word}\b"), str(number))
        for number, word in enumerate(NUMBER_WORDS, start=2)
    ]
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), *one_form, *words])
    pieces = Regex(r"\n|<<|>>|\d+|[a-z']+|[^\sa-z\d]")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save_base(folder: Path, gold: Sequence[tuple[str, str]], seed: int, choice: Settings) -> None:
    """A language model of random weights with its tokenizer, as a folder."""
    tokenizer = tokenizer_of((text for row in gold for text in row), choice.vocabulary)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=choice.width,
            intermediate_size=3 * choice.width,
            num_hidden_layers=choice.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------- rows and recipe


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """As JSON lines; the path, for the recipe."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pair_rows(pairs: Sequence[Pair], probability: float) -> list[dict[str, Any]]:
    """Rows for a reward_model stage, with the problem as their group.

    A probability below 1 keeps the scores apart by no more than it says.
    """
    rows = []
    for pair in pairs:
        prompt, chosen = laid_out(pair.problem, pair.right)
        _, rejected = laid_out(pair.problem, pair.wrong)
        texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        rows.append({**texts, "probability": probability, "problem": pair.problem})
    return rows


def broken_pairs(gold: Sequence[tuple[str, str]], count: int, rng: random.Random) -> list[Pair]:
    """Gold solutions against broken ones, in epochs over the problems, each broken again."""
    found: list[Pair] = []
    while len(found) < count:
        for problem, solution in rng.sample(gold, len(gold)):
            wrong = broken(problem, solution, rng)
            if wrong is not None and len(found) < count:
                found.append(Pair(problem, solution, wrong))
    return found


def write_recipe(
    folder: Path,
    gold: Sequence[tuple[str, str]],
    folds: Sequence[Fold],
    seed: int,
    choice: Settings,
) -> Path:
    """The recipe of a seed and the files that it names."""
    rng = random.Random(seed)
    whole = [laid_out(problem, solution) for problem, solution in gold]
    language = [{"prompt": prompt, "answer": answer} for prompt, answer in whole]
    kept, apart = gold[:-BROKEN_VALIDATION], gold[-BROKEN_VALIDATION:]
    made = {
        "broken": broken_pairs(kept, choice.broken_steps * choice.broken_rows, rng),
        "broken-validation": broken_pairs(apart, BROKEN_VALIDATION, rng),
    }
    for fold in folds:
        made[fold.name], made[f"{fold.name}-validation"] = list(fold.train), list(fold.validation)
    files = {}
    for name, pairs in made.items():
        probability = choice.broken_probability if name == "broken" else 1.0
        rows = pair_rows(pairs, probability)
        files[name] = write_rows(folder / f"{name}.jsonl", rows)
    path = write_rows(folder / "language.jsonl", language)
    save_base(folder / "base", gold, seed, choice)
    parts = [
        f'name = "reward-model-gsm8k"\nseed = {seed}\nthreads = 1\n'
        f"model.name = {json.dumps(str(folder / 'base'))}\n",
        f'[[stages]]\nstage = "sft"\nbatch_size = {choice.language_rows}\n'
        f'tasks = [{{name = "jsonl", path = {json.dumps(path)}, answer = "answer", '
        "validation_fraction = 0.01}]\n" + learning(choice.language_steps, choice.language_rate),
        judging("broken", files, choice.broken_rows)
        + learning(choice.broken_steps, choice.broken_rate),
    ]
    for fold in folds:
        steps = len(fold.train) // choice.real_rows
        parts.append(
            judging(fold.name, files, choice.real_rows)
            + 'base.stage = "broken"\n'
            + learning(steps, choice.real_rate)
        )
    target = folder / "recipe.toml"
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def judging(name: str, files: Mapping[str, str], rows: int) -> str:
    """The head of a reward_model stage on the pairs of that name."""
    train, held = json.dumps(files[name]), json.dumps(files[f"{name}-validation"])
    return (
        f'[[stages]]\nstage = "reward_model"\nname = "{name}"\nbatch_size = {rows}\n'
        f'data = {{name = "jsonl", path = {train}, validation_path = {held}, group = "problem"}}\n'
    )


def learning(steps: int, rate: float) -> str:
    """Steps, optimizer and checkpoints of a stage."""
    return (
        f"steps = {steps}\ncheckpoints = {{every = {steps}, keep = 1}}\n"
        f'optimizer = {{learning_rate = {rate}, schedule = "cosine", min_lr_ratio = 0.03, '
        f"warmup_steps = {max(1, steps // 20)}, betas = [0.9, 0.95], weight_decay = 0.1}}\n"
    )


# ---------------------------------------------------------------- running and measuring


def train(recipe: Path, run: Path) -> float:
    """A whole `keel train` in a process of its own; seconds of wall time."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "keel", "train", str(recipe), "--run", str(run), "--quiet"],
        check=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        },
    )
    return time.perf_counter() - start


def differences(model: Path, pairs: Sequence[Pair]) -> Array:
    """The model's score of the right solution less that of the wrong one."""
    loaded = load_reward_model(Model(name=str(model), device="cpu"), "outcome")
    reader = Reader(loaded.tokenizer, loaded.context)
    texts = dict.fromkeys((p.problem, s) for p in pairs for s in (p.right, p.wrong))
    read = [reader.answer(*laid_out(*text), text[0]) for text in texts]
    said = loaded.judge(read, token_budget=16_384)
    score = dict(zip(texts, (value[0] for value in said), strict=True))
    return np.array([score[p.problem, p.right] - score[p.problem, p.wrong] for p in pairs])


def measure(run: Path, folds: Sequence[Fold]) -> dict[str, dict[Pair, float]]:
    """Of each way of judging and validation pair: right 1, undecided ½, wrong 0."""
    found: dict[str, dict[Pair, float]] = {name: {} for name in (WORDS, LOGS, BROKEN, REAL)}
    for fold in folds:
        gaps = {
            WORDS: bag_of_words(fold.train, fold.validation),
            LOGS: bag_of_words(fold.train, fold.validation, logarithm=True),
            BROKEN: differences(run / "models" / "broken", fold.validation),
            REAL: differences(run / "models" / fold.name, fold.validation),
        }
        for name, gap in gaps.items():
            found[name].update(zip(fold.validation, in_order(gap).tolist(), strict=True))
    return found


def in_development(pair: Pair) -> bool:
    """Whether the pair's problem is one of those on which settings were chosen."""
    return share_of(pair.problem, "development", 5) == 0


def folds_of(pairs: Sequence[Pair], seed: int, count: int, development: bool) -> list[Fold]:
    """As many folds by problem, other ones for every seed; or the one split of development."""
    if development:
        held = tuple(pair for pair in pairs if in_development(pair))
        return [Fold("development", tuple(p for p in pairs if not in_development(p)), held)]
    place = [share_of(pair.problem, f"seed {seed}", count) for pair in pairs]
    return [
        Fold(
            f"fold{k}",
            tuple(pair for pair, at in zip(pairs, place, strict=True) if at != k),
            tuple(pair for pair, at in zip(pairs, place, strict=True) if at == k),
        )
        for k in range(count)
    ]


# ---------------------------------------------------------------- the table


def row(cells: Sequence[str], credit: Mapping[Pair, float], centre: float = 0.0) -> str:
    """A row: the mean and its interval, clustered by problem. `centre` 0.5 is for differences."""
    found = share_interval(list(credit.values()), [pair.problem for pair in credit])
    scale = 2 if centre else 1
    mean, low, high = (
        100 * scale * (value - centre) for value in (found.mean, found.low, found.high)
    )
    problems = len({pair.problem for pair in credit})
    figures = [f"{mean:.1f}", f"[{low:.1f}, {high:.1f}]", str(found.n), str(problems)]
    return "| " + " | ".join([*cells, *figures]) + " |"


def table(seeds: Mapping[int, dict[str, dict[Pair, float]]]) -> list[str]:
    """Every seed, then the mean over the seeds for each pair, with what is gained on words."""
    lines = [
        "| seed | judged by | pairs in order, % | 95 % interval | pairs | problems |",
        "|---|---|---|---|---|---|",
    ]
    for seed, found in seeds.items():
        lines += [row([str(seed), name], credit) for name, credit in found.items()]
    pooled = {
        name: {
            pair: float(np.mean([found[name][pair] for found in seeds.values()]))
            for pair in next(iter(seeds.values()))[name]
        }
        for name in (WORDS, LOGS, BROKEN, REAL)
    }
    lines.append(f"| all | {NOTHING} | 50.0 | | | |")
    lines += [row(["all", name], credit) for name, credit in pooled.items()]
    for words in (WORDS, LOGS):
        # Differences in [−1, 1], moved into [0, 1] for the interval and back again.
        gain = {pair: (1 + pooled[REAL][pair] - pooled[words][pair]) / 2 for pair in pooled[REAL]}
        lines.append(row(["all", f"{REAL} less {words}, points"], gain, centre=0.5))
    apart = {pair: value for pair, value in pooled[REAL].items() if not in_development(pair)}
    if apart:
        lines.append(row(["all", f"{REAL}, without development problems"], apart))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/gsm8k"))
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="keep the files and run folders here")
    parser.add_argument("--development", action="store_true", help="the split of its own")
    chosen = parser.parse_args()
    if chosen.folds < 2:
        parser.error("--folds: 2 or more")
    if chosen.folder is not None and any(chosen.folder.glob("seed*")):
        parser.error(f"--folder: {chosen.folder} holds runs already: name another")
    torch.set_num_threads(1)
    choice = Settings()
    pairs, gold = real_pairs(chosen.data), gold_solutions(chosen.data)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in chosen.seeds:
            folder = (chosen.folder or Path(scratch)).resolve() / f"seed{seed}"
            folder.mkdir(parents=True)
            folds = folds_of(pairs, seed, chosen.folds, chosen.development)
            seconds = train(write_recipe(folder, gold, folds, seed, choice), folder / "run")
            found[seed] = measure(folder / "run", folds)
            right = np.mean(list(found[seed][REAL].values()))
            print(f"seed {seed}: {right:.3f} after {seconds:.0f} s of training", flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
