"""How time grows: against tokens, rows, group size, prompt length and model width.

    python -m studies.growth                      # prints a Markdown table
    python -m studies.growth --series rows group --repeats 9 --json growth.json
    python -m studies.growth --smoke              # tiny, in seconds

The model is the fp32 Llama that `loop.py` has (256 wide, 6 layers), with random weights and an end
that is never drawn. Generation is `NativeEngine.sample`, an update forward and backward
(`keel.learn.learner.backward`) on made-up rollouts, in groups of 8. One thing grows at a time:

- length: generation of 16 completions, of 64 to 1,024 tokens each, after prompts of 16.
- length-shared: the same with one key-value head for four query heads, as most models now share
  them (Qwen2.5: one for six or seven, Llama 3: for four); the other series' has one for each.
- length-qwen: the same by a model as wide as Qwen2.5-0.5B, of 4 of its 24 layers: weights, and keys
  and values, grow alike with the layers. Its vocabulary is the others', so its head weighs nothing:
  the real one's would make a token cost more, and a length less.
- rows: generation of 8 to 128 completions of 64 tokens.
- group: `sample` for one token, thus the prefill, of a prompt of 1,000 for 1 to 64 completions.
- prompt: the same with a group of 8, and 125 to 2,000 tokens of prompt.
- sequences: an update from 8 to 128 completions of 60 tokens, after prompts of 20.
- update-length: an update from 8 completions of 64 to 1,024 tokens.
- update-prompt: an update from 8 completions of 50 tokens, after 125 to 2,000.
- width, update-width: generation of 64 completions of 32 tokens, and an update from 32 of 60, by a
  model 128 to 512 wide, whose weights grow with the square.

Sizes take turns, and the medians of the repeats are reported, with the least-squares slope of their
logarithms: time ~ size^slope. Attention alone grows with the square of a length, in any program.
`last` is the slope from the last size but one to the last, where fixed costs weigh least.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.loop_keel import end
from benchmarks.update import (
    BUDGET,
    FIRST,
    MODEL,
    SEED,
    SMALL,
    Case,
    built,
    grpo,
    learner_of,
    prepared,
    rollouts,
)
from keel.config.model import BuildModel
from keel.engines.native import NativeEngine
from keel.learn.learner import Learner, backward
from keel.models.build import build_model
from keel.types import Prompt, Sampling

GROUP = 8
Once = Callable[[], None]


@dataclass(frozen=True)
class Series:
    """What grows. `make` gives, for a size, something to be timed; `smoke` are tiny sizes."""

    name: str
    what: str
    sizes: tuple[int, ...]
    smoke: tuple[int, ...]
    make: Callable[[int], Once]


class Models:
    """One of each build, made when it is first asked for: the given one, but for some changes;
    `qwen` are those to the model of `length-qwen`."""

    def __init__(self, spec: BuildModel, qwen: Mapping[str, Any]) -> None:
        self.spec, self.qwen = spec, qwen
        self._engines: dict[str, NativeEngine] = {}
        self._learners: dict[int, Learner] = {}

    def learner(self, width: int) -> Learner:
        if width not in self._learners:
            spec = self.spec.model_copy(update={"hidden_size": width})
            self._learners[width] = learner_of(built(spec))
        return self._learners[width]

    def engine(self, **changes: Any) -> NativeEngine:
        """An engine whose model never ends a completion."""
        spec = self.spec.model_copy(update=changes)
        key = spec.model_dump_json()
        if key not in self._engines:
            model = build_model(spec, SEED, torch.float32)
            end(model, None)
            policy = built(spec)
            policy.model.load_state_dict(model.state_dict())
            self._engines[key] = NativeEngine(policy.model, policy.tokenizer)
        return self._engines[key]


# ---------------------------------------------------------------- what is timed


def generating(engine: NativeEngine, rows: int, group: int, prompt: int, length: int) -> Once:
    """So many completions, all of this length."""
    rng = np.random.default_rng(SEED)
    vocabulary = int(engine.model.config.vocab_size)
    prompts = [
        Prompt(f"{number}", "", tokens=tuple(rng.integers(FIRST, vocabulary, prompt).tolist()))
        for number in range(rows // group)
    ]

    def once() -> None:
        made = engine.sample(prompts, group, Sampling(max_tokens=length), SEED)
        lengths = [len(one) for groups in made for one in groups.completions]
        assert lengths == [length] * rows, "a completion ended early"

    return once


def learning(learner: Learner, case: Case) -> Once:
    """Forward and backward on the case's rollouts."""
    row = grpo()
    vocabulary = int(learner.policy.model.config.vocab_size)
    batch = prepared(row, rollouts(vocabulary, case), shared=True)

    def once() -> None:
        learner.clear()
        # A batch keeps what it works out of itself, and a run has a new one each step.
        backward(learner, row, replace(batch), 0.0, BUDGET)

    return once


TOKENS, COUNTS = (64, 128, 256, 512, 1024), (8, 16, 32, 64, 128)
PROMPTS, WIDTHS = (125, 250, 500, 1000, 2000), (128, 256, 384, 512)
QWEN = {
    "family": "qwen2",
    "tokenizer": "bytes",
    "hidden_size": 896,
    "layers": 4,
    "heads": 14,
    "kv_heads": 2,
    "intermediate_size": 4864,
}
FEW, NARROW = (8, 16), (16, 32)
"""Sizes of a smoke run."""


def every(models: Models) -> list[Series]:
    """All series, in the order of the table."""
    return [*generations(models), *prefills(models), *updates(models)]


