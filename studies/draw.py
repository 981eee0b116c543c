"""Time of sampling one token for each of 64 rows of logits: torch against compiled code.

    python studies/draw.py [--json FILE] [--rows R] [--vocabulary V ...] [--threads N ...]
    python studies/draw.py --smoke         # tiny, in seconds

Logits are normal with standard deviation 3: top-p 0.95 keeps some 1,400 of 32,000 tokens. The two
alternate; each figure is the fastest of several passes. Both sample the same tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.engines import sampler
from keel.models.kernels import sample as compiled
from keel.types import Sampling

VOCABULARIES = (100, 32_000, 151_936)
CASES = {
    "plain": Sampling(1),
    "greedy": Sampling(1, temperature=0),
    "top_k = 50": Sampling(1, top_k=50),
    "top_p = 0.95": Sampling(1, top_p=0.95),
    "both": Sampling(1, top_k=50, top_p=0.95),
    "min_p = 0.05": Sampling(1, min_p=0.05),
}
SMOKE = {"rows": 3, "vocabulary": [40], "repeats": 2, "seconds": 0.0}
Drawn = tuple[Tensor, Tensor]


def torch_side(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Drawn:
    """As where there is no compiler."""
    library = compiled.library
    compiled.library = lambda: None  # type: ignore[assignment]
    try:
        return sampler.sample_tokens(logits, uniform, sampling)
    finally:
        compiled.library = library


def least(sides: list[Callable[[], Drawn]], repeats: int, seconds: float) -> list[float]:
    """The shortest time of each, which take turns: as often as asked, and for so long at least."""
    found = [float("inf")] * len(sides)
    end, count = time.perf_counter() + seconds, 0
    while count < repeats or time.perf_counter() < end:
        for side, call in enumerate(sides):
            start = time.perf_counter()
            call()
            found[side] = min(found[side], time.perf_counter() - start)
        count += 1
    return found


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of threads, vocabulary and kind of sampling."""
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for vocabulary in arguments.vocabulary:
            generator = torch.Generator().manual_seed(0)
            logits = 3 * torch.randn(arguments.rows, vocabulary, generator=generator)
            uniform = torch.rand(arguments.rows, dtype=torch.float64, generator=generator)
            for case, sampling in CASES.items():
                given = logits, uniform, sampling
                old, new = torch_side(*given), sampler.sample_tokens(*given)
                assert torch.equal(old[0], new[0]), f"{case}: other tokens"
                torch.testing.assert_close(old[1], new[1], rtol=1e-12, atol=1e-12)
                sides: list[Callable[[], Drawn]] = [
                    lambda given=given: torch_side(*given),  # type: ignore[misc]
                    lambda given=given: sampler.sample_tokens(*given),  # type: ignore[misc]
                ]
                seconds = least(sides, arguments.repeats, arguments.seconds)
                rows.append(
                    {
                        "threads": threads,
                        "vocabulary": vocabulary,
                        "case": case,
                        "torch": seconds[0],
                        "compiled": seconds[1],
                        "ratio": seconds[0] / seconds[1],
                    }
                )
                print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table, in milliseconds."""
    old, new = (f"{1e3 * row[side]:.3g}" for side in ("torch", "compiled"))
    return (
        f"| {row['vocabulary']:,} | {row['case']} | {row['threads']} | {old} | {new} "
        f"| {row['ratio']:.1f} |"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="a case, at least")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        vars(arguments).update(SMOKE)
    print("| vocabulary | sampling | threads | torch, ms | compiled, ms | ratio |")
    print("|---|---|---|---|---|---|")
    before = torch.get_num_threads()
    try:
        rows = measure(arguments)
    finally:
        torch.set_num_threads(before)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
