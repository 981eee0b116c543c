"""Peak memory of log-probabilities, forward and backward: naive against chunked.

Each variant runs in a fresh process, which reports how far its resident memory rose above what the
inputs (hidden states and output weights) already took. Both variants end with the same gradients,
of hidden states and of the output weights, and these are in the figures.

    python -m benchmarks.memory [--json FILE] [--vocabulary V] [--hidden H] [--tokens N ...]
    python -m benchmarks.memory --smoke              # tiny, in seconds

`share`, in the file, is the chunked peak over the naive one: of each row, and the largest of all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN = 151_936, 896
"""Of Qwen2.5-0.5B."""
TOKENS = (2_048, 8_192)
NAIVE_LIMIT = 6 * 2**30
"""Bytes of one float32 logits matrix × 4 beyond which the naive variant is extrapolated."""
SMOKE = {"vocabulary": 20_000, "hidden": 32, "tokens": [1_024]}


def resident(peak: bool) -> int:
    """Bytes of resident memory of this process: now, or the most it ever was (Linux)."""
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status: this benchmark needs Linux")


def measure(variant: str, vocabulary: int, hidden: int, tokens: int, threads: int) -> None:
    """Run one variant here and print its figures as JSON."""
    import torch
    import torch.nn.functional as F

    from keel.models.head import Head, log_probs

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    states = torch.empty(tokens, hidden).normal_().requires_grad_()
    weight = torch.empty(vocabulary, hidden).normal_(std=0.02).requires_grad_()
    token = torch.randint(0, vocabulary, (tokens,))
    before = resident(peak=False)
    start = time.perf_counter()
    if variant == "naive":
        values = F.linear(states, weight).log_softmax(1).gather(1, token[:, None])[:, 0]
    else:
        values = log_probs(states, Head(weight), token)
    values.mean().backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    assert states.grad is not None
    assert weight.grad is not None
    print(
        json.dumps(
            {
                "bytes": resident(peak=True) - before,
                "seconds": seconds,
                "mean": values.mean().item(),
                "states_grad": states.grad.norm().item(),
                "weight_grad": weight.grad.norm().item(),
            }
        )
    )


def in_fresh_process(variant: str, arguments: argparse.Namespace, tokens: int) -> dict[str, float]:
    """The figures of one variant, from a process of its own."""
    command = [sys.executable, __file__, "--variant", variant, "--tokens", str(tokens)]
    for key in ("vocabulary", "hidden", "threads"):
        command += [f"--{key}", str(getattr(arguments, key))]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of tokens; the naive figure is extrapolated where it is too large."""
    rows: list[dict[str, Any]] = []
    gradient = 4 * arguments.vocabulary * arguments.hidden
    per_token: float | None = None
    for tokens in arguments.tokens:
        chunked = in_fresh_process("chunked", arguments, tokens)
        small = 16 * arguments.vocabulary * tokens <= NAIVE_LIMIT or per_token is None
        if small:
            naive = in_fresh_process("naive", arguments, tokens)
            per_token = (naive["bytes"] - gradient) / tokens
            for key in ("mean", "states_grad", "weight_grad"):
                gap = abs(naive[key] - chunked[key])
                assert gap <= 1e-4 * abs(naive[key]), f"{key} differs by {gap}"
        else:
            assert per_token is not None
            naive = {"bytes": per_token * tokens + gradient}
        rows.append(
            {
                "tokens": tokens,
                "naive_bytes": naive["bytes"],
                "naive_measured": small,
                "naive_seconds": naive.get("seconds"),
                "chunked_bytes": chunked["bytes"],
                "chunked_seconds": chunked["seconds"],
                "ratio": naive["bytes"] / chunked["bytes"],
                "share": chunked["bytes"] / naive["bytes"],
                "ratio_without_weight_gradient": (naive["bytes"] - gradient)
                / max(chunked["bytes"] - gradient, 1),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], gradient: int) -> str:
    """The rows for people, in MiB."""
    lines = [
        f"of which {gradient / 2**20:,.0f} MiB are the gradient of the output weights, in both",
        "",
        f"{'tokens':>8} {'naive MiB':>12} {'chunked MiB':>12} {'ratio':>7} "
        f"{'besides gradient':>17} {'naive s':>8} {'chunked s':>10}",
    ]
    for row in rows:
        mark = " " if row["naive_measured"] else "*"
        seconds = "" if row["naive_seconds"] is None else f"{row['naive_seconds']:.1f}"
        lines.append(
            f"{row['tokens']:>8} {row['naive_bytes'] / 2**20:>11,.0f}{mark} "
            f"{row['chunked_bytes'] / 2**20:>12,.0f} {row['ratio']:>6.1f}x "
            f"{row['ratio_without_weight_gradient']:>16.1f}x "
            f"{seconds:>8} {row['chunked_seconds']:>10.1f}"
        )
    if not all(row["naive_measured"] for row in rows):
        lines.append("* extrapolated in proportion to the tokens")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny, in seconds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--variant", choices=("naive", "chunked"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.variant:
        measure(
            arguments.variant,
            arguments.vocabulary,
            arguments.hidden,
            arguments.tokens[0],
            arguments.threads,
        )
        return
    if arguments.smoke:
        vars(arguments).update(SMOKE)
    rows = compare(arguments)
    print(
        f"peak memory above the inputs, log-probabilities forward and backward; vocabulary "
        f"{arguments.vocabulary:,}, hidden {arguments.hidden}, float32,"
    )
    print(table(rows, 4 * arguments.vocabulary * arguments.hidden))
    if arguments.json:
        settings = {key: getattr(arguments, key) for key in ("vocabulary", "hidden", "threads")}
        written = {**settings, "share": max(row["share"] for row in rows), "rows": rows}
        Path(arguments.json).write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
