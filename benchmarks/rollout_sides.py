"""The sides of `rollout.py` that need Keel's own environment; it starts each as a process.

python -m benchmarks.rollout_sides NAME JOB.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rollout_vllm import Pass, prompts_of, serve


def keel(job: dict[str, Any], rounded: bool = False) -> Pass:
    """The native engine, as a run has it."""
    import torch

    from keel.config.model import Model
    from keel.engines.native import NativeEngine
    from keel.models.policy import load_policy
    from keel.types import Prompt, Sampling

    policy = load_policy(Model(name=job["model"], device="cpu"), 0)
    dtype = torch.bfloat16 if rounded else None
    engine = NativeEngine(policy.model, policy.tokenizer, dtype=dtype)
    chosen = prompts_of(job)
    sampling = Sampling(max_tokens=job["max_tokens"])

    def once(number: int) -> Sequence[int]:
        prompts = [
            Prompt(f"{number}-{at}", "", tokens=tuple(ids)) for at, ids in enumerate(chosen(number))
        ]
        groups = engine.sample(prompts, job["group"], sampling, number)
        return [len(one.tokens) for group in groups for one in group.completions]

    return once


def generate(job: dict[str, Any]) -> Pass:
    """transformers' `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"]).eval()
    chosen, settings = prompts_of(job), drawing(job)
    pad, eos = model.config.pad_token_id, model.config.eos_token_id

    def once(number: int) -> Sequence[int]:
        torch.manual_seed(number)
        prompts = chosen(number)
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(one)) + one for one in prompts])
        seen = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        new = model.generate(ids, attention_mask=seen, **settings)[:, width:]
        ended = new == eos
        # A pad may be drawn as any token, so that the end alone tells where a completion ends.
        ends = torch.where(ended.any(1), ended.int().argmax(1) + 1, new.shape[1])
        lengths: list[int] = ends.tolist()
        return lengths

    return once


def continuous(job: dict[str, Any]) -> Pass:
    """transformers' continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(job["model"]).eval()
    ends = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id}
    settings = GenerationConfig(**drawing(job), **ends)
    pages = 2 * job["completions"] * (1 + job["longest"] // ContinuousBatchingConfig().page_size)
    options = ContinuousBatchingConfig(num_blocks=pages)
    chosen = prompts_of(job)

    def once(number: int) -> Sequence[int]:
        torch.manual_seed(number)
        found = model.generate_batch(
            chosen(number),
            generation_config=settings,
            continuous_batching_config=options,
            persistent_manager=True,
        )
        lengths = [len(one.generated_tokens) for one in found.values()]
        assert len(lengths) == job["completions"], "a request failed"
        return lengths

    return once


def drawing(job: dict[str, Any]) -> dict[str, Any]:
    """How transformers is to draw."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "num_return_sequences": job["group"],
        "max_new_tokens": job["max_tokens"],
    }


def main(name: str, job: dict[str, Any]) -> None:
    """Be a side."""
    import torch

    torch.set_num_threads(job["threads"])
    build = {
        "keel": keel,
        "keel-bf16": partial(keel, rounded=True),
        "generate": generate,
        "continuous": continuous,
    }[name]
    serve(lambda: build(job))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text("utf-8")))
