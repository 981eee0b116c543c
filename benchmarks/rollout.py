"""Generation alone, in tokens per second: Keel's native engine compared with two others.

    python -m benchmarks.rollout --vllm-python .venv-vllm/bin/python   # prints a Markdown table
    python -m benchmarks.rollout --sides generate --repeats 9 --json rollout.json
    python -m benchmarks.rollout --smoke          # tiny, without vLLM

64 completions, groups of 8 for 8 prompts of 16 to 24 tokens, of the fp32 Llama of `loop.py` (256
wide, 6 layers): `ragged` lengths with mean 60 and at most 200, or `equal`, 60 tokens each.
Temperature 1, no truncation.

- keel: `NativeEngine.sample`, which also returns log-probabilities and text; the others tokens.
- keel-bf16: the same with `dtype=torch.bfloat16` (`rollout.dtype = "bfloat16"`). Others are fp32.
- generate: transformers' `generate`, prompts padded left, n sequences of each.
- vllm: vLLM's CPU build (`benchmarks/install_vllm.sh`), eager; defaults except the threads.

Each measurement is a process that loads the model, makes --warm passes and times one more, from
prompts as token ids to completions; the sides take turns. Reported are medians, and Keel's tokens
per second over each engine's. The engines sample different completions of one distribution, so mean
lengths are reported as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sides import SMOKE, Size, alternate, begin, measure, parser, prepare, row, save

CASES = ("ragged", "equal")
SIDES = ("keel-bf16", "generate", "vllm")
GROUP = 8


def once(
    side: str, case: str, first: int, folder: Path, size: Size, chosen: argparse.Namespace
) -> dict[str, Any]:
    """One measurement: tokens per second, seconds, the mean length."""
    most = size.most if case == "ragged" else size.mean
    job = {
        "side": side,
        "model": str(folder / case),
        "prompts": str(folder / "short.jsonl"),
        "completions": size.completions,
        "group": min(GROUP, size.completions),
        "max_tokens": most,
        "longest": size.short[1] + most,
        "threads": chosen.threads,
        "warm": chosen.warm,
        "first": first * (chosen.warm + 1),
    }
    around = {}
    if side == "vllm":
        around = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        }
    python = chosen.vllm_python if side == "vllm" else sys.executable
    found = measure("rollout_side.py", job, python, **around)
    tokens = sum(found["lengths"])
    return {
        "tokens_per_second": tokens / found["seconds"],
        "seconds": found["seconds"],
        "mean_length": tokens / len(found["lengths"]),
        "versions": found["versions"],
    }


def compare(
    case: str, sides: Sequence[str], folder: Path, size: Size, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    """A record of medians for each engine."""
    runs = alternate(
        sides, chosen.repeats, lambda side, number: once(side, case, number, folder, size, chosen)
    )
    rows: list[dict[str, Any]] = []
    for side, passes in runs.items():
        rates = [one["tokens_per_second"] for one in passes]
        rate = statistics.median(rates)
        rows.append(
            {
                "lengths": case,
                "side": side,
                "tokens_per_second": rate,
                "slowest": min(rates),
                "fastest": max(rates),
                "seconds": statistics.median(one["seconds"] for one in passes),
                "mean_length": statistics.mean(one["mean_length"] for one in passes),
                "ratio": (rows[0]["tokens_per_second"] if rows else rate) / rate,
                "passes": passes,
            }
        )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    asked = parser(__doc__)
    asked.add_argument("--repeats", type=int, default=5)
    asked.add_argument("--sides", nargs="+", choices=SIDES, help="engines besides keel")
    asked.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    asked.add_argument("--warm", type=int, default=2, help="passes before the one that counts")
    asked.add_argument("--vllm-python", default=os.environ.get("KEEL_VLLM_PYTHON"), metavar="PATH")
    chosen = asked.parse_args(words)
    sides = list(chosen.sides or SIDES if chosen.vllm_python else chosen.sides or SIDES[:2])
    if "vllm" in sides and not chosen.vllm_python:
        asked.error("vllm: name a Python that has it, by --vllm-python (make vllm builds one)")
    size = SMOKE if chosen.smoke else Size()
    if chosen.smoke:
        chosen.repeats, chosen.warm, chosen.cases = 1, 0, [CASES[0]]
    rows: list[dict[str, Any]] = []
    speed = ("tokens/s", "slowest to fastest", "s a pass")
    begin(chosen.threads, "lengths", "side", *speed, "mean length", "Keel's ratio")
    with tempfile.TemporaryDirectory() as place:
        prepare(size, Path(place))
        for case in chosen.cases:
            found = compare(case, ["keel", *sides], Path(place), size, chosen)
            rows += found
            for one in found:
                rates = (one["tokens_per_second"], one["slowest"], one["fastest"])
                rate, slowest, fastest = (f"{value:,.0f}" for value in rates)
                others = (
                    f"{one['seconds']:.2f}",
                    f"{one['mean_length']:.1f}",
                    f"{one['ratio']:.2f}",
                )
                row(case, one["side"], rate, f"{slowest} to {fastest}", *others)
    ratios = {f"{one['side']}_{one['lengths']}_ratio": one["ratio"] for one in rows}
    save(chosen.json, rows, size=vars(size), **ratios)


if __name__ == "__main__":
    main()
