"""The whole GRPO loop of Keel and of TRL: tokens generated, scored and trained per second.

    python -m venv ../trl && ../trl/bin/pip install torch==2.13.0 trl==1.16 transformers==5.23.0
    python -m benchmarks.loop --trl-python ../trl/bin/python        # prints a Markdown table
    python -m benchmarks.loop --rows ragged-8-short --repeats 5 --json loop.json
    python -m benchmarks.loop --keel-only --keel token_budget=4096  # another setting of Keel's

A row is LENGTHS-GROUP-PROMPTS: 64 completions per step, in groups of GROUP, of a fp32 Llama with
4.8 M random weights (256 wide, 6 layers, one token per character). `ragged` lengths are geometric
with mean 60 and at most 200: the logit of the end is the same at every position, and the learning
rate (1e-7) changes nothing. `equal` ones are 60 tokens each. `short` prompts have 16 to 24 tokens,
`long` ones 450 to 550. With --bf16 each row is also measured with updates in bfloat16: Keel's
(model.autocast = "bfloat16", the truncated correction) and TRL's own (bf16 = True).

Both load one folder and use the same prompts, reward, seed, AdamW and GRPO: β 0 (TRL's default; no
reference model), ε 0.2, group-relative rewards, one pass, gradient norm 1. Other settings are each
library's defaults, except TRL's micro-batches (--trl-micro): 16 completions, which is faster than
64 and takes less than half the memory.

Every measurement is a separate process, and the sides take turns. A step's seconds run from the end
of the previous step; the first step of a process does not count. Reported are medians over the
steps of all measurements, and of the processes' peak resident memory (VmHWM, Linux). The two sample
different completions of one distribution, so mean lengths are reported as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sides import (
    SEED,
    SMOKE,
    Size,
    alternate,
    begin,
    measure,
    parser,
    prepare,
    row,
    save,
)

ROWS = ("ragged-8-short", "equal-8-short", "ragged-64-short", "ragged-8-long")
"""The first two are those of the ratios."""
LEARNING_RATE = 1e-7
BF16 = "-bf16"
"""Ends the name of a side that updates in bfloat16."""
MIB = 2**20


def job_of(name: str, folder: Path, size: Size, chosen: argparse.Namespace) -> dict[str, Any]:
    """The settings of a process."""
    lengths, group, prompts = name.split("-")
    return {
        "model": str(folder / lengths),
        "prompts": str(folder / f"{prompts}.jsonl"),
        "validation": str(folder / "validation.jsonl"),
        "seed": SEED,
        "learning_rate": LEARNING_RATE,
        "group": int(group),
        "completions": size.completions,
        "max_tokens": size.most if lengths == "ragged" else size.mean,
        "steps": chosen.steps,
        "threads": chosen.threads,
        "micro": min(chosen.trl_micro, size.completions),
    }


def once(side: str, job: Mapping[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """One measurement of a side."""
    name, bf16 = side.removesuffix(BF16), side.endswith(BF16)
    keys = ["model.autocast=bfloat16", "algorithm.corrections.kind=truncate"] if bf16 else []
    python = chosen.trl_python if name == "trl" else sys.executable
    given = {**job, "bf16": bf16, "keel": [*keys, *chosen.keel]}
    return measure(f"loop_{name}.py", given, python)


def summed(runs: Sequence[Mapping[str, Any]], completions: int) -> dict[str, Any]:
    """Medians of a side over its measurements; the first step of each is left out."""
    keys = ("tokens", "seconds", "cpu", "phases")
    each = [[*zip(*(one[key] for key in keys), strict=True)] for one in runs]
    steps = [step for first, *others in each for step in others]
    return {
        "tokens_per_second": statistics.median(tokens / seconds for tokens, seconds, _, _ in steps),
        "tokens_per_cpu_second": statistics.median(tokens / cpu for tokens, _, cpu, _ in steps),
        "seconds": statistics.median(seconds for _, seconds, _, _ in steps),
        "phases": {key: statistics.median(p[key] for *_, p in steps) for key in steps[0][3]},
        "mean_length": statistics.mean(tokens / completions for tokens, *_ in steps),
        "peak": statistics.median(one["peak"] for one in runs),
        "peak_above_import": statistics.median(one["peak"] - one["imported"] for one in runs),
        "steps": len(steps),
        "runs": runs,
    }


def compare(name: str, folder: Path, size: Size, chosen: argparse.Namespace) -> dict[str, Any]:
    """A row's figures."""
    plain = ["keel"] if chosen.keel_only else ["keel", "trl"]
    sides = [*plain, *(side + BF16 for side in plain if chosen.bf16)]
    job = job_of(name, folder, size, chosen)
    runs = alternate(sides, chosen.repeats, lambda side, _: once(side, job, chosen))
    found = {side: summed(some, size.completions) for side, some in runs.items()}
    for side in ("keel", f"keel{BF16}"):
        if (other := found.get(side.replace("keel", "trl"))) is not None:
            ours = found[side]
            ours["ratio"] = ours["tokens_per_second"] / other["tokens_per_second"]
            ours["memory_ratio"] = ours["peak"] / other["peak"]
    return found


