"""What to expect on one GPU, counted from bytes and operations: the table of docs/performance.md.

    python -m benchmarks.expected            # print the table

Counted are a decoded step at the card's bandwidth, the loop if generation takes 1.7 times that and
the update reaches the share of the peak that is asked for, and the memory of three recipes. Nothing
is measured here; `python -m benchmarks.gpu` measures the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from keel.analysis.cards import CARDS, GIB, Card, card
from keel.analysis.costs import Budget, MemoryPlan, Shape, attention_pairs, floor_ms
from keel.models.head import GPU_SHARE
from keel.models.shape import shape_of, without_weights

SIZES = {
    "0.5B": (896, 24, 14, 2, 4864),
    "1.5B": (1536, 28, 12, 2, 8960),
    "7B": (3584, 28, 28, 4, 18944),
}
"""Of Qwen2.5: hidden size, layers, heads, key heads, features of the MLP."""
UTILISATION = {"0.5B": 0.35, "1.5B": 0.45}
"""Asked of the update, as a share of the peak."""
SLOWER = 1.7
"""Asked of a decoded step: at most this many times its floor."""
ROWS, CONTEXTS, SHOWN = (8, 64, 256), (512, 2048), ("h100",)
COMPLETIONS, MEAN, LONGEST, PROMPT = 256, 200, 512, 100
GROUP = 8
"""A step of the loop: completions, their mean and longest tokens, tokens of a prompt, of which a
group has one."""
MEASURED = Path(__file__).with_name("measured.json")
"""Rows of `benchmarks.gpu` on one card."""
TRL = 2_219
"""Tokens a second of TRL 1.16 on an H200 with this loop at 0.5B."""


def config_of(size: str, **keys: Any) -> Qwen2Config:
    """A Qwen2.5; the head is the embedding but at 7B."""
    hidden, layers, heads, keys_heads, mlp = SIZES[size]
    tied = size != "7B"
    return Qwen2Config(**{
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys_heads, "intermediate_size": mlp, "tie_word_embeddings": tied,
        "vocab_size": 151_936 if tied else 152_064, **keys,
    })  # fmt: skip


def qwen(size: str) -> Shape:
    """Its shape."""
    return shape_of(without_weights(config_of(size)))


def loop_tokens(shape: Shape, one: Card, utilisation: float, slower: float = SLOWER) -> float:
    """Completion tokens a second of a step: generation, a forward pass, an update.

    Generation runs until the longest completion ends and reads the weights in each step, and for
    each token the cache before it (lengths as if exponential: E[n²] = 2 · mean²).
    """
    assert one.bandwidth is not None
    assert one.peak is not None
    tokens = COMPLETIONS * MEAN
    cached = shape.cached_bytes() * (tokens * PROMPT + COMPLETIONS * MEAN**2)
    read = LONGEST * shape.decoded_bytes(0, 0) + cached
    generation = slower * read / one.bandwidth
    lengths = [PROMPT + MEAN] * COMPLETIONS
    shared = [PROMPT if at % GROUP else 0 for at in range(COMPLETIONS)]
    entering, pairs = sum(lengths) - sum(shared), attention_pairs(lengths, shared)
    operations = shape.forward(entering, pairs, tokens) + shape.update(entering, pairs, tokens)
    return tokens / (generation + operations / utilisation / one.peak)


def plans() -> dict[str, tuple[MemoryPlan, str]]:
    """Three recipes with the size that is asked of each."""

    def plan(size: str, tokens: int, **changes: Any) -> MemoryPlan:
        whole = MemoryPlan(shape=qwen(size), tokens=tokens, longest=1024, rows=COMPLETIONS)
        return replace(whole, **changes)

    adapters = {"quantised": True, "copied": False, "rank": 16, "adapted": qwen("7B").adapted}
    return {
        "0.5B full, `token_budget` 16,384": (plan("0.5B", 16_384), ""),
        "1.5B full, checkpointing, 4,096": (plan("1.5B", 4_096, checkpointed=None), "≤ 40 GiB"),
        "7B, NF4 and LoRA, checkpointing, 4,096": (
            plan("7B", 4_096, checkpointed=None, **adapters),
            "≤ 24 GB",
        ),
    }


def table() -> Iterator[str]:
    """The lines of the table, in Markdown."""
    cards = [CARDS[name] for name in SHOWN]
    names = " | ".join(f"{one.name}, counted" for one in cards)
    found = json.loads(MEASURED.read_text("utf-8"))

    def measured(what: str) -> str:
        return str(found["rows"].get(what, "not measured"))

    yield f"| | {names} | {found['card']}, measured | asked |"
    yield "|---|" + "---|" * (len(cards) + 2)
    for size in UTILISATION:
        shape = qwen(size)
        for context in CONTEXTS:
            for rows in ROWS:
                floors = [floor_ms(shape, rows, context, one.bandwidth or 1.0) for one in cards]
                cells = " | ".join(f"{floor:.2f}" for floor in floors)
                asked = f"≤ {SLOWER} × the floor" if rows == max(ROWS) else ""
                what = f"decoded step, ms: {size}, {rows} rows of {context:,}"
                yield f"| {what} | {cells} | {measured(what)} | {asked} |"
    for size, share in UTILISATION.items():
        rates = [loop_tokens(qwen(size), one, share) for one in cards]
        cells = " | ".join(f"{round(rate, -3):,.0f}" for rate in rates)
        asked = f"≥ {10 * TRL:,}" if size == "0.5B" else ""
        what = f"loop, completion tokens/s: {size}"
        yield f"| {what} | {cells} | {measured(what)} | {asked} |"
    for size, share in UTILISATION.items():
        cells = " | ".join("" for _ in cards)
        what = f"MFU of the update, %: {size}"
        yield f"| {what} | {cells} | {measured(what)} | ≥ {100 * share:.0f} |"
    for what, (plan, asked) in plans().items():
        sizes = [Budget(plan, one).total / GIB for one in cards]
        if "24" in asked:
            small = replace(plan, chunk=24e9 // GPU_SHARE)
            sizes = [Budget(small, card("24GB")).total / GIB] * len(cards)
        cells = " | ".join(f"{size:.1f}" for size in sizes)
        peak = measured(f"peak memory, GiB: {what}")
        yield f"| memory without cache, GiB: {what} | {cells} | {peak} | {asked} |"
    blank = " | ".join("" for _ in cards)
    yield f"| quickstart, s a step | {blank} | {measured('quickstart, s a step')} | ≤ 0.1 |"


if __name__ == "__main__":
    print("\n".join(table()))
