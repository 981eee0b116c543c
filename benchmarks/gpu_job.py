"""What the parts of `gpu.py` share: sizes, models with random weights, rows, timing."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import expected as expectation
from benchmarks.sides import SEED, Size, chance, end
from keel.analysis.cards import GIB, Card, card_named

TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
}


@dataclass
class Job:
    """What a part is given: sizes are toys in a dry run, rows are written as they come."""

    dry: bool
    folder: Path
    rows: Path
    size: str = ""
    saving: bool = False
    compiled: bool = False
    trl_python: str | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights that sample."""
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def work(self) -> Size:
        """Of the loop: completions, their mean and longest tokens, tokens of a prompt."""
        if self.dry:
            return Size(64, 2, 16, 8, 24, (6, 10))
        own = expectation
        return Size(
            0, 0, own.COMPLETIONS, own.MEAN, own.LONGEST, (own.PROMPT - 10, own.PROMPT + 10)
        )

    def row(self, what: str, measured: Any = None, **more: Any) -> None:
        """Write a row: `expected`, `asked` (words), `met`, `note`."""
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "measured": measured, **more}) + "\n")

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], Any], repeats: int = 5, calls: int = 10) -> float:
        """Median seconds of a call on the device, of `calls` that follow each other."""
        call()
        found = []
        for _ in range(1 if self.dry else repeats):
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self.wait()
            found.append((time.perf_counter() - start) / calls)
        return statistics.median(found)

    def shrink(self, size: float) -> None:
        """Make the card as small as this, in bytes, of which a GiB is CUDA's own."""
        if not self.dry:
            share = (size - GIB) / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    def bandwidth(self) -> float:
        """Bytes a second that a copy reads and writes."""
        source = torch.ones((2**16 if self.dry else 2**31) // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * 4 * source.numel() / self.timed(lambda: target.copy_(source))

    def config(self, size: str) -> Any:
        """A Qwen2.5, or a toy."""
        toy = TOY if self.dry else {}
        own = {"max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0}
        return expectation.config_of(size, bos_token_id=None, **own, **toy)

    def model(self, size: str, dtype: torch.dtype) -> Any:
        """Random weights on the card, with ends at the rate that `work` asks for."""
        from transformers import AutoModelForCausalLM

        from keel.config.model import Model
        from keel.models.families import note_choices

        torch.manual_seed(SEED)
        with torch.device(self.device):
            made = AutoModelForCausalLM.from_config(self.config(size), dtype=dtype)
        end(made, chance(self.work.mean, self.work.most))
        note_choices(made, Model(name="random"))
        return made

    def tokenizer(self, size: str) -> Any:
        """A character for each token of the vocabulary, a to z first."""
        from keel.models.build import character_tokenizer

        letters = [chr(97 + at) for at in range(26)]
        rest = self.config(size).vocab_size - len(letters) - 2
        return character_tokenizer(
            "".join([*letters, *(chr(0x10000 + i) for i in range(rest))]), 4096
        )


def seen() -> Card:
    """The card that is here; its bandwidth and peak are None if it is not known."""
    found = torch.cuda.get_device_properties(0)
    return card_named(found.name, found.total_memory)