def show(name: str, side: str, found: Mapping[str, Any]) -> None:
    """Print a row of the table."""
    ratios = [f"{found[k]:.2f}" if k in found else "" for k in ("ratio", "memory_ratio")]
    speed = (f"{found['tokens_per_second']:,.0f}", ratios[0], f"{found['seconds']:.2f}")
    phases = ", ".join(f"{k} {v:.2f}" for k, v in found["phases"].items() if v >= 0.005)
    cpu = f"{found['tokens_per_cpu_second']:,.0f}"
    peaks = (f"{found[key] / MIB:,.0f}" for key in ("peak", "peak_above_import"))
    row(name, side, *speed, phases, f"{found['mean_length']:.1f}", cpu, *peaks, ratios[1])


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    asked = parser(__doc__)
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--rows", nargs="+", metavar="ROW", default=list(ROWS))
    asked.add_argument("--steps", type=int, default=4, help="of each, the first uncounted")
    asked.add_argument("--trl-python", default=os.environ.get("KEEL_TRL_PYTHON"), metavar="PATH")
    asked.add_argument("--trl-micro", type=int, default=16, metavar="N")
    asked.add_argument("--keel", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe")
    asked.add_argument("--bf16", action="store_true", help="each row also with bf16 updates")
    asked.add_argument("--keel-only", action="store_true", help="leave TRL out")
    chosen = asked.parse_args(words)
    if not chosen.keel_only and chosen.trl_python is None:
        asked.error("name a Python that has TRL, by --trl-python; or leave TRL out: --keel-only")
    if chosen.smoke:
        chosen.rows, chosen.repeats, chosen.steps = list(ROWS[:1]), 1, 2
    return chosen


def main(words: Sequence[str] | None = None) -> None:
    chosen = parsed(words)
    size = SMOKE if chosen.smoke else Size()
    found: dict[str, dict[str, Any]] = {}
    speed = ("tokens/s", "ratio", "s a step", "of which", "mean length", "tokens per CPU s")
    begin(chosen.threads, "row", "side", *speed, "peak, MiB", "above imports", "memory ratio")
    with tempfile.TemporaryDirectory() as place:
        prepare(size, Path(place))
        for name in chosen.rows:
            found[name] = compare(name, Path(place), size, chosen)
            for side, figures in found[name].items():
                show(name, side, figures)
    keel = {name: sides["keel"] for name, sides in found.items()}
    ratios = {f"{name.split('-')[0]}_ratio": keel.get(name, {}).get("ratio") for name in ROWS[:2]}
    ratios["memory_ratio"] = keel.get(ROWS[0], {}).get("memory_ratio")
    rows = [{"row": name, **sides} for name, sides in found.items()]
    save(chosen.json, rows, size=vars(size), **ratios)


if __name__ == "__main__":
    main()