def generations(models: Models) -> list[Series]:
    def make(rows: int, length: int, **changes: Any) -> Once:
        return generating(models.engine(**changes), rows, GROUP, 16, length)

    def by_length(name: str, more: str = "", **changes: Any) -> Series:
        what = f"generation, tokens of a completion{more}"
        return Series(name, what, TOKENS, FEW, lambda n: make(16, n, **changes))

    return [
        by_length("length"),
        by_length("length-shared", ", heads shared", kv_heads=1),
        by_length("length-qwen", ", as wide as Qwen2.5-0.5B", **models.qwen),
        Series("rows", "generation, completions", COUNTS, FEW, lambda n: make(n, 64)),
        Series(
            "width",
            "generation, model width",
            WIDTHS,
            NARROW,
            lambda n: make(64, 32, hidden_size=n),
        ),
    ]


def prefills(models: Models) -> list[Series]:
    def make(group: int, prompt: int) -> Once:
        return generating(models.engine(), group, group, prompt, 1)

    by_group, by_prompt = (lambda n: make(n, 1000)), (lambda n: make(GROUP, n))
    return [
        Series("group", "prefill, completions of a group", (1, 4, 16, 64), (1, 4), by_group),
        Series("prompt", "prefill, tokens of a prompt", PROMPTS, FEW, by_prompt),
    ]


def updates(models: Models) -> list[Series]:
    own = models.spec.hidden_size

    def make(width: int, sequences: int, prompt: int, length: int) -> Once:
        return learning(models.learner(width), Case("equal", prompt, GROUP, sequences, length))

    by_count, by_length = (lambda n: make(own, n, 20, 60)), (lambda n: make(own, GROUP, 20, n))
    by_prompt, by_width = (lambda n: make(own, GROUP, n, 50)), (lambda n: make(n, 32, 20, 60))
    return [
        Series("sequences", "update, sequences", COUNTS, FEW, by_count),
        Series("update-length", "update, tokens of a completion", TOKENS, FEW, by_length),
        Series("update-prompt", "update, tokens of a prompt", PROMPTS, FEW, by_prompt),
        Series("update-width", "update, model width", WIDTHS, NARROW, by_width),
    ]


# ---------------------------------------------------------------- figures


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent that fits best, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def measure(series: Series, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """A row's figures: the medians of each size, and their slopes."""
    made = {size: series.make(size) for size in sizes}
    made[sizes[0]]()
    passes: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(repeats):
        turn = number % len(sizes)
        for size in [*sizes[turn:], *sizes[:turn]]:
            start = time.perf_counter()
            made[size]()
            passes[size].append(time.perf_counter() - start)
    medians = [statistics.median(passes[size]) for size in sizes]
    return {
        "series": series.name,
        "what": series.what,
        "sizes": list(sizes),
        "seconds": medians,
        "exponent": slope(sizes, medians),
        "last_exponent": slope(sizes[-2:], medians[-2:]),
        "last_over_first": medians[-1] / medians[0],
        "passes": [passes[size] for size in sizes],
    }


HEAD = (
    "| series | time of | seconds by size | exponent | last | last / first |\n" + "|---" * 6 + "|"
)


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    points = zip(row["sizes"], row["seconds"], strict=True)
    message = ", ".join(f"{size:,}: {seconds:.3g}" for size, seconds in points)
    return (
        f"| {row['series']} | {row['what']} | {message} | {row['exponent']:.2f} "
        f"| {row['last_exponent']:.2f} | {row['last_over_first']:.2f} |"
    )


def report(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the file; None is a figure whose series was not asked for."""
    named = {row["series"]: row for row in rows}

    def figure(series: str, key: str) -> float | None:
        found: float | None = named.get(series, {}).get(key)
        return found

    return {
        "generation_exponent": figure("length", "exponent"),
        "generation_shared_exponent": figure("length-shared", "exponent"),
        "generation_qwen_exponent": figure("length-qwen", "exponent"),
        "generation_rows_exponent": figure("rows", "exponent"),
        "update_exponent": figure("sequences", "exponent"),
        "prefill_group_ratio": figure("group", "last_over_first"),
        "rows": rows,
        "settings": settings,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [one.name for one in every(Models(MODEL, QWEN))]
    parser.add_argument(
        "--series", nargs="+", choices=names, metavar="SERIES", help=", ".join(names)
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(words)
    if min(arguments.repeats, arguments.threads) < 1:
        parser.error("--repeats and --threads have to be 1 or more")
    torch.set_num_threads(arguments.threads)
    smoke = arguments.smoke
    models = (
        Models(SMALL, {"family": "qwen2", "tokenizer": "bytes"}) if smoke else Models(MODEL, QWEN)
    )
    repeats = 1 if smoke else arguments.repeats
    print(f"{os.cpu_count()} cores, {arguments.threads} threads, medians of {repeats}\n\n{HEAD}")
    rows = []
    for one in every(models):
        if arguments.series is None or one.name in arguments.series:
            rows.append(measure(one, one.smoke if smoke else one.sizes, repeats))
            print(line(rows[-1]), flush=True)
    settings = {
        "threads": arguments.threads,
        "repeats": repeats,
        "model": models.spec.model_dump(),
        "qwen": models.qwen,
    }
    written = json.dumps(report(rows, {**settings, "smoke": smoke}), indent=2) + "\n"
    if arguments.json:
        arguments.json.write_text(written, "utf-8")


if __name__ == "__main__":
    main()
