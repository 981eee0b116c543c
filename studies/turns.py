"""Conversations with and without the engine's memory of earlier turns.

    python -m studies.turns                  # prints a Markdown table
    python -m studies.turns --threads 1 --repeats 5
    python -m studies.turns --smoke          # tiny, in seconds

64 conversations, groups of 8 for 8 prompts of 500 random tokens, of the fp32 Llama that `update.py`
has (256 wide, 6 layers): 4 turns whose end is as likely at every token, 60 tokens on average, and
after each a reply of 20. Both sides go through `generate_multi_turn`, which calls the engine once a
turn; one of them is not offered a memory. They take turns in going first; figures are medians,
the fastest and slowest, and how many tokens went through the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.loop_keel import chance, end
from benchmarks.update import FIRST, MODEL, SEED, SMALL
from keel.config.model import BuildModel
from keel.engines.compiled import CompiledRunner
from keel.engines.multi_step import MultiStep
from keel.engines.multi_turn import generate_multi_turn
from keel.engines.native import NativeEngine
from keel.models.build import build_model, build_tokenizer
from keel.models.chat import ChatEncoder
from keel.types import Engine, Prompt, Sampling

SIDES = ("with", "without")


@dataclass(frozen=True)
class Size:
    model: BuildModel = MODEL
    prompts: int = 8
    group: int = 8
    prompt: int = 500
    turns: int = 4
    words: int = 60
    reply: int = 20


TINY = Size(SMALL, prompts=2, group=2, prompt=20, turns=3, words=6, reply=3)


class Replying:
    """A task that says the same so often as it is asked."""

    def __init__(self, reply: int) -> None:
        self._said = "a" * reply

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return self._said


class Forgetful(NativeEngine):
    """The engine without a prefix cache."""

    def __init__(self, engine: NativeEngine) -> None:
        vars(self).update(vars(engine))

    def conversation(self) -> AbstractContextManager[Engine]:  # type: ignore[override]
        return nullcontext(self)


class Talk:
    """The model and the prompts; `once` times one of the sides."""

    def __init__(self, size: Size) -> None:
        self.size = size
        model = build_model(size.model, SEED, torch.float32)
        self.tokenizer = build_tokenizer(size.model)
        most = 50 * size.words
        end(model, chance(size.words, most))
        self.engine = NativeEngine(model, self.tokenizer)
        self.sampling = Sampling(max_tokens=most)
        drawn = np.random.default_rng(SEED).integers(
            FIRST, len(self.tokenizer), (size.prompts, size.prompt)
        )
        self.prompts = [
            Prompt(f"{number}", "", task="talk", tokens=tuple(row))
            for number, row in enumerate(drawn.tolist())
        ]

    def once(self, side: str) -> tuple[float, int]:
        """Seconds, and the tokens that went through the model."""
        engine: Any = self.engine if side == "with" else Forgetful(self.engine)
        tasks: Any = {"talk": Replying(self.size.reply)}
        with tokens_fed() as fed:
            start = time.perf_counter()
            generate_multi_turn(
                engine,
                self.prompts,
                self.size.group,
                self.sampling,
                SEED,
                tasks=tasks,
                chat=ChatEncoder(self.tokenizer),
                max_turns=self.size.turns,
            )
            return time.perf_counter() - start, sum(fed)


@contextmanager
def tokens_fed() -> Iterator[list[int]]:
    """How many tokens each call of compiled code was given."""
    counts: list[int] = []
    one, some = CompiledRunner.__call__, MultiStep.__call__

    def one_step(own: Any, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(tokens))
        return one(own, tokens, *rest)

    def some_steps(own: Any, *given: Any) -> Any:
        tokens, log_probs = some(own, *given)
        counts.append(tokens.size)
        return tokens, log_probs

    one_by_one = patch.object(CompiledRunner, "__call__", one_step)
    with one_by_one, patch.object(MultiStep, "__call__", some_steps):
        yield counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path, help="where figures are written")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    talk = Talk(TINY if args.smoke else Size())
    printed: dict[str, list[tuple[float, int]]] = {side: [] for side in SIDES}
    for repeat in range(1 if args.smoke else args.repeats):
        for side in SIDES if repeat % 2 else SIDES[::-1]:
            printed[side].append(talk.once(side))
    print("| memory | seconds | fastest to slowest | tokens through the model |\n|---|---|---|---|")
    for side, runs in printed.items():
        seconds = [second for second, _ in runs]
        middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
        print(f"| {side} | {middle:.1f} | {low:.1f} to {high:.1f} | {runs[0][1]:,} |")
    if args.json:
        args.json.write_text(json.dumps(printed), "utf-8")


if __name__ == "__main__":
    main()
