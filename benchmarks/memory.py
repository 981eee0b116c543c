"""Peak memory of log-probabilities, forward and backward: all logits at once, and in chunks.

    python -m benchmarks.memory [--json FILE] [--vocabulary V] [--hidden H] [--tokens N ...]
    python -m benchmarks.memory --smoke              # tiny, in seconds

Each variant runs in a fresh process, which reports how far its resident memory rose above what the
inputs (hidden states and output weights) already took. Both end with the same gradients, of hidden
states and of the output weights, and these are in the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.sides import answer, begin, measure, parser, resident, row, save

VOCABULARY, HIDDEN = 151_936, 896
"""Of Qwen2.5-0.5B."""
MIB = 2**20


def figures(job: dict[str, Any]) -> dict[str, float]:
    """Run one variant here."""
    import torch
    import torch.nn.functional as F

    from keel.models.head import Head, log_probs

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    states = torch.empty(job["tokens"], job["hidden"]).normal_().requires_grad_()
    weight = torch.empty(job["vocabulary"], job["hidden"]).normal_(std=0.02).requires_grad_()
    token = torch.randint(0, job["vocabulary"], (job["tokens"],))
    before = resident(peak=False)
    start = time.perf_counter()
    if job["variant"] == "naive":
        values = F.linear(states, weight).log_softmax(1).gather(1, token[:, None])[:, 0]
    else:
        values = log_probs(states, Head(weight), token)
    values.mean().backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    assert states.grad is not None
    assert weight.grad is not None
    return {
        "bytes": resident(peak=True) - before,
        "seconds": seconds,
        "mean": values.mean().item(),
        "states_grad": states.grad.norm().item(),
        "weight_grad": weight.grad.norm().item(),
    }


def compare(tokens: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Both variants; raises if their results differ."""
    job = {"tokens": tokens, **{k: getattr(chosen, k) for k in ("vocabulary", "hidden", "threads")}}
    naive, chunked = (
        measure("memory.py", {**job, "variant": variant}) for variant in ("naive", "chunked")
    )
    for key in ("mean", "states_grad", "weight_grad"):
        gap = abs(naive[key] - chunked[key])
        assert gap <= 1e-4 * abs(naive[key]), f"{key} differs by {gap}"
    return {
        "tokens": tokens,
        "naive": naive,
        "chunked": chunked,
        "ratio": naive["bytes"] / chunked["bytes"],
    }


def main(words: Sequence[str] | None = None) -> None:
    asked = parser(__doc__)
    asked.add_argument("--vocabulary", type=int, default=VOCABULARY)
    asked.add_argument("--hidden", type=int, default=HIDDEN)
    asked.add_argument("--tokens", type=int, nargs="+", default=[2_048])
    chosen = asked.parse_args(words)
    if chosen.smoke:
        chosen.vocabulary, chosen.hidden, chosen.tokens = 20_000, 32, [1_024]
    gradient = 4 * chosen.vocabulary * chosen.hidden / MIB
    print(f"vocabulary {chosen.vocabulary:,}, hidden {chosen.hidden}, float32; {gradient:,.0f}")
    print("MiB are the gradient of the output weights, in both")
    sides = ("all at once, MiB", "in chunks, MiB", "ratio", "seconds", "in chunks, s")
    begin(chosen.threads, "tokens", *sides)
    rows = []
    for tokens in chosen.tokens:
        rows.append(found := compare(tokens, chosen))
        both = (found["naive"], found["chunked"])
        sizes = [f"{one['bytes'] / MIB:,.0f}" for one in both]
        row(
            f"{tokens:,}",
            *sizes,
            f"{found['ratio']:.1f}",
            *(f"{one['seconds']:.1f}" for one in both),
        )
    save(chosen.json, rows)


if __name__ == "__main__":
    import sys

    if len(sys.argv) == 3 and sys.argv[1].endswith("job.json"):
        answer(figures)
    else:
        main()
